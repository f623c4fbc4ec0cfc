"""A small convolutional network for images: 21,840 parameters for (1, 28, 28) and 10 labels."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl_app import checks
from fl_app.errors import ModelError
from fl_app.plugins import Model
from fl_app.stages import InputSpec

_KERNEL = 5
_POOL = 2
_CHANNELS = (10, 20)
_HIDDEN = 50
_SMALLEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Cnn(Model):
    """Two 5 x 5 convolutions (10, 20 channels), each max-pooled by 2, then one hidden layer of 50.

    Attributes:
        activation: relu or tanh (bounded activations often do better under clipping: Papernot et
            al. 2020, arXiv:2007.14191).
        dropout: probability of dropping a hidden unit in training, in [0, 1); 0: no dropout.
    """

    activation: str
    dropout: float

    def __post_init__(self) -> None:
        checks.one_of("model.activation", self.activation, ("relu", "tanh"))
        if not 0 <= checks.number("model.dropout", self.dropout) < 1:
            raise checks.fail("model.dropout", self.dropout, "must be >= 0 and < 1")

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, C, H, W] -> [B, num_classes] (scores before the softmax).

        Raises:
            ModelError: the inputs are not images (C, H, W) of at least 16 x 16.
        """
        if len(spec.shape) != 3 or min(spec.shape[1:]) < _SMALLEST:
            raise ModelError(
                f"model=cnn: needs images (channels, height, width) of at least {_SMALLEST} x "
                f"{_SMALLEST}, this dataset has {spec.shape}; choose model=mlp or model=linear"
            )
        first, second = _CHANNELS
        height, width = (_after_two_stages(side) for side in spec.shape[1:])
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv1"] = nn.Conv2d(spec.shape[0], first, _KERNEL)
        layers["pool1"] = nn.MaxPool2d(_POOL)
        layers["activation1"] = self._activation()
        layers["conv2"] = nn.Conv2d(first, second, _KERNEL)
        layers["pool2"] = nn.MaxPool2d(_POOL)
        layers["activation2"] = self._activation()
        layers["flatten"] = nn.Flatten()
        layers["hidden"] = nn.Linear(second * height * width, _HIDDEN)
        layers["activation3"] = self._activation()
        if self.dropout > 0:
            layers["dropout"] = nn.Dropout(self.dropout)
        layers["output"] = nn.Linear(_HIDDEN, spec.num_classes)
        return nn.Sequential(layers)

    def _activation(self) -> nn.Module:
        return nn.ReLU() if self.activation == "relu" else nn.Tanh()


def _after_two_stages(side: int) -> int:
    """Returns the side length of an image after two convolutions and poolings."""
    for _ in _CHANNELS:
        side = (side - _KERNEL + 1) // _POOL
    return side


PLUGIN = Cnn
