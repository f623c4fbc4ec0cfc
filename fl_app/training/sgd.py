"""Plain SGD at the client, without record-level privacy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.sgd import sgd

from fl_app import checks
from fl_app.models import flat_parameters
from fl_app.plugins import Training, TrainingJob
from fl_app.privacy import PrivacyEvent
from fl_app.stages import ClientPartition, IndexVector, LocalUpdate
from fl_app.training._batches import decayed, fetch, layout_of, torch_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(Training):
    """Shuffled batches of the client's rows; a client without rows leaves the model as it is.

    Attributes:
        local_epochs: passes over the rows; None: `local_steps` says how long.
        local_steps: optimizer steps, over as many passes as it takes; None: `local_epochs` does.
        batch_size: rows of one step; the last batch of a pass may be smaller.
        learning_rate: of SGD on the mean gradient of a batch.
        momentum: starts from zero in every call.
        weight_decay: L2 penalty.
        learning_rate_decay: the learning rate is multiplied by it every round after the first.
    """

    local_epochs: int | None
    local_steps: int | None
    batch_size: int
    learning_rate: float
    momentum: float
    weight_decay: float
    learning_rate_decay: float = 1.0

    private: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if (self.local_epochs is None) == (self.local_steps is None):
            raise checks.fail(
                "training.local_epochs",
                self.local_epochs,
                "exactly one of it and training.local_steps must be a number",
                "set the other one to null",
            )
        for name in ("local_epochs", "local_steps"):
            if getattr(self, name) is not None:
                checks.at_least(f"training.{name}", getattr(self, name), 1)
        checks.at_least("training.batch_size", self.batch_size, 1)
        for name in ("learning_rate", "momentum", "weight_decay"):
            checks.non_negative(f"training.{name}", getattr(self, name))
        checks.rate("training.learning_rate_decay", self.learning_rate_decay)

    def train(self, model: nn.Module, partition: ClientPartition, job: TrainingJob) -> LocalUpdate:
        """Trains `model` in place and returns local minus global; the update is private data."""
        if next(model.parameters()).device != job.device:
            model.to(job.device)
        model.train()
        before_P = flat_parameters(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        lay_out = layout_of(model)
        velocities: dict[Tensor, Tensor | None] = {}
        learning_rate = decayed(self.learning_rate, self.learning_rate_decay, job.round)
        with torch_stream(job.batches, job.device):
            for rows in self._batches(partition.rows, job.batches):
                inputs, labels = fetch(partition.table, rows, job.device, job.batches)
                loss = cross_entropy(model(lay_out(inputs)), labels)
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                self._step(parameters, grads, velocities, learning_rate)
        return LocalUpdate(
            client=partition.client,
            delta_P=flat_parameters(model) - before_P,
            num_noisy_steps=0,
            num_examples=len(partition.rows),
        )

    def event(self, noise_multiplier: float) -> PrivacyEvent | None:
        """Returns None: nothing is noised."""
        return None

    def _step(
        self,
        parameters: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        velocities: dict[Tensor, Tensor | None],
        learning_rate: float,
    ) -> None:
        """Moves `parameters`, and with momentum `velocities`, as one step of `torch.optim.SGD`.

        Without an optimizer object, whose own time counts beside the step of a small model. As
        there, a parameter that the loss does not depend on (None in `grads`) stays as it is.
        """
        reached = {p: g for p, g in zip(parameters, grads, strict=True) if g is not None}
        moved, buffers = list(reached), [velocities.get(p) for p in reached]
        with torch.no_grad():
            sgd(
                moved,
                list(reached.values()),
                buffers,
                foreach=True,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=learning_rate,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        velocities.update(zip(moved, buffers, strict=True))

    def _batches(self, rows: IndexVector, batches: np.random.Generator) -> Iterator[IndexVector]:
        if len(rows) == 0:
            return
        if self.local_steps is not None:
            yield from islice(_passes(rows, self.batch_size, None, batches), self.local_steps)
        else:
            yield from _passes(rows, self.batch_size, self.local_epochs, batches)


def _passes(
    rows: IndexVector, batch_size: int, epochs: int | None, batches: np.random.Generator
) -> Iterator[IndexVector]:
    """Yields the batches of `epochs` passes over `rows`, each shuffled anew; endless for None."""
    done = 0
    while epochs is None or done < epochs:
        order = batches.permutation(rows)
        for start in range(0, len(order), batch_size):
            yield order[start : start + batch_size]
        done += 1


PLUGIN = Sgd
