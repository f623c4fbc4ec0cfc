"""A convolutional network for colour images, normalized in groups."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl_app import checks
from fl_app.models._layers import ACTIVATIONS, check_activation, check_image
from fl_app.plugins import Model
from fl_app.stages import InputSpec

_POOL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnCifar(Model):
    """Stages of two 3 x 3 convolutions and a max-pooling by 2, then one hidden layer.

    With the shipped widths it is the CIFAR-10 network of Papernot et al. (2020, arXiv:2007.14191,
    550,570 parameters) with a GroupNorm after each convolution: 551,466 parameters.

    Attributes:
        channels: channels of the convolutions of each stage, first to last.
        hidden: width of the hidden layer.
        num_groups: groups of each GroupNorm; divides every number of channels.
        activation: relu or tanh.
    """

    channels: tuple[int, ...]
    hidden: int
    num_groups: int
    activation: str

    def __post_init__(self) -> None:
        check_activation(self.activation)
        checks.at_least("model.hidden", self.hidden, 1)
        checks.at_least("model.num_groups", self.num_groups, 1)
        if not self.channels:
            raise checks.fail("model.channels", [], "needs a stage", "e.g. [32, 64, 128]")
        for i, width in enumerate(self.channels):
            checks.at_least(f"model.channels[{i}]", width, 1)
            if width % self.num_groups:
                raise checks.fail(
                    "model.num_groups",
                    self.num_groups,
                    f"must divide model.channels[{i}]={width}",
                    "set 1 for one group",
                )

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, C, H, W] -> [B, num_classes] (scores before the softmax).

        Raises:
            ModelError: the inputs are not images that every stage can halve.
        """
        smallest = int(_POOL ** len(self.channels))
        check_image(self.kind, spec, max(smallest, 2 * _POOL))
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        before = spec.shape[0]
        for stage, width in enumerate(self.channels, start=1):
            for half in ("a", "b"):
                layers[f"conv{stage}{half}"] = nn.Conv2d(before, width, 3, padding=1)
                layers[f"norm{stage}{half}"] = nn.GroupNorm(self.num_groups, width)
                layers[f"activation{stage}{half}"] = ACTIVATIONS[self.activation]()
                before = width
            layers[f"pool{stage}"] = nn.MaxPool2d(_POOL)
        height, width = (side // smallest for side in spec.shape[1:])
        layers["flatten"] = nn.Flatten()
        layers["hidden"] = nn.Linear(before * height * width, self.hidden)
        layers["activation"] = ACTIVATIONS[self.activation]()
        layers["output"] = nn.Linear(self.hidden, spec.num_classes)
        return nn.Sequential(layers)


PLUGIN = CnnCifar
