"""A multilayer perceptron on the flattened input."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl_app import checks
from fl_app.plugins import Model
from fl_app.stages import InputSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Model):
    """Fully connected layers with an activation between them.

    Attributes:
        hidden: width of each hidden layer, first to last; at least one.
        activation: relu or tanh (bounded activations often do better under clipping: Papernot et
            al. 2020, arXiv:2007.14191).
    """

    hidden: tuple[int, ...]
    activation: str

    def __post_init__(self) -> None:
        if not self.hidden:
            raise checks.fail(
                "model.hidden", [], "needs at least one width", "or choose model=linear"
            )
        for i, width in enumerate(self.hidden):
            checks.at_least(f"model.hidden[{i}]", width, 1)
        checks.one_of("model.activation", self.activation, ("relu", "tanh"))

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, *shape] -> [B, num_classes] (scores before the softmax)."""
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        width = math.prod(spec.shape)
        for i, hidden in enumerate(self.hidden, start=1):
            layers[f"hidden{i}"] = nn.Linear(width, hidden)
            layers[f"activation{i}"] = nn.ReLU() if self.activation == "relu" else nn.Tanh()
            width = hidden
        layers["output"] = nn.Linear(width, spec.num_classes)
        return nn.Sequential(layers)


PLUGIN = Mlp
