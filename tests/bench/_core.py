"""What a benchmark is, how two pieces of work are timed against each other, and the machine."""

from __future__ import annotations

import importlib
import os
import platform
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "opacus", "flwr", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run: `tiny` sizes only show that everything works, their times mean nothing."""

    tiny: bool
    repeats: int


class Benchmark(ABC):
    """One row, or a few, of the table of results.

    Attributes:
        title: the work in words.
    """

    title: str

    @abstractmethod
    def run(self, options: Options) -> dict[str, Any]:
        """Returns what was found, for JSON; ``"text"`` is the line to print.

        Raises:
            AssertionError: the results that were timed are wrong.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Two ways to do one piece of work.

    Attributes:
        ours, baseline: do the work once.
        check: raises AssertionError unless both give the same result where they should.
    """

    ours: Callable[[], object]
    baseline: Callable[[], object]
    check: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Ratio(Benchmark):
    """The time of ours divided by that of a named baseline, measured in turn: A B A B.

    Attributes:
        baseline: what it is measured against, in words.
        target: the ratio to reach.
        threads: torch threads of this process.
        work: prepares the work; its time does not count.
    """

    title: str
    baseline: str
    target: float
    threads: int
    work: Callable[[Options], AbstractContextManager[Work]]

    def run(self, options: Options) -> dict[str, Any]:
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with self.work(options) as work:
                work.check()
                ours, baseline = in_turn(work.ours, work.baseline, options.repeats, self._clock())
        finally:
            torch.set_num_threads(threads)
        ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
        found = {
            "baseline": self.baseline,
            "target": self.target,
            "threads": self.threads,
            "clock": self._clock().__name__,
            "ours_seconds": ours,
            "baseline_seconds": baseline,
            "ratio": statistics.median(ours) / statistics.median(baseline),
            "spread": [min(ratios), max(ratios)],
        }
        text = (
            f"{statistics.median(ours):.3f} s against {statistics.median(baseline):.3f} s "
            f"({self.baseline}): ratio {found['ratio']:.2f}, pairs {min(ratios):.2f} to "
            f"{max(ratios):.2f}, target <= {self.target:.2f}, {self.threads} thread(s), "
            f"{found['clock']}"
        )
        return found | {"text": text}

    def _clock(self) -> Callable[[], float]:
        """One thread is timed by the processor: other programs then disturb it less."""
        return time.process_time if self.threads == 1 else time.perf_counter


def in_turn(
    ours: Callable[[], object],
    baseline: Callable[[], object],
    repeats: int,
    clock: Callable[[], float],
) -> tuple[list[float], list[float]]:
    """Returns the seconds of each, run `repeats` times in turn after one run without a clock."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for work, seconds in zip((ours, baseline), times, strict=True):
            start = clock()
            work()
            if number:
                seconds.append(clock() - start)
    return times


def names() -> list[str]:
    """Returns the benchmarks in this folder."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    return sorted(f.stem for f in files if "\nBENCHMARK = " in f.read_text(encoding="utf-8"))


def load(name: str) -> Benchmark:
    """Returns the benchmark of the file `name`."""
    benchmark: Benchmark = importlib.import_module(f"{__package__}.{name}").BENCHMARK
    return benchmark


def machine() -> dict[str, Any]:
    """Returns what the times depend on: processor, cores, load, versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "")
    return {
        "processor": model or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "python": platform.python_version(),
    } | {package: version(package) for package in PACKAGES}


def as_json(found: dict[str, dict[str, Any]], options: Options) -> dict[str, Any]:
    """Returns everything that a later reader needs to judge the numbers."""
    return {"machine": machine(), "options": asdict(options), "benchmarks": found}
