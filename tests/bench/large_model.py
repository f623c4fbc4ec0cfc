"""What the server does with the replies of a round for a model of 50 million parameters.

Clock: wall time, with torch's threads set to this machine's cores. Aggregation works in threads,
whose processor times would add up; a copy is one thread's work. Every reply has bytes of its own:
one update in the cache for all of them would make sums look cheap.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from flwr.app import ConfigRecord, Message

from fl_app import wire
from fl_app.accounting.ledger import Ledger
from fl_app.accounting.plan import make_plan
from fl_app.engines.local import LocalGrid
from fl_app.mechanisms.central_gaussian import CentralGaussian
from fl_app.models import flat_parameters, set_flat_parameters
from fl_app.overrides import compose
from fl_app.protection.none import NoProtection
from fl_app.stages import DoubleVector, FloatVector, ProtectedUpdate
from strategies.dp_fedavg import DPFedAvg
from strategies.server_optimizers.sgd import ServerSgd
from tests.bench._core import Benchmark, Line, Options
from tests.bench._rounds import joined, load, network
from tests.bench._runs import resident

COHORT, TIMED = 10, 5
STEPS = {
    "decode": (wire, "read_train_reply"),
    "sum": (NoProtection, "combine"),
    "noise": (CentralGaussian, "_add_noise"),
    "mean": (CentralGaussian, "_mean"),
    "step": (ServerSgd, "step"),
    "message": (DPFedAvg, "_to_arrays"),
}
"""The parts of `DPFedAvg.aggregate_train`, in order."""


@dataclass(frozen=True, kw_only=True)
class Aggregation(Benchmark):
    """Time and peak memory from the replies to the message of the next round.

    Attributes:
        models: peak memory to stay below, in models of float32.
        copies: time to stay below, in NumPy copies of one.
    """

    models: float
    copies: float

    def lines(self, found: dict[str, Any]) -> list[Line]:
        seconds, copy = (statistics.median(found[key]) for key in ("seconds", "copy_seconds"))
        peak = statistics.median(found["peak_models"])
        return [
            Line(
                work=f"{self.title}: time",
                ours=f"{seconds:.2f} s",
                baseline=f"{copy:.3g} s: NumPy copy of one model",
                ratio=f"{found['ratio']:.1f}",
                target=f"<= {self.copies:g}",
                met=found["ratio"] <= self.copies,
            ),
            Line(
                work=f"{self.title}: peak memory",
                ours=f"{peak:.2f} models",
                baseline="one model",
                ratio=f"{peak:.2f}",
                target=f"<= {self.models:g}",
                met=peak <= self.models,
            ),
        ]

    def explanation(self, found: dict[str, Any]) -> str:
        """Returns what each step takes, in copies of one model."""
        return "in copies: " + ", ".join(f"{k} {v:.1f}" for k, v in found["profile_copies"].items())

    def run(self, options: Options) -> dict[str, Any]:
        hidden = "[20,20]" if options.tiny else "[7000,6300]"
        threads, cores = torch.get_num_threads(), os.cpu_count() or 1
        torch.set_num_threads(cores)
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = self._measure(Path(folder), hidden, options)
        finally:
            torch.set_num_threads(threads)
        return found | {"threads": cores}

    def _measure(self, folder: Path, hidden: str, options: Options) -> dict[str, Any]:
        parts: Counter[str] = Counter()
        with _strategy(folder, hidden) as server:
            strategy, grid, arrays = server
            size = strategy.parameters_P.size
            rounds = 1 if options.tiny else min(TIMED, options.repeats)
            warm_ups = 0 if options.tiny else 1  # a virtual machine may have to fetch its memory
            update_P = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
            seconds, cpu_seconds, copies, peaks = [], [], [], []
            for number in range(1, warm_ups + rounds + 1):
                messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
                replies = _replies(list(messages), update_P, number)
                start_P = strategy.parameters_P.copy()
                copies.append(_copy_seconds(update_P))
                before = _reset_peak()
                with _watched(strategy, parts if number > warm_ups else Counter()):
                    start, cpu = time.perf_counter(), time.process_time()
                    arrays, _ = strategy.aggregate_train(number, replies)  # type: ignore[assignment]
                    seconds.append(time.perf_counter() - start)
                    cpu_seconds.append(time.process_time() - cpu)
                peaks.append(max(0, _peak() - before) / update_P.nbytes)
                strategy._finish_round(None)
                np.testing.assert_allclose(strategy.parameters_P - start_P, update_P, atol=1e-5)
                del messages, replies
        seconds, cpu_seconds, copies, peaks = (
            found[warm_ups:] for found in (seconds, cpu_seconds, copies, peaks)
        )
        copy = statistics.median(copies)
        ratio = statistics.median(seconds) / copy
        profile = {name: spent / rounds / copy for name, spent in parts.items()}
        peak = statistics.median(peaks)
        text = (
            f"{size:,} parameters: {statistics.median(seconds):.2f} s, {ratio:.1f} copies (target "
            f"<= {self.copies:g}), peak {peak:.2f} models (target <= {self.models:g}), "
            f"{torch.get_num_threads()} threads, perf_counter (all threads' process_time: "
            f"{statistics.median(cpu_seconds):.2f} s); in copies: "
            + ", ".join(f"{name} {share:.1f}" for name, share in profile.items())
        )
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "copy_seconds": copies,
            "peak_models": peaks,
            "profile_copies": profile,
            "ratio": ratio,
            "text": text,
        }


@contextmanager
def _watched(strategy: DPFedAvg, parts: Counter[str]) -> Iterator[None]:
    """Adds the seconds that each of `STEPS` takes to `parts`."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                parts[name] += time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in STEPS.items():
            place = strategy if owner is DPFedAvg else owner
            watched = timed(name, getattr(place, attribute))
            stack.enter_context(patch.object(place, attribute, watched))
        yield


