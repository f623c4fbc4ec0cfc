"""Whole runs in a process of their own: processor time and resident memory of every round."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Message

from fl_app.engines.local import LocalGrid
from fl_app.server_run import load_settings, run_server

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCost:
    """What the process had used when a round began to ask its nodes.

    Attributes:
        seconds: processor time so far.
        resident: bytes.
    """

    seconds: float
    resident: int


def costs(overrides: Sequence[str]) -> list[RoundCost]:
    """Returns the costs at every round of a run in a new process that is server and node in one."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(_costs, list(overrides)).result()


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE


class _WatchedGrid(LocalGrid):
    """Notes the costs whenever a round asks its nodes."""

    def __init__(self) -> None:
        super().__init__(1, 0)
        self.found: list[RoundCost] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        self.found.append(RoundCost(seconds=time.process_time(), resident=resident()))
        return super().send_and_receive(messages, timeout=timeout)


def _costs(overrides: list[str]) -> list[RoundCost]:
    import torch

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a run shows
    with tempfile.TemporaryDirectory() as folder, _WatchedGrid() as grid:
        settings = load_settings(
            [*overrides, f"run.output_dir={folder}/run"], lambda: Path(folder) / "run"
        )
        report: Any = run_server(grid, settings)
        assert report.status == "completed"
    return grid.found
