"""DP-SGD: RECORD-level privacy with Poisson batches; the noise is the client's or the server's.

The method is that of Abadi et al. (2016, arXiv:1607.00133, algorithm 1), with a fixed denominator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import checks, layers, noise_schedule
from fl_app.errors import PrivacyError
from fl_app.layers import FLAT
from fl_app.models import flat_parameters, layer_sizes
from fl_app.noise_schedule import CONSTANT, NoiseSchedule
from fl_app.plugins import Releaser, Training, TrainingJob
from fl_app.privacy import NeighboringRelation, NoiseKind, PrivacyEvent, PrivacyUnit, Sampling, View
from fl_app.rng import NoiseSource
from fl_app.stages import (
    ClientPartition,
    CohortSum,
    IndexVector,
    InputSpec,
    LocalUpdate,
    Release,
    RoundOrder,
)
from fl_app.training._batches import decayed, fetch, torch_stream
from fl_app.training._opacus import NoisySGD, check_per_sample, per_sample_gradients

LOCAL, CENTRAL = "local", "central"


@dataclass(frozen=True, slots=True, kw_only=True)
class DpSgd(Training, Releaser):
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
        Placement central: one call is the clipped sum of one Poisson batch, *without* noise.
        `release` adds noise of scale z `clipping_norm` once to the sum over the cohort, whatever
        number answered: the same mechanism with one step (RECORD, ADD_OR_REMOVE_ONE), against the
        OBSERVER only. A record is in one client's sum, and moves the whole by as much.

    Attributes:
        placement: local, each client noises every step; or central, the server noises one step of
            the whole cohort (`local_steps` 1, momentum and weight decay 0).
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
        clipping: flat, one norm over all parameters; or per_layer, one for each parameter tensor.
            These combine to C, see `fl_app.layers`.
        layer_norms: per_layer: the norm of each layer up to a common factor; None: all equal.
        layer_noise: the noise of each layer up to a common factor; None: z C everywhere. Whatever
            they are, a step is one of multiplier z.
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
    placement: str = LOCAL
    clipping: str = FLAT
    layer_norms: tuple[float, ...] | None = None
    layer_noise: tuple[float, ...] | None = None

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
        layers.check("training", self.clipping, self.layer_norms, self.layer_noise)
        for name in ("nominal_rows", "physical_batch_size"):
            if getattr(self, name) is not None:
                checks.at_least(f"training.{name}", getattr(self, name), 1)
        checks.one_of("training.placement", self.placement, (LOCAL, CENTRAL))
        if self.placement == CENTRAL:
            self._check_central()

    def _check_central(self) -> None:
        """Refuses what a client would do with noised gradients, which it never has."""
        for name, needed in (("local_steps", 1), ("momentum", 0.0), ("weight_decay", 0.0)):
            if getattr(self, name) != needed:
                raise checks.fail(
                    f"training.{name}",
                    getattr(self, name),
                    f"training.placement={CENTRAL} needs {needed:g}: a client sends one sum of "
                    "gradients and steps nowhere",
                    f"set {needed:g} (momentum: server_optimizer=momentum), or "
                    f"training.placement={LOCAL}",
                )
        if self.layer_noise is not None:
            raise checks.fail(
                "training.layer_noise",
                f"(list of {len(self.layer_noise)})",
                f"training.placement={CENTRAL} has the same noise in every layer",
                f"set null, or training.placement={LOCAL}",
            )

    @property
    def releaser(self) -> Releaser | None:
        """Itself under placement central: its updates are sums without noise."""
        return self if self.placement == CENTRAL else None

    def train(self, model: nn.Module, partition: ClientPartition, job: TrainingJob) -> LocalUpdate:
        """Trains `model` in place and returns local minus global.

        Placement central: leaves `model` as it is and returns minus the clipped sum of gradients.

        Raises:
            PrivacyError: no noise multiplier or nominal rows, or a step went by without noise.
            ModelError: a layer without per-sample gradients.
        """
        model.to(job.device).train()
        before_P = flat_parameters(model)
        with torch_stream(job.batches, job.device), per_sample_gradients(model) as wrapped:
            optimizer = self._optimizer(model, job)
            if self.placement == CENTRAL:
                self._sum(wrapped, optimizer, partition, job)
                return LocalUpdate(
                    client=partition.client,
                    delta_P=-optimizer.take_sum(),
                    num_noisy_steps=0,
                    num_examples=len(partition.rows),
                )
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

    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns what one noised step of the whole cohort moves the model by.

        Guarantee:
            Noise of scale z C is in the sum before anything reads it, and no copy of the sum
            without it stays: `total.sum_P` becomes the result. The divisor is public: expected
            cohort * batch_rate * nominal rows.

        Raises:
            PrivacyError: placement local, no noise multiplier, or a divisor that is no number > 0.
        """
        if self.placement != CENTRAL or order.training_noise_multiplier is None:
            raise PrivacyError(
                f"training.placement={self.placement}, order.training_noise_multiplier="
                f"{order.training_noise_multiplier}: a release needs {CENTRAL} and a number"
            )
        divisor = expected_cohort * self.batch_rate * order.nominal_rows
        if not (math.isfinite(divisor) and divisor > 0):
            raise PrivacyError(f"divisor={divisor}: must be a finite number > 0")
        kind, scale = NoiseKind(self.noise), order.training_noise_multiplier * self.clipping_norm
        add = noise.add_laplace if kind is NoiseKind.LAPLACE else noise.add_gaussian
        add(total.sum_P, scale)
        std = scale * kind.std_per_scale
        step = decayed(self.learning_rate, self.learning_rate_decay, order.round) / divisor
        total.sum_P *= step
        return Release(
            round=total.round,
            mean_P=total.sum_P,
            noise_std_of_sum=std,
            noise_std_of_mean=std * step,
        )

    def check_model(self, model: nn.Module, spec: InputSpec) -> None:
        """Returns if per-sample gradients of `model` can be taken, see `check_per_sample`.

        Raises:
            ModelError: a layer stands in the way, with the way out.
            SettingsError: a list by layer has not one number for each parameter tensor.
        """
        num_layers = len(layer_sizes(model))
        layers.check_number("training", num_layers, self.layer_norms, self.layer_noise)
        check_per_sample(model, spec)

    def event(self, noise_multiplier: float) -> PrivacyEvent | None:
        """Returns the event of one call: `local_steps` steps, against the SERVER.

        Placement central: of one noised sum over a cohort, against the OBSERVER.
        """
        return PrivacyEvent(
            unit=PrivacyUnit.RECORD,
            view=View.OBSERVER if self.placement == CENTRAL else View.SERVER,
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
        parameters = [p for p in model.parameters() if p.requires_grad]
        kind = NoiseKind(self.noise)
        sgd = torch.optim.SGD(
            parameters,
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
            kind=kind,
            layers=layers.shares_of(
                kind, len(parameters), self.clipping, self.layer_norms, self.layer_noise
            ),
        )

    def _step(
        self, wrapped: nn.Module, optimizer: NoisySGD, partition: ClientPartition, job: TrainingJob
    ) -> None:
        for is_last in self._backward(wrapped, optimizer, partition, job):
            # Noise is added once, with the last chunk.
            optimizer.signal_skip_step(do_skip=not is_last)
            optimizer.step()

    def _sum(
        self, wrapped: nn.Module, optimizer: NoisySGD, partition: ClientPartition, job: TrainingJob
    ) -> None:
        for _ in self._backward(wrapped, optimizer, partition, job):
            # Every part only adds to the sum; the noise is the server's.
            optimizer.signal_skip_step(do_skip=True)
            optimizer.step()

    def _backward(
        self, wrapped: nn.Module, optimizer: NoisySGD, partition: ClientPartition, job: TrainingJob
    ) -> Iterator[bool]:
        """Draws a batch; yields with the gradients of each part of it, and whether it is the last.

        At least once, whatever was drawn.
        """
        rows = poisson_batch(partition.rows, self.batch_rate, job.batches)
        chunks = list(_chunks(rows, self.physical_batch_size))
        for number, chunk in enumerate(chunks, start=1):
            optimizer.zero_grad(set_to_none=True)
            optimizer.num_rows = len(chunk)
            if len(chunk) > 0:
                inputs, labels = fetch(partition.table, chunk, job.device, job.batches)
                cross_entropy(wrapped(inputs), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
            yield number == len(chunks)


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
