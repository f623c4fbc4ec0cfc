"""The next-character network: 822,570 parameters for a vocabulary of 90."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fl_app import checks
from fl_app.errors import ModelError
from fl_app.plugins import Model
from fl_app.stages import InputSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CharLstm(Model):
    """An embedding, LSTM layers, and scores of the token that follows the last one.

    With the shipped widths it is the network of Reddi et al. (2020, arXiv:2003.00295), who count
    820,522 parameters with one bias vector a gate where torch has two. Under privacy its LSTM
    becomes Opacus' own, under the same names and in the same order (see `models.prepare`).

    Attributes:
        embedding: width of the embedding.
        hidden: width of each LSTM layer.
        num_layers: number of LSTM layers.
    """

    embedding: int
    hidden: int
    num_layers: int

    takes_tokens: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("embedding", "hidden", "num_layers"):
            checks.at_least(f"model.{name}", getattr(self, name), 1)

    def build(self, spec: InputSpec) -> nn.Module:
        """Returns the network: int64 tokens [B, L] -> [B, num_classes] (scores).

        Raises:
            ModelError: the inputs are not rows of tokens.
        """
        if spec.vocabulary is None or len(spec.shape) != 1:
            raise ModelError(
                f"model={self.kind}: needs rows of tokens, this dataset has numbers of shape "
                f"{spec.shape}; choose a text dataset, or model=mlp"
            )
        return _Network(self, spec.vocabulary, spec.num_classes)


class _Network(nn.Module):
    def __init__(self, sizes: CharLstm, vocabulary: int, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, sizes.embedding)
        self.lstm = nn.LSTM(
            sizes.embedding, sizes.hidden, num_layers=sizes.num_layers, batch_first=True
        )
        self.output = nn.Linear(sizes.hidden, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(tokens))
        scores: torch.Tensor = self.output(hidden[:, -1])
        return scores


PLUGIN = CharLstm
