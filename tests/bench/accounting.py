"""What the budget costs: gate and charge of a round, the final epsilon, calibration."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dp_accounting
from dp_accounting.pld import PLDAccountant

from fl_app.accounting import pld
from fl_app.accounting.ledger import Ledger
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.overrides import compose
from tests.bench._core import Benchmark, Line, Options

RATE, DELTA = 0.1, 1e-5
CALIBRATIONS = {
    "calibration, epsilon 4, 100 rounds": [],
    "calibration, epsilon 4, 100 rounds of falling noise": ["mechanism.noise_schedule=0.98"],
    "calibration, epsilon 4, 100 rounds of falling noise, fixed-size cohorts, rdp": [
        "mechanism.noise_schedule=0.98",
        "cohort=fixed_size",
        "cohort.size=100",
        "accountant=rdp",
    ],
}
TARGETS = {"gate and charge of a round": 5e-3, "final epsilon of 1,000 rounds": 3.0}
CALIBRATION_TARGET = 10.0


@dataclass(frozen=True, kw_only=True)
class Accounting(Benchmark):
    """Seconds of each piece, nothing cached from before; where there is one, beside a plain way.

    The plain ways are dp-accounting's `PLDAccountant`, composed and asked anew (for a gate: every
    round), and its `calibrate_dp_mechanism`; for the charge one fsync of the same disk.
    """

    def lines(self, found: dict[str, Any]) -> list[Line]:
        lines = []
        for work, seconds in found["seconds"].items():
            target = TARGETS.get(work, CALIBRATION_TARGET)
            plain = found["plain_seconds"].get(work)
            lines.append(
                Line(
                    work=f"{work}, q {RATE}",
                    ours=_shown(seconds),
                    baseline=f"{_shown(plain[1])}: {plain[0]}" if plain else "-",
                    ratio=f"{seconds / plain[1]:.2f}" if plain else "-",
                    target=f"< {_shown(target)}",
                    met=seconds < target,
                )
            )
        return lines

    def run(self, options: Options) -> dict[str, Any]:
        rounds = 5 if options.tiny else 1000
        seconds: dict[str, float] = {}
        plain: dict[str, tuple[str, float]] = {}
        with tempfile.TemporaryDirectory() as folder:
            gate, sync = _gate_and_charge(Path(folder), 3 if options.tiny else 50)
        seconds["gate and charge of a round"] = gate
        plain["gate and charge of a round"] = ("one fsync of this disk", sync)
        plan = make_plan(_settings(rounds, ["mechanism.noise_multiplier=1.0"]), 60)
        _forget()
        seconds["final epsilon of 1,000 rounds"] = _timed(partial(plan.guarantees, rounds))
        plain["final epsilon of 1,000 rounds"] = (
            "dp-accounting's PLDAccountant",
            _timed(partial(_plain_epsilon, 1.0, rounds)),
        )
        for work, words in CALIBRATIONS.items():
            _forget()
            settings = _settings(5 if options.tiny else 100, [*words, "privacy.target_epsilon=4"])
            seconds[work] = _timed(partial(make_plan, settings, 60))
        if not options.tiny:
            plain["calibration, epsilon 4, 100 rounds"] = (
                "dp-accounting's calibrate_dp_mechanism",
                _timed(_plain_calibration),
            )
        shown = [f"{work} {_shown(value)}" for work, value in seconds.items()]
        shown += [f"{what} {_shown(value)}" for what, value in plain.values()]
        profile = f"a charge is durable before a round, and an fsync here takes {_shown(sync)}"
        return {
            "seconds": seconds,
            "plain_seconds": plain,
            "profile": profile,
            "text": "; ".join(shown),
        }


def _settings(num_rounds: int, words: list[str]) -> Any:
    words = ["mechanism=central_gaussian", "cohort=poisson", *words]
    if not any(word.startswith("privacy.target_epsilon") for word in words):
        words.append("privacy.target_epsilon=null")
    return compose(
        [
            "dataset=synthetic",
            "federation.population=1000",
            f"run.num_rounds={num_rounds}",
            f"privacy.target_delta={DELTA}",
            *words,
        ]
    )


def _gate_and_charge(folder: Path, num_rounds: int) -> tuple[float, float]:
    """Returns the median seconds of a round, the first left out, and of an fsync."""
    plan = make_plan(_settings(num_rounds, ["privacy.target_epsilon=4"]), 60)
    gates, syncs = [], []
    with (
        Ledger.create(folder / "ledger.sqlite", "bench") as ledger,
        (folder / "sync").open("wb", buffering=0) as file,
    ):
        for round in range(1, num_rounds + 1):
            gates.append(_timed(lambda r=round: _one_round(plan, ledger, r)))  # type: ignore[misc]
            file.write(bytes(4096))
            syncs.append(_timed(partial(os.fsync, file.fileno())))
    return statistics.median(gates[1:]), statistics.median(syncs[1:])


def _one_round(plan: PrivacyPlan, ledger: Ledger, round: int) -> None:
    assert plan.within_budget(ledger.counts(), ledger.repeats(), round=round)
    ledger.append_all(round, plan.events_of(round))


def _plain_epsilon(noise_multiplier: float, num_rounds: int) -> float:
    accountant = PLDAccountant()
    accountant.compose(_plain_round(noise_multiplier), num_rounds)
    return float(accountant.get_epsilon(DELTA))


def _plain_round(noise_multiplier: float) -> dp_accounting.DpEvent:
    return dp_accounting.PoissonSampledDpEvent(
        RATE, dp_accounting.GaussianDpEvent(noise_multiplier)
    )


def _plain_calibration() -> float:
    return float(
        dp_accounting.calibrate_dp_mechanism(
            PLDAccountant,
            lambda z: dp_accounting.SelfComposedDpEvent(_plain_round(z), 100),
            target_epsilon=4.0,
            target_delta=DELTA,
            tol=1e-4,
        )
    )


def _forget() -> None:
    for cache in (pld._epsilon, pld._total, pld._composed, pld._single):
        cache.cache_clear()


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _shown(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{seconds:.2g} s"


BENCHMARK = Accounting(title="accounting")
