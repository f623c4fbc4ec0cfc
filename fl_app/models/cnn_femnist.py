"""The convolutional network of the handwritten-characters benchmark (62 labels)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl_app.models._layers import ACTIVATIONS, check_activation, check_image, check_probability
from fl_app.plugins import Model
from fl_app.stages import InputSpec

_CHANNELS = (32, 64)
_KERNEL = 3
_POOL = 2
_HIDDEN = 128
_SMALLEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnFemnist(Model):
    """Two 3 x 3 convolutions (32, 64 channels), max-pooled by 2, then one hidden layer of 128.

    The layout of Reddi et al. (2020, arXiv:2003.00295): 1,206,590 parameters for
    (1, 28, 28) and 62 labels; there the dropout probabilities are 0.25 and 0.5.

    Attributes:
        activation: relu or tanh.
        conv_dropout: probability of dropping a value after the pooling, in [0, 1); 0: none.
        hidden_dropout: probability of dropping a hidden unit, in [0, 1); 0: none.
    """

    activation: str
    conv_dropout: float
    hidden_dropout: float

    def __post_init__(self) -> None:
        check_activation(self.activation)
        for name in ("conv_dropout", "hidden_dropout"):
            check_probability(f"model.{name}", getattr(self, name))

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, C, H, W] -> [B, num_classes] (scores before the softmax).

        Raises:
            ModelError: the inputs are not images (C, H, W) of at least 8 x 8.
        """
        check_image(self.kind, spec, _SMALLEST)
        first, second = _CHANNELS
        height, width = ((side - 2 * (_KERNEL - 1)) // _POOL for side in spec.shape[1:])
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        layers["conv1"] = nn.Conv2d(spec.shape[0], first, _KERNEL)
        layers["activation1"] = ACTIVATIONS[self.activation]()
        layers["conv2"] = nn.Conv2d(first, second, _KERNEL)
        layers["activation2"] = ACTIVATIONS[self.activation]()
        layers["pool"] = nn.MaxPool2d(_POOL)
        if self.conv_dropout > 0:
            layers["dropout1"] = nn.Dropout(self.conv_dropout)
        layers["flatten"] = nn.Flatten()
        layers["hidden"] = nn.Linear(second * height * width, _HIDDEN)
        layers["activation3"] = ACTIVATIONS[self.activation]()
        if self.hidden_dropout > 0:
            layers["dropout2"] = nn.Dropout(self.hidden_dropout)
        layers["output"] = nn.Linear(_HIDDEN, spec.num_classes)
        return nn.Sequential(layers)


PLUGIN = CnnFemnist
