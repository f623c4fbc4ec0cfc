"""DP-SGD steps of the next-character network against the same steps with Opacus' hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from fl_app.data.text import Tokens
from fl_app.models import build_model
from fl_app.overrides import compose
from fl_app.stages import ClientPartition, InputSpec, Table
from tests.bench._core import Options, Ratio, Work
from tests.bench._training import check_against_opacus, dp_epoch, without_fast_rules

SPEC = InputSpec(shape=(80,), num_classes=90, vocabulary=90)


@contextmanager
def _work(options: Options) -> Iterator[Work]:
    rows, steps = (4, 1) if options.tiny else (16, 2)
    random = np.random.default_rng(0)
    table = Table(
        features=random.integers(0, 90, (rows * steps, 80)),
        labels=random.integers(0, 90, rows * steps),
        transform=Tokens(),
    )
    client = ClientPartition(client=0, table=table, rows=np.arange(rows * steps))
    model = build_model(compose(["model=char_lstm"]).model, SPEC, seed=0, private=True)

    def baseline() -> None:
        with without_fast_rules():
            dp_epoch(model, client, rows)

    yield Work(
        ours=lambda: dp_epoch(model, client, rows),
        baseline=baseline,
        check=lambda: check_against_opacus(model, client),
    )


BENCHMARK = Ratio(
    title="DP-SGD steps of batch 16, char_lstm (822,570 parameters), 80 characters",
    baseline="the same with Opacus' hooks",
    target=1 / 1.5,
    threads=1,
    work=_work,
)
