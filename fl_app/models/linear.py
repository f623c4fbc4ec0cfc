"""Multinomial logistic regression on the flattened input."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from fl_app.plugins import Model
from fl_app.stages import InputSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Model):
    """One linear layer from all inputs to the class scores, with bias."""

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network [B, *shape] -> [B, num_classes] (scores before the softmax)."""
        layers = OrderedDict(
            flatten=nn.Flatten(),
            output=nn.Linear(math.prod(spec.shape), spec.num_classes),
        )
        return nn.Sequential(layers)


PLUGIN = Linear