@contextmanager
def _strategy(folder: Path, hidden: str) -> Iterator[tuple[DPFedAvg, LocalGrid, Any]]:
    settings = compose(
        [
            "dataset=synthetic",
            "dataset.num_train=100",
            "dataset.num_test=10",
            "partition=iid",
            "model=mlp",
            f"model.hidden={hidden}",
            "mechanism=central_gaussian",
            "mechanism.noise_multiplier=0.001",
            "mechanism.clipping_norm=0.000001",
            "server_optimizer=sgd",
            "privacy.target_epsilon=null",
            f"federation.population={COHORT}",
        ]
    )
    model = network(settings, load(settings))

    def to_arrays(vector_P: DoubleVector) -> Any:
        set_flat_parameters(model, vector_P)
        return wire.model_record(model.state_dict())

    parameters_P = flat_parameters(model).astype(np.float64)
    ledger = Ledger.create(folder / "ledger.sqlite", "bench")
    try:
        with LocalGrid(COHORT, 0) as grid:
            plan = make_plan(settings, 10, num_parameters=parameters_P.size)
            strategy = DPFedAvg(
                settings=settings,
                plan=plan,
                ledger=ledger,
                roster=joined(grid, settings),
                parameters_P=parameters_P,
                optimizer_state={},
                to_arrays=to_arrays,
                nominal_rows=10,
            )
            yield strategy, grid, to_arrays(parameters_P)
    finally:
        ledger.close()


def _replies(messages: list[Message], update_P: FloatVector, number: int) -> list[Message]:
    """Returns the same update from every node, one client each, every time in bytes of its own."""
    assert len(messages) == COHORT
    replies: list[Message] = []
    for message in messages:
        clients = wire.read_train(message).clients
        update = ProtectedUpdate(round=number, clients=clients, vector_P=update_P, weight=1.0)
        replies.append(wire.train_reply(update, message))
    return replies


def _copy_seconds(vector: np.ndarray) -> float:
    """Returns the median of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        vector.copy()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _reset_peak() -> int:
    """Lets the system forget the most memory that was used; returns what is used now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return resident()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


BENCHMARK = Aggregation(
    title="server aggregation of 10 replies, 50 million parameters, noise included",
    models=3.0,
    copies=15.0,
)
