"""Networks by name, and what all of them share: building, privacy preparation, flat parameters.

Only trainable floating-point parameters are ever exchanged, as one flat float32 vector in the order
of `named_parameters()`. Buffers stay where they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fl_app import rng
from fl_app.errors import ModelError
from fl_app.models._layers import group_norm_like
from fl_app.models._recurrent import keep_names

if TYPE_CHECKING:
    from fl_app.plugins import Model
    from fl_app.stages import DoubleVector, FloatVector, InputSpec

_KEPT = (nn.MultiheadAttention,)
"""Layers that treat records separately; Opacus' stand-ins have parameters of other names."""


def build_model(model: Model, spec: InputSpec, *, seed: int, private: bool) -> nn.Module:
    """Returns a new network on the CPU, the same for the same arguments in every process.

    torch's global generator is left as it was.

    Args:
        model: the plug-in that describes the network.
        spec: public facts of the dataset.
        seed: ``run.seed``; the initialization stream is derived from it.
        private: True if the training or the mechanism is private, see `prepare`.

    Raises:
        ModelError: the network cannot take such inputs, or cannot be trained privately (a trainable
            parameter with fewer digits than float32 included).
    """
    if model.takes_tokens < (spec.vocabulary is not None):
        raise ModelError(
            f"model={model.kind}: takes numbers, this dataset has tokens; choose model=char_lstm"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.derive_seed(seed, "initialization"))
        network = prepare(model.build(spec), private=private)
    if num_parameters(network) == 0:
        raise ModelError(f"model={model.kind}: it has no trainable parameter")
    if private:
        _check_precision(model, network)
    return network


def prepare(network: nn.Module, *, private: bool) -> nn.Module:
    """Returns `network` ready for private training; a non-private one is returned untouched.

    Call it once, on both sides, before an optimizer refers to the parameters: layers are replaced
    in place (BatchNorm by GroupNorm, recurrent layers by Opacus' own), and in-place
    activations become out-of-place. A recurrent layer keeps the names and the order of its
    parameters, so that its state loads into the plain network, and flat vectors agree.

    Guarantee:
        No layer of the result mixes the records of a batch or keeps statistics of them.

    Raises:
        ModelError: every layer that cannot be trained privately, each with the way out.
    """
    if not private:
        return network
    network = _replace_layers(network)
    for module in network.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    if problems := list(_refusals(network)):
        lines = [f"model: cannot be trained privately; change {len(problems)} layer(s):", *problems]
        raise ModelError("\n  ".join(lines))
    return network


def num_parameters(network: nn.Module) -> int:
    """Returns P, the number of trainable floating-point parameters."""
    return sum(parameter.numel() for parameter in _trainable(network))


def layer_sizes(network: nn.Module) -> tuple[int, ...]:
    """Returns the size of each trainable parameter tensor, in the order of flat vectors."""
    return tuple(parameter.numel() for parameter in _trainable(network))


def flat_parameters(network: nn.Module) -> FloatVector:
    """Returns a float32 copy [P] of the trainable parameters."""
    parameters = list(_trainable(network))
    vector_P = np.empty(sum(p.numel() for p in parameters), dtype=np.float32)
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        vector_P[start:stop] = parameter.detach().reshape(-1).float().cpu().numpy()
        start = stop
    return vector_P


@torch.no_grad()
def set_flat_parameters(network: nn.Module, vector_P: FloatVector | DoubleVector) -> None:
    """Overwrites the trainable parameters in place with `vector_P` [P], rounded to their precision.

    Raises:
        ModelError: the vector belongs to another network.
    """
    parameters = list(_trainable(network))
    expected = (sum(p.numel() for p in parameters),)
    if vector_P.shape != expected:
        raise ModelError(
            f"parameters: got shape {tuple(vector_P.shape)}, this network has {expected}; "
            "use the same model and dataset on both sides"
        )
    source = torch.from_numpy(np.require(vector_P, requirements=["C", "W"]))
    start = 0
    for parameter in parameters:
        stop = start + parameter.numel()
        parameter.copy_(source[start:stop].view_as(parameter))
        start = stop


def _check_precision(model: Model, network: nn.Module) -> None:
    """Refuses parameters with fewer digits than float32: their sums and norms hold no bound."""
    for name, parameter in network.named_parameters():
        exchanged = parameter.requires_grad and parameter.is_floating_point()
        if exchanged and torch.finfo(parameter.dtype).bits < 32:
            raise ModelError(
                f"model={model.kind}: parameter {name} is {parameter.dtype}, too coarse for the "
                "clipping and noise of a private run; build the network in torch.float32"
            )


def _trainable(network: nn.Module) -> Iterator[nn.Parameter]:
    for parameter in network.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            yield parameter


def _replace_layers(network: nn.Module) -> nn.Module:
    """Returns `network` with every trainable layer replaced that Opacus has a stand-in for."""
    from opacus.validators import ModuleValidator

    for name, module in list(network.named_modules()):
        known = type(module) in ModuleValidator.FIXERS and not isinstance(module, _KEPT)
        if not known or not list(_trainable(module)):
            continue
        replacement: nn.Module
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            replacement = _group_norm(name, module)
        else:
            replacement = ModuleValidator.fix(module)
            keep_names(replacement, module)
        if not name:
            return replacement
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, replacement)
    return network


def _group_norm(name: str, module: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    try:
        return group_norm_like(module)
    except ModelError as error:
        raise ModelError(f"model: {name or 'model'}: {error}") from error


def _refusals(network: nn.Module) -> Iterator[str]:
    """Yields one line for each layer that mixes records or keeps statistics of them."""
    from opacus.validators import ModuleValidator

    for name, module in network.named_modules():
        layer = f"{name or 'model'} ({type(module).__name__})"
        own_parameters = any(p.requires_grad for p in module.parameters(recurse=False))
        own_buffers = list(module.buffers(recurse=False))
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            yield f"{layer}: its batch statistics mix records; use nn.GroupNorm"
        elif isinstance(module, nn.modules.batchnorm._NormBase) and own_buffers:
            yield f"{layer}: it keeps statistics of records; set track_running_stats=False"
        elif own_parameters and own_buffers:
            yield f"{layer}: Opacus has no layer with parameters and buffers; split it in two"
        elif isinstance(module, _KEPT):
            continue
        elif own_parameters and type(module) in ModuleValidator.VALIDATORS:
            for error in ModuleValidator.VALIDATORS[type(module)](module):
                first = str(error).partition(". ")[0]
                yield f"{layer}: {first}; use a layer that treats records separately"
