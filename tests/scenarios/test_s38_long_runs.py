"""S38: 100 clients, 50 rounds, small CNN: workers as configured, memory flat."""

import os
from collections.abc import Iterable
from pathlib import Path

from flwr.app import Message

from fl_app.engines.local import LocalGrid
from fl_app.server_run import load_settings, run_server

WORKERS, ROUNDS, EARLY = 2, 50, 10
PAGE = os.sysconf("SC_PAGE_SIZE")


class WeighedGrid(LocalGrid):
    """Notes, after every round, the resident bytes of the server and of every worker."""

    def __init__(self) -> None:
        super().__init__(WORKERS, WORKERS)
        self.server: list[int] = []
        self.workers: list[dict[int, int]] = []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies = super().send_and_receive(messages, timeout=timeout)
        self.server.append(_resident(os.getpid()))
        self.workers.append({pid: _resident(pid) for pid in _workers(self)})
        return replies


def test_s38_a_hundred_clients_for_fifty_rounds_need_no_more_memory(tmp_path: Path) -> None:
    words = [
        "dataset=synthetic",
        "dataset.num_train=200",
        "dataset.num_test=20",
        "partition=iid",
        "model=cnn",
        "mechanism=central_gaussian",
        "mechanism.noise_multiplier=1",
        "privacy.target_epsilon=null",
        "federation.population=100",
        f"run.num_rounds={ROUNDS}",
        f"run.output_dir={tmp_path}/run",
    ]
    with WeighedGrid() as grid:
        report = run_server(grid, load_settings(words, lambda: tmp_path / "run"))
    assert report.status == "completed"
    assert len(grid.server) == ROUNDS
    assert all(len(weights) == WORKERS for weights in grid.workers)
    assert grid.workers[0].keys() == grid.workers[-1].keys(), "workers are not replaced"
    assert grid.server[-1] < 1.05 * grid.server[EARLY - 1]
    for pid, late in grid.workers[-1].items():
        assert late < 1.05 * grid.workers[EARLY - 1][pid]


def _workers(grid: LocalGrid) -> list[int]:
    assert grid._pool is not None
    return list(grid._pool._processes)  # type: ignore[attr-defined]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * PAGE
