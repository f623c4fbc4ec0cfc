"""DP-SGD at the client: RECORD-level privacy with Poisson batches.

The method is that of Abadi et al. (2016, arXiv:1607.00133, algorithm 1), with a fixed denominator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import checks, noise_schedule
from fl_app.errors import PrivacyError
from fl_app.models import flat_parameters
from fl_app.noise_schedule import CONSTANT, NoiseSchedule
from fl_app.plugins import Training, TrainingJob
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyEvent, PrivacyUnit, Sampling, View
from fl_app.stages import ClientPartition, IndexVector, InputSpec, LocalUpdate
from fl_app.training._batches import decayed, fetch, torch_stream
from fl_app.training._opacus import NoisySGD, check_per_sample, per_sample_gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class DpSgd(Training):
    """A public number of noisy steps, each on a fresh Poisson batch of the client's rows.

    Guarantee:
        One call is `local_steps` Poisson-sampled Gaussian or Laplace mechanisms (RECORD,
        ADD_OR_REMOVE_ONE, against the SERVER): rate `batch_rate`, sensitivity `clipping_norm` (L2,
        or L1 for laplace), noise of std (laplace: scale) z `clipping_norm` on the sum, public
        denominator batch_rate * nominal rows. Learning rate, momentum and weight decay act on
        noised values only. Not covered: the network's buffers
        (never exchanged), the time it takes, and whoever sees the client's memory.
        - empty batches and clients without rows: noise alone, every step counted;
        - non-finite per-sample gradients count as zero.

    Attributes:
        local_steps: steps of one call; public.
        batch_rate: probability that a row is in a batch.
        learning_rate: of plain SGD on the noised mean gradient.
        momentum: of the client's SGD; starts from zero in every call.
        weight_decay: L2 penalty, on the current parameters.
        noise: gaussian, or laplace (clips the L1 norm; only accountants pld and simple bound it).
        clipping_norm: C, norm of one row's gradient over all parameters: L2, or L1 for laplace.
        noise_multiplier: z, std of the sum's noise / C, or scale b / C for laplace; None:
            calibrated. A call takes the job's.
        noise_schedule: the level of each round that z is multiplied with, see `noise_schedule`.
        nominal_rows: public row count for the denominator; None: the caller derives it from public
            totals. A call takes the job's.
        physical_batch_size: most rows computed at a time (memory only); None: no limit.
        learning_rate_decay: the learning rate is multiplied by it every round after the first.
    """

    local_steps: int
    batch_rate: float
    learning_rate: float
    momentum: float
    weight_decay: float
    noise: str = "gaussian"
    clipping_norm: float
    noise_multiplier: float | None
    noise_schedule: NoiseSchedule = CONSTANT
    nominal_rows: int | None
    physical_batch_size: int | None
    learning_rate_decay: float = 1.0

    private: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.at_least("training.local_steps", self.local_steps, 1)
        checks.rate("training.batch_rate", self.batch_rate)
        checks.one_of("training.noise", self.noise, (NoiseKind.GAUSSIAN, NoiseKind.LAPLACE))
        checks.clipping_norm("training.clipping_norm", self.clipping_norm)
        for name in ("learning_rate", "momentum", "weight_decay"):
            checks.non_negative(f"training.{name}", getattr(self, name))
        checks.rate("training.learning_rate_decay", self.learning_rate_decay)
        if self.noise_multiplier is not None:
            checks.noise_multiplier("training.noise_multiplier", self.noise_multiplier)
        noise_schedule.check("training.noise_schedule", self.noise_schedule)
        for name in ("nominal_rows", "physical_batch_size"):
            if getattr(self, name) is not None:
                checks.at_least(f"training.{name}", getattr(self, name), 1)

    def train(self, model: nn.Module, partition: ClientPartition, job: TrainingJob) -> LocalUpdate:
        """Trains `model` in place and returns local minus global.

        Raises:
            PrivacyError: no noise multiplier or nominal rows, or a step went by without noise.
            ModelError: a layer without per-sample gradients.
        """
        model.to(job.device).train()
        before_P = flat_parameters(model)
        with torch_stream(job.batches, job.device), per_sample_gradients(model) as wrapped:
            optimizer = self._optimizer(model, job)
            for _ in range(self.local_steps):
                self._step(wrapped, optimizer, partition, job)
        if optimizer.num_noisy_steps != self.local_steps:
            raise PrivacyError(
                f"training.local_steps={self.local_steps}: {optimizer.num_noisy_steps} steps were "
                "noised; the accounting needs all of them"
            )
        return LocalUpdate(
            client=partition.client,
            delta_P=flat_parameters(model) - before_P,
            num_noisy_steps=optimizer.num_noisy_steps,
            num_examples=len(partition.rows),
        )

    def check_model(self, model: nn.Module, spec: InputSpec) -> None:
        """Returns if per-sample gradients of `model` can be taken, see `check_per_sample`.

        Raises:
            ModelError: a layer stands in the way, with the way out.
        """
        check_per_sample(model, spec)

    def event(self, noise_multiplier: float) -> PrivacyEvent | None:
        """Returns the event of one call: `local_steps` steps, against the SERVER."""
        return PrivacyEvent(
            unit=PrivacyUnit.RECORD,
            view=View.SERVER,
            relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
            noise=NoiseKind(self.noise),
            noise_multiplier=noise_multiplier,
            sampling=Sampling.POISSON if self.batch_rate < 1 else Sampling.NONE,
            sampling_rate=self.batch_rate,
            steps=self.local_steps,
        )

    def _optimizer(self, model: nn.Module, job: TrainingJob) -> NoisySGD:
        if job.noise_multiplier is None:
            raise PrivacyError("job.noise_multiplier=null: dp_sgd needs a number; 0 for no noise")
        if job.nominal_rows < 1:
            raise PrivacyError(f"job.nominal_rows={job.nominal_rows}: must be a public count >= 1")
        sgd = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad],
            lr=decayed(self.learning_rate, self.learning_rate_decay, job.round),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )
        return NoisySGD(
            sgd,
            noise_multiplier=job.noise_multiplier,
            clipping_norm=self.clipping_norm,
            denominator=self.batch_rate * job.nominal_rows,
            noise=job.noise,
            kind=NoiseKind(self.noise),
        )

    def _step(
        self, wrapped: nn.Module, optimizer: NoisySGD, partition: ClientPartition, job: TrainingJob
    ) -> None:
        rows = poisson_batch(partition.rows, self.batch_rate, job.batches)
        chunks = list(_chunks(rows, self.physical_batch_size))
        for number, chunk in enumerate(chunks, start=1):
            optimizer.zero_grad(set_to_none=True)
            optimizer.num_rows = len(chunk)
            if len(chunk) > 0:
                inputs, labels = fetch(partition.table, chunk, job.device, job.batches)
                cross_entropy(wrapped(inputs), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
            # Noise is added once, with the last chunk.
            optimizer.signal_skip_step(do_skip=number < len(chunks))
            optimizer.step()


def poisson_batch(rows: IndexVector, rate: float, batches: np.random.Generator) -> IndexVector:
    """Returns the rows of one batch: each with probability `rate`, independently. Private."""
    members: IndexVector = rows[batches.random(len(rows)) < rate]
    return members


def _chunks(rows: IndexVector, size: int | None) -> Iterator[IndexVector]:
    """Yields `rows` in parts of at most `size`; one empty part if there are none."""
    step = size or max(len(rows), 1)
    for start in range(0, max(len(rows), 1), step):
        yield rows[start : start + step]


PLUGIN = DpSgd
