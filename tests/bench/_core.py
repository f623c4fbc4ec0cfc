"""What a benchmark is, how two pieces of work are timed against each other, and the machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "opacus", "flwr", "numpy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run: `tiny` sizes only show that everything works, their times mean nothing."""

    tiny: bool
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Another product that is a baseline: rows that need it are slow and run only when asked for.

    Attributes:
        name: what ``--baseline`` calls it.
        requirements: packages beyond those of dpfl, each ``name==version``.
    """

    name: str
    requirements: tuple[str, ...] = ()

    @property
    def missing(self) -> str:
        """What to do about missing packages in one line, empty if all are here."""
        missing = [r for r in self.requirements if not _installed(*r.split("=="))]
        if not missing:
            return ""
        # Without dependencies: those of dpfl do, and pfl asks for an older dp-accounting.
        install = f"pip install --no-deps {' '.join(self.requirements)}"
        return f"{self.name}: {', '.join(missing)} not installed; {install}"


PFL = Product(name="pfl", requirements=("pfl==0.6.0", "prv-accountant==0.2.0"))
FLOWER_OPACUS = Product(name="flower_opacus")
PRODUCTS = (PFL, FLOWER_OPACUS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of the table of results.

    Attributes:
        work: what was done.
        ours, baseline: what each took, in words.
        ratio: ours over the baseline, or what the target is about.
        target: in words.
        met: whether the target is met.
    """

    work: str
    ours: str
    baseline: str
    ratio: str
    target: str
    met: bool


@dataclass(frozen=True, kw_only=True)
class Benchmark(ABC):
    """One row, or a few, of the table of results.

    Attributes:
        title: the work in words.
        product: the other product that it needs.
    """

    title: str
    product: Product | None = None

    def explanation(self, found: dict[str, Any]) -> str:
        """Returns where the time goes, for a target that is not met; empty if nobody looked."""
        return str(found.get("profile", ""))

    @abstractmethod
    def lines(self, found: dict[str, Any]) -> list[Line]:
        """Returns the lines of the table for what `run` returned."""

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
        profile: measures where the time goes; asked if the target is not met.
    """

    ours: Callable[[], object]
    baseline: Callable[[], object]
    check: Callable[[], None]
    profile: Callable[[], str] = lambda: ""


@dataclass(frozen=True, kw_only=True)
class Ratio(Benchmark):
    """The time of ours divided by that of a named baseline, measured in turn: A B A B.

    Attributes:
        baseline: what it is measured against, in words.
        target: the ratio to reach.
        threads: torch threads of this process.
        work: prepares the work; its time does not count.
    """

    baseline: str
    target: float
    threads: int
    work: Callable[[Options], AbstractContextManager[Work]]

    def lines(self, found: dict[str, Any]) -> list[Line]:
        ours, baseline = (statistics.median(found[f"{s}_seconds"]) for s in ("ours", "baseline"))
        low, high = found["spread"]
        return [
            Line(
                work=f"{self.title}, {self.threads} thread{'s' if self.threads > 1 else ''}",
                ours=f"{ours:.3g} s",
                baseline=f"{baseline:.3g} s: {self.baseline}",
                ratio=f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})",
                target=f"<= {self.target:.2f}",
                met=found["ratio"] <= self.target,
            )
        ]

    def run(self, options: Options) -> dict[str, Any]:
        threads = torch.get_num_threads()
        # Threads that wait for each other make tiny work slow where many programs run.
        torch.set_num_threads(1 if options.tiny else self.threads)
        try:
            with self.work(options) as work:
                work.check()
                ours, baseline = in_turn(work.ours, work.baseline, options.repeats, self._clock())
                ratio = statistics.median(ours) / statistics.median(baseline)
                profile = work.profile() if ratio > self.target and not options.tiny else ""
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
            "ratio": ratio,
            "spread": [min(ratios), max(ratios)],
            "profile": profile,
        }
        text = (
            f"{statistics.median(ours):.3f} s against {statistics.median(baseline):.3f} s "
            f"({self.baseline}): ratio {ratio:.2f}, pairs {min(ratios):.2f} to "
            f"{max(ratios):.2f}, target <= {self.target:.2f}, {self.threads} thread(s), "
            f"{found['clock']}"
        ) + (f"; {profile}" if profile else "")
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
    """Returns the benchmarks in this folder, those that need another product included."""
    files = Path(__file__).parent.glob("[a-z]*.py")
    return sorted(f.stem for f in files if "\nBENCHMARK = " in f.read_text(encoding="utf-8"))


def _installed(package: str, wanted: str) -> bool:
    try:
        return version(package) == wanted
    except PackageNotFoundError:
        return False


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


def run(name: str, options: Options) -> dict[str, Any]:
    """Returns what the benchmark finds in a program of its own, whatever ran before it.

    (What an earlier one left in the memory allocator moved a plain PyTorch loop by half.)
    """
    if options.tiny:
        return load(name).run(options)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        arguments = [name, str(options.repeats), str(out)]
        subprocess.run([sys.executable, "-c", _ALONE, *arguments], check=True)
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


_ALONE = """
import json, sys
from tests.bench import _core
name, repeats, out = sys.argv[1:]
found = _core.load(name).run(_core.Options(tiny=False, repeats=int(repeats)))
with open(out, "w", encoding="utf-8") as file:
    json.dump(found, file)
"""
