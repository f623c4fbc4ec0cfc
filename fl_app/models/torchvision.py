"""Any classification network of torchvision by name, freshly initialized, with GroupNorm."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fl_app import checks
from fl_app.errors import ModelError
from fl_app.models._layers import check_image, replace_batch_norm
from fl_app.plugins import Model
from fl_app.stages import InputSpec

_NO_SECOND_OUTPUT: dict[str, Any] = {"aux_logits": False, "init_weights": True}
_OPTIONS = {"googlenet": _NO_SECOND_OUTPUT, "inception_v3": _NO_SECOND_OUTPUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchvision(Model):
    """A network of ``torchvision.models``; nothing is downloaded.

    Each BatchNorm becomes a GroupNorm, with or without privacy: the statistics of a BatchNorm are
    never exchanged. The first convolution takes as many channels as the images have.

    Attributes:
        name: as in torchvision, e.g. resnet18, mobilenet_v2, squeezenet1_1.
    """

    name: str

    def __post_init__(self) -> None:
        import torchvision.models

        known = torchvision.models.list_models(module=torchvision.models)
        checks.one_of("model.name", self.name, known)

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, C, H, W] -> [B, num_classes] (scores before the softmax).

        Raises:
            ModelError: the inputs are not images, or too small for this network.
        """
        check_image(self.kind, spec, 1)
        with torch.device("meta"):
            _check_forward(self.name, self._network(spec), spec)
        return self._network(spec)

    def _network(self, spec: InputSpec) -> nn.Module:
        from torchvision.models import get_model

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The default weight initialization")
            network: nn.Module = get_model(
                self.name,
                weights=None,
                num_classes=spec.num_classes,
                **_OPTIONS.get(self.name, {}),
            )
        replace_batch_norm(network)
        _take_channels(network, spec.shape[0])
        return network


def _check_forward(name: str, network: nn.Module, spec: InputSpec) -> None:
    """Raises ModelError unless `network` (on the meta device) maps two inputs to their scores."""
    try:
        scores = network(torch.empty(2, *spec.shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"model.name={name}: does not take images of shape {spec.shape} ({reason}); "
            "set dataset.image_size (224 suits most networks), or choose another one"
        ) from error
    if not isinstance(scores, torch.Tensor) or scores.shape != (2, spec.num_classes):
        raise ModelError(f"model.name={name}: has more than one output; choose another one")


def _take_channels(network: nn.Module, channels: int) -> None:
    """Replaces the first convolution in place where it takes another number of channels."""
    for name, module in network.named_modules():
        if not isinstance(module, nn.Conv2d):
            continue
        if module.in_channels != channels:
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, _with_channels(module, channels))
        return


def _with_channels(conv: nn.Conv2d, channels: int) -> nn.Conv2d:
    return nn.Conv2d(
        channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        stride=conv.stride,  # type: ignore[arg-type]
        padding=conv.padding,  # type: ignore[arg-type]
        bias=conv.bias is not None,
    )


PLUGIN = Torchvision
