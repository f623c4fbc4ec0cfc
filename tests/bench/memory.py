"""Resident memory of a long run: round 50 against round 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.bench._core import Benchmark, Line, Options
from tests.bench._runs import costs


@dataclass(frozen=True, kw_only=True)
class Memory(Benchmark):
    """Resident memory late in a run over that early in it, server and nodes in one process."""

    target: float

    def lines(self, found: dict[str, Any]) -> list[Line]:
        resident = found["resident_mib"]
        return [
            Line(
                work=self.title,
                ours=f"{resident[49]:.0f} MiB at round 50",
                baseline=f"{resident[4]:.0f} MiB: itself at round 5",
                ratio=f"{found['ratio']:.3f}",
                target=f"< {self.target:g}",
                met=found["ratio"] < self.target,
            )
        ]

    def run(self, options: Options) -> dict[str, Any]:
        clients, rounds, early, late = (5, 4, 2, 3) if options.tiny else (100, 100, 5, 50)
        found = [cost.resident / 2**20 for cost in costs(_overrides(clients, rounds))]
        assert len(found) == rounds
        ratio = found[late - 1] / found[early - 1]
        text = (
            f"{found[early - 1]:.0f} MiB at round {early}, {found[late - 1]:.0f} at {late} "
            f"({ratio:.3f}x), {found[-1]:.0f} at {rounds}; target < {self.target}x"
        )
        return {"resident_mib": found, "ratio": ratio, "target": self.target, "text": text}


def _overrides(clients: int, rounds: int) -> list[str]:
    return [
        "dataset=synthetic",
        f"dataset.num_train={10 * clients}",
        "dataset.num_test=100",
        "partition=iid",
        "model=cnn",
        "mechanism=central_gaussian",
        "mechanism.noise_multiplier=1.0",
        "privacy.target_epsilon=null",
        f"federation.population={clients}",
        f"run.num_rounds={rounds}",
    ]


BENCHMARK = Memory(title="100 rounds of 100 clients, cnn: resident memory", target=1.05)
