"""Pieces that several models share: activations, group normalization, and checks of the input."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fl_app import checks
from fl_app.errors import ModelError
from fl_app.stages import InputSpec

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}

_MOST_GROUPS = 32
_FEWEST_CHANNELS = 8


def check_activation(value: str) -> None:
    """Raises SettingsError unless ``model.activation`` is one of `ACTIVATIONS`."""
    checks.one_of("model.activation", value, ACTIVATIONS)


def check_probability(key: str, value: float) -> None:
    """Raises SettingsError unless `value` is a probability below 1 of dropping a unit."""
    if not 0 <= checks.number(key, value) < 1:
        raise checks.fail(key, value, "must be >= 0 and < 1", "set 0 for no dropout")


def check_image(kind: str, spec: InputSpec, smallest: int) -> None:
    """Raises ModelError unless inputs are images (C, H, W) of at least `smallest` a side."""
    if len(spec.shape) != 3 or min(spec.shape[1:]) < smallest:
        raise ModelError(
            f"model={kind}: needs images (channels, height, width) of at least {smallest} x "
            f"{smallest}, this dataset has {spec.shape}; choose model=mlp or model=linear"
        )


def group_norm_like(norm: nn.modules.batchnorm._BatchNorm) -> nn.GroupNorm:
    """Returns the group normalization (Wu & He 2018, arXiv:1803.08494) that replaces `norm`.

    The most groups of up to 32 with at least 8 channels each, else one group: in a group of one
    channel without spatial extent every value would become zero.

    Raises:
        ModelError: `norm` has one feature without spatial extent, which no group leaves alive.
    """
    channels = norm.num_features
    if channels == 1 and isinstance(norm, nn.BatchNorm1d):
        raise ModelError("BatchNorm1d over 1 feature: its GroupNorm is always zero; remove it")
    groups = max(
        (
            g
            for g in range(1, _MOST_GROUPS + 1)
            if channels % g == 0 and channels // g >= _FEWEST_CHANNELS
        ),
        default=1,
    )
    return nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)


def replace_batch_norm(network: nn.Module) -> None:
    """Replaces every BatchNorm below `network` in place, as `group_norm_like` says."""
    for name, module in list(network.named_modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and name:
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, group_norm_like(module))
