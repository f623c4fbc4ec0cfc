"""The edge model: 7,890 parameters for (1, 28, 28) and 10 labels."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl_app.models._layers import ACTIVATIONS, check_activation, check_image
from fl_app.plugins import Model
from fl_app.stages import InputSpec

_CHANNELS = 4
_POOL = 2
_SMALLEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyMobilenet(Model):
    """One 3 x 3 convolution (4 channels, same size), max-pooled by 2, then one linear layer.

    Attributes:
        activation: relu or tanh.
    """

    activation: str

    def __post_init__(self) -> None:
        check_activation(self.activation)

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, C, H, W] -> [B, num_classes] (scores before the softmax).

        Raises:
            ModelError: the inputs are not images (C, H, W) of at least 4 x 4.
        """
        check_image(self.kind, spec, _SMALLEST)
        channels, height, width = spec.shape
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv"] = nn.Conv2d(channels, _CHANNELS, 3, padding=1)
        layers["activation"] = ACTIVATIONS[self.activation]()
        layers["pool"] = nn.MaxPool2d(_POOL)
        layers["flatten"] = nn.Flatten()
        inputs = _CHANNELS * (height // _POOL) * (width // _POOL)
        layers["output"] = nn.Linear(inputs, spec.num_classes)
        return nn.Sequential(layers)


PLUGIN = TinyMobilenet
