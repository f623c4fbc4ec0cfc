"""Rounds as the strategy asks for them, without server state: cohort in, sum out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from flwr.serverapp import Grid
from torch import nn
from torch.nn.functional import cross_entropy

from fl_app import rng, wire
from fl_app.client_policy import home
from fl_app.models import build_model
from fl_app.parallel import one_torch_thread
from fl_app.settings import Settings
from fl_app.stages import CohortSum, DoubleVector, LoadedData, ProtectedUpdate, RoundOrder
from fl_app.training._batches import layout_of
from strategies.roster import Roster


def network(settings: Settings, data: LoadedData) -> nn.Module:
    private = settings.training.private or settings.client_level
    return build_model(settings.model, data.spec, seed=0, private=private).train()


def order_of(settings: Settings, nominal_rows: int) -> RoundOrder:
    """Returns the order of round 1; noise multipliers must be in the settings."""
    return RoundOrder(
        round=1,
        clipping_norm=getattr(settings.mechanism, "clipping_norm", None),
        noise_multiplier=getattr(settings.mechanism, "noise_multiplier", None),
        training_noise_multiplier=getattr(settings.training, "noise_multiplier", None),
        nominal_rows=nominal_rows,
    )


def joined(grid: Grid, settings: Settings) -> Roster:
    """Returns the nodes of `grid`, once all have answered."""
    roster = Roster(settings.federation, settings.to_wire())
    roster.gather(grid)
    return roster


def summed(
    grid: Grid,
    settings: Settings,
    model: nn.Module,
    order: RoundOrder,
    clients: Sequence[int],
    roster: Roster | None = None,
) -> CohortSum:
    """Asks the nodes for their shares of `clients` and returns the sum over all.

    Without a `roster`, nodes host clients by the order of their ids, as those of `LocalGrid` do.
    """
    nodes = sorted(grid.get_node_ids())
    arrays, text = wire.model_record(model.state_dict()), settings.to_wire()
    asked = (
        {n: [c for c in clients if c % len(nodes) == p] for p, n in enumerate(nodes)}
        if roster is None
        else roster.group(clients)
    )
    messages = [
        wire.train_message(node, arrays, text, order, share) for node, share in asked.items()
    ]
    updates = [wire.read_train_reply(reply) for reply in grid.send_and_receive(messages)]
    total = 0
    for update in updates:
        assert isinstance(update, ProtectedUpdate), update
        total += len(update.clients)
    assert total == len(clients)
    size = sum(p.numel() for p in model.parameters())
    return settings.protection.combine(updates, size, order.round)  # type: ignore[arg-type]


def released(total: CohortSum, settings: Settings, order: RoundOrder) -> DoubleVector:
    """Returns the mean [P] that the server may use."""
    noise = rng.noise_source("bench", seed=None)
    return settings.mechanism.release(total, order, float(total.num_answered), noise).mean_P


def passes(model: nn.Module, batches: Sequence[Sequence[torch.Tensor]], workers: int) -> str:
    """Returns, in words, what the passes over a round's batches take without DP and engine."""
    lay_out, seconds = layout_of(model), []
    with one_torch_thread():
        for _ in range(3):
            start = time.perf_counter()
            for inputs, labels in batches:
                cross_entropy(model(lay_out(inputs)), labels).backward()
            seconds.append(time.perf_counter() - start)
    model.zero_grad()
    least = statistics.median(seconds)
    return (
        f"forward and backward passes over the same {len(batches)} batches alone, in plain PyTorch "
        f"with the channels innermost, take {least:.2g} s of one thread, which is "
        f"{least / workers:.2g} s of {workers} workers"
    )


def relative_error(got_P: np.ndarray, expected_P: np.ndarray) -> float:
    return float(np.linalg.norm(got_P - expected_P) / np.linalg.norm(expected_P))


def load(settings: Settings) -> LoadedData:
    return settings.dataset.load(data_path=None, cache_dir=home() / "cache")
