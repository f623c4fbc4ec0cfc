"""A hundred times as many clients in the registry, the same cohort: time and memory stay."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.bench._core import Benchmark, Line, Options
from tests.bench._runs import costs


@dataclass(frozen=True, kw_only=True)
class Population(Benchmark):
    """Processor time of a round and memory at the end, of many clients over those of few."""

    target: float

    def lines(self, found: dict[str, Any]) -> list[Line]:
        few, many = (statistics.median(times) for times in found["seconds"].values())
        less, more = (statistics.median(sizes) for sizes in found["resident_bytes"].values())
        values = {
            "time_ratio": (f"{1e3 * many:.1f} ms a round", f"{1e3 * few:.1f} ms"),
            "memory_ratio": (f"{more / 2**20:.0f} MiB", f"{less / 2**20:.0f} MiB"),
        }
        return [
            Line(
                work=self.title,
                ours=ours,
                baseline=f"{baseline}: itself",
                ratio=f"{found[key]:.2f}",
                target=f"<= {self.target:.2f}",
                met=found[key] <= self.target,
            )
            for key, (ours, baseline) in values.items()
        ]

    def run(self, options: Options) -> dict[str, Any]:
        few, many, cohort = (20, 200, 10) if options.tiny else (1_000, 100_000, 100)
        times: dict[int, list[float]] = {few: [], many: []}
        memory: dict[int, list[int]] = {few: [], many: []}
        for _ in range(1 if options.tiny else min(3, options.repeats)):
            for population in (few, many):
                found = costs(_overrides(population, many, cohort, 4 if options.tiny else 12))
                stamps = [cost.seconds for cost in found]
                # The first round splits the rows and builds the model; it is left out.
                rounds = [b - a for a, b in pairwise(stamps[1:])]
                times[population].append(statistics.median(rounds))
                memory[population].append(found[-1].resident)
        seconds = {n: statistics.median(values) for n, values in times.items()}
        mib = {n: statistics.median(values) / 2**20 for n, values in memory.items()}
        text = (
            f"{1e3 * seconds[few]:.1f} ms a round of {few} clients, {1e3 * seconds[many]:.1f} of "
            f"{many} ({seconds[many] / seconds[few]:.2f}x); {mib[few]:.0f} and {mib[many]:.0f} MiB "
            f"({mib[many] / mib[few]:.2f}x); target <= {self.target}x, process_time"
        )
        return {
            "seconds": times,
            "resident_bytes": memory,
            "time_ratio": seconds[many] / seconds[few],
            "memory_ratio": mib[many] / mib[few],
            "target": self.target,
            "text": text,
        }


def _overrides(population: int, num_rows: int, cohort: int, num_rounds: int) -> list[str]:
    """Returns a run in which every asked client takes one step on one row."""
    return [
        "dataset=synthetic",
        f"dataset.num_train={num_rows}",
        "dataset.num_test=100",
        "partition=iid",
        "model=cnn",
        "mechanism=central_gaussian",
        "mechanism.noise_multiplier=1.0",
        "privacy.target_epsilon=null",
        "training.local_epochs=null",
        "training.local_steps=1",
        "training.batch_size=1",
        "cohort=fixed_size",
        f"cohort.size={cohort}",
        "accountant=rdp",
        "privacy.target_delta=1e-6",
        f"federation.population={population}",
        f"run.num_rounds={num_rounds}",
    ]


BENCHMARK = Population(
    title="population 1,000 -> 100,000, cohort 100, one step of one row, whole runs",
    target=1.1,
)
