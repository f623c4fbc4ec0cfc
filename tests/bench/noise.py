"""Samples a second of the cryptographic noise generator, on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fl_app import rng
from fl_app.integer_noise import table
from fl_app.privacy import NoiseKind
from tests.bench._core import Benchmark, Line, Options, in_turn


@dataclass(frozen=True, kw_only=True)
class Noise(Benchmark):
    """Million samples a second of each law, beside NumPy's generator, which is not cryptographic.

    Attributes:
        target: million samples a second.
    """

    target: float

    def lines(self, found: dict[str, Any]) -> list[Line]:
        return [
            Line(
                work=f"{law} noise, one core",
                ours=f"{values['ours']:.0f} M samples/s",
                baseline=f"{values['numpy']:.0f} M: NumPy's PCG64 (not cryptographic), normal",
                ratio=f"{values['ours'] / values['numpy']:.2f} times as many",
                target=f">= {self.target:g} M samples/s",
                met=values["ours"] >= self.target,
            )
            for law, values in found["millions"].items()
        ]

    def run(self, options: Options) -> dict[str, Any]:
        size = 1 << (12 if options.tiny else 21)
        source, vector_P = rng.noise_source("bench", seed=None), np.zeros(size)
        numpy_source = np.random.default_rng(0)
        laws: dict[str, Callable[[], object]] = {
            "Gaussian": partial(source.add_gaussian, vector_P, 1.0),
            "Laplace": partial(source.add_laplace, vector_P, 1.0),
        }
        for kind in (NoiseKind.DISCRETE_GAUSSIAN, NoiseKind.SKELLAM):
            law = table(kind, 100.0**2)
            laws[kind.replace("_", " ")] = partial(source.integers, law, size)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = {}
        try:
            plain = partial(numpy_source.normal, size=size)
            for name, draw in laws.items():
                times = in_turn(draw, plain, options.repeats, time.process_time)
                millions = [size / 1e6 / statistics.median(seconds) for seconds in times]
                found[name] = {"ours": millions[0], "numpy": millions[1]}
        finally:
            torch.set_num_threads(threads)
        shown = [f"{law} {values['ours']:.0f} M samples/s" for law, values in found.items()]
        return {"millions": found, "text": f"{', '.join(shown)}, target >= {self.target:g} M"}


BENCHMARK = Noise(title="noise on one core", target=20.0)
