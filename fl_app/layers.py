"""How one clipping norm C and one noise multiplier z are spread over the layers of a model.

Per-layer clipping (McMahan et al. 2018, arXiv:1710.06963) bounds layer l by C_l, and these combine
to C: their L2 norm is C (LAPLACE: their sum). Layers may have noise of different scales s_l
(McMahan et al. 2018, arXiv:1812.06210, for Gaussian noise and norms by layer). If each layer is
divided by its s_l, the noise has scale 1 everywhere, and one contribution is at most as long as

    GAUSSIAN, per layer: sqrt(sum_l (C_l / s_l)^2)      LAPLACE, per layer: sum_l C_l / s_l
    one norm over all layers, both: max_l C / s_l

The division can be undone, so the release costs what it costs with it: noise of multiplier z if
that length is 1 / z. The scales are the given levels times the one number that makes it so, and
accounting, calibration and ledger know z alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fl_app import checks
from fl_app.errors import PrivacyError
from fl_app.privacy import NoiseKind

FLAT, PER_LAYER = "flat", "per_layer"

_SHARES = (1e-3, 1e3)
"""Between these a layer's norm and noise stay in the range where float32 clips exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShares:
    """The norm and the noise of each of L layers, in units of C and z C.

    Attributes:
        norms: C_l / C; None: one norm over all layers.
        noises: s_l / (z C), s_l the noise scale of layer l; None: z C in every layer.
    """

    norms: tuple[float, ...] | None
    noises: tuple[float, ...] | None


def check(
    section: str,
    clipping: str,
    layer_norms: tuple[float, ...] | None,
    layer_noise: tuple[float, ...] | None,
) -> None:
    """Refuses values of the keys ``clipping``, ``layer_norms`` and ``layer_noise`` of `section`.

    Raises:
        SettingsError: naming the key and the value.
    """
    checks.one_of(f"{section}.clipping", clipping, (FLAT, PER_LAYER))
    if layer_norms is not None and clipping == FLAT:
        raise checks.fail(
            f"{section}.layer_norms",
            f"(list of {len(layer_norms)})",
            f"clips layer by layer, but {section}.clipping={FLAT}",
            f"set {section}.clipping={PER_LAYER}, or layer_norms=null",
        )
    for name, values in (("layer_norms", layer_norms), ("layer_noise", layer_noise)):
        for number, value in enumerate(values or ()):
            _check_share(f"{section}.{name}[{number}]", value)


def _check_share(key: str, value: float) -> None:
    least, largest = _SHARES
    if not least <= checks.positive(key, value) <= largest:
        raise checks.fail(
            key,
            value,
            f"must be from {least:g} to {largest:g}",
            "only the ratios between layers count; choose a smaller range",
        )


def check_number(
    section: str,
    num_layers: int,
    layer_norms: tuple[float, ...] | None,
    layer_noise: tuple[float, ...] | None,
) -> None:
    """Refuses lists that have not one number for each of `num_layers` layers.

    Raises:
        SettingsError: naming the key and both numbers.
    """
    for name, values in (("layer_norms", layer_norms), ("layer_noise", layer_noise)):
        if values is not None and len(values) != num_layers:
            raise checks.fail(
                f"{section}.{name}",
                f"(list of {len(values)})",
                f"must have one number for each of the model's {num_layers} parameter tensors",
                "a linear layer has two, its weight and its bias",
            )


def shares_of(
    kind: NoiseKind,
    num_layers: int,
    clipping: str,
    layer_norms: tuple[float, ...] | None,
    layer_noise: tuple[float, ...] | None,
) -> LayerShares:
    """Returns what each layer has of C and of z C.

    Guarantee:
        The norms combine to C, and noise of scale s_l in layer l costs what noise of scale z C
        on all of a contribution of norm C costs, up to float64 rounding.

    Args:
        kind: LAPLACE bounds L1 norms; otherwise they are L2 norms.
        num_layers: L.
        clipping: `FLAT` or `PER_LAYER`.
        layer_norms: C_l up to a common factor; None: all equal.
        layer_noise: s_l up to a common factor; None: all equal.

    Raises:
        PrivacyError: a list has another length than L.
    """
    if any(
        values is not None and len(values) != num_layers for values in (layer_norms, layer_noise)
    ):
        raise PrivacyError(f"layers: every list must have {num_layers} numbers, one a layer")
    norms = None
    if clipping == PER_LAYER:
        weights = layer_norms or (1.0,) * num_layers
        whole = _combined(kind, weights)
        norms = tuple(weight / whole for weight in weights)
    if layer_noise is None:
        return LayerShares(norms=norms, noises=None)
    if norms is None:
        longest = 1 / min(layer_noise)
    else:
        longest = _combined(kind, [n / s for n, s in zip(norms, layer_noise, strict=True)])
    return LayerShares(norms=norms, noises=tuple(level * longest for level in layer_noise))


def described(shares: LayerShares) -> str:
    """Returns in words how C and z C are spread."""
    texts = []
    for name, unit, values in (("norms", "C", shares.norms), ("noise", "z C", shares.noises)):
        if values is not None:
            low, high = min(values), max(values)
            span = f"{low:.4g} {unit}" if low == high else f"{low:.4g} to {high:.4g} {unit}"
            texts.append(f"{name} of {len(values)} layers {span}")
    return "; ".join(texts) + "; together C and z"


def _combined(kind: NoiseKind, lengths: tuple[float, ...] | list[float]) -> float:
    """Returns the norm of a vector whose layers have the norms `lengths`."""
    return math.fsum(lengths) if kind is NoiseKind.LAPLACE else math.hypot(*lengths)
