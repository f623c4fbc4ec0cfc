"""Work that several benchmarks share: DP-SGD and plain passes over one client's rows."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import rng
from fl_app.client_policy import home
from fl_app.models import flat_parameters, set_flat_parameters
from fl_app.overrides import compose
from fl_app.plugins import TrainingJob
from fl_app.settings import Settings
from fl_app.stages import ClientPartition, LoadedData, Table
from fl_app.training import _opacus
from fl_app.training._batches import fetch
from fl_app.training.dp_sgd import DpSgd

CPU = torch.device("cpu")
BATCH = 128
SAME = 1e-5
"""Largest relative difference between a sum of clipped gradients and Opacus' own."""
UNDECIDED = 1e-6
"""Part of a layer's largest input that float32 rounding is taken to reach."""


def mnist_or_synthetic(tiny: bool) -> list[str]:
    """Returns overrides: MNIST, or generated images of its shape if `tiny`."""
    return ["dataset=synthetic", "dataset.num_train=400"] if tiny else ["dataset=mnist"]


def loaded(settings: Settings) -> LoadedData:
    return settings.dataset.load(data_path=None, cache_dir=home() / "cache")


def dp_sgd(**changes: Any) -> DpSgd:
    """Returns the shipped training with `changes`."""
    training = compose(["training=dp_sgd"]).training
    assert isinstance(training, DpSgd)
    return dataclasses.replace(training, **changes)


def job(nominal_rows: int, noise_multiplier: float = 1.0) -> TrainingJob:
    return TrainingJob(
        noise_multiplier=noise_multiplier,
        nominal_rows=nominal_rows,
        batches=np.random.default_rng(0),
        noise=rng.noise_source("bench", seed=None),
        device=CPU,
    )


def plain_epoch(model: nn.Module, table: Table, rows: np.ndarray, batch_size: int) -> None:
    """One epoch of SGD in plain PyTorch over shuffled batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = np.random.default_rng(0).permutation(rows)
    for start in range(0, len(order), batch_size):
        inputs, labels = fetch(table, order[start : start + batch_size], CPU)
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def dp_epoch(model: nn.Module, partition: ClientPartition, batch_size: int) -> None:
    """The same in DP-SGD: as many Poisson batches, of `batch_size` rows on average."""
    num_rows = len(partition.rows)
    training = dp_sgd(
        local_steps=num_rows // batch_size,
        batch_rate=batch_size / num_rows,
        learning_rate=0.01,
        clipping_norm=1.0,
    )
    training.train(model, partition, job(num_rows))


def check_against_opacus(model: nn.Module, partition: ClientPartition) -> None:
    """Raises AssertionError unless one full-batch step equals one by Opacus' gradients.

    Over the rows that `decided` keeps: on others rounding alone, different for every order of
    summation, makes gradients of up to 0.5 % difference, Opacus' own from float64 included.
    """
    rows = partition.rows[decided(model, fetch(partition.table, partition.rows, CPU)[0]).numpy()]
    assert 2 * len(rows) > len(partition.rows), "most rows are left out of the comparison"
    partition = dataclasses.replace(partition, rows=rows)
    start_P = flat_parameters(model)
    expected_P = opacus_sum(model, *fetch(partition.table, rows, CPU), clipping_norm=0.1)
    training = dp_sgd(local_steps=1, batch_rate=1.0, learning_rate=1.0, clipping_norm=0.1)
    update = training.train(model, partition, job(1, noise_multiplier=0.0))
    set_flat_parameters(model, start_P)
    error = np.linalg.norm(update.delta_P + expected_P) / np.linalg.norm(expected_P)
    # The update is the difference of float32 parameters, which loses digits of its own.
    assert error <= SAME, f"differs from Opacus by {error:.1e}"


def decided(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Returns the rows [B] bool in which float32 takes the branches that float64 takes.

    That is, in which no ReLU's input is nearly 0 and no two pooled values are nearly equal, by
    `UNDECIDED` of the layer's largest input. Equal values count as decided: their patches are.
    """
    exact = copy.deepcopy(model).eval().double()
    keep_B = torch.ones(len(inputs), dtype=torch.bool)

    def look(module: nn.Module, arguments: tuple[torch.Tensor]) -> None:
        (x,) = arguments
        gaps = x.abs()
        if isinstance(module, nn.MaxPool2d):
            size = module.kernel_size
            largest = x.unfold(2, size, size).unfold(3, size, size).flatten(4).topk(2).values
            gaps = largest[..., 0] - largest[..., 1]
        near = (gaps > 0).flatten(1) & (
            gaps.flatten(1) < UNDECIDED * x.flatten(1).abs().amax(1, keepdim=True)
        )
        keep_B.logical_and_(~near.any(1))

    for module in exact.modules():
        if isinstance(module, nn.ReLU | nn.MaxPool2d):
            module.register_forward_pre_hook(look)
    with torch.no_grad():
        exact(inputs.double() if inputs.is_floating_point() else inputs)
    return keep_B


def opacus_sum(
    model: nn.Module, inputs: torch.Tensor, labels: torch.Tensor, *, clipping_norm: float
) -> np.ndarray:
    """Returns the sum of clipped per-sample gradients [P], by Opacus' hooks, clipped in NumPy."""
    wrapped = GradSampleModule(model.train(), loss_reduction="sum")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        cross_entropy(wrapped(inputs), labels, reduction="sum").backward()
    samples = [p.grad_sample.flatten(1).double().numpy() for p in model.parameters()]  # type: ignore[attr-defined]
    wrapped.to_standard_module()
    model.zero_grad()
    grads_BP = np.concatenate(samples, axis=1)
    norms_B1 = np.linalg.norm(grads_BP, axis=1, keepdims=True)
    return np.asarray((grads_BP * np.minimum(1.0, clipping_norm / norms_B1)).sum(0))


def hot_spots(work: Callable[[], object]) -> str:
    """Returns, in words, which of torch's operations take most of the time of `work`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        work()
    events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    shares = [f"{event.key} {100 * event.self_cpu_time_total / total:.0f} %" for event in events]
    return f"of {total / 1e6:.2g} s in torch's operations " + ", ".join(shares[:7])


@contextmanager
def without_fast_rules() -> Iterator[None]:
    """Within it every layer has Opacus' own hooks."""
    rules = _opacus.fast_layers
    _opacus.fast_layers = lambda *_: []  # type: ignore[assignment]
    try:
        yield
    finally:
        _opacus.fast_layers = rules
