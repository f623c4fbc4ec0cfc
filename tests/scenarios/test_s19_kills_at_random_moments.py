"""S19: `kill -9` of a whole run at 20 random moments loses no spent budget.

A real process each time, forked from this one so that nothing has to be imported again. It notes on
disk what it asks clients for before it does. Whatever the moment, all of that was charged before.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Message, MessageType
from harness import UNLIMITED, RecordingGrid, charged_rounds, watched_run

from fl_app.accounting.ledger import verify
from fl_app.run import default_directory
from fl_app.run_directory import RunDirectory, verify_ledger
from fl_app.server_run import load_settings, run_server
from fl_app.settings import Settings

KILLS, ROUNDS = 20, 400
RUN = [
    *UNLIMITED, "mechanism=central_gaussian", "mechanism.noise_multiplier=4", "cohort=poisson",
    "cohort.sampling_rate=0.5", f"run.num_rounds={ROUNDS}", "run.evaluate_every=1000",
]  # fmt: skip


class NotingGrid(RecordingGrid):
    """Appends the number of each round to a file before the round's clients are asked."""

    def __init__(self, notes: Path) -> None:
        super().__init__(2)
        self.notes = notes

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = list(messages)
        if sent and sent[0].metadata.message_type == MessageType.TRAIN:
            with open(self.notes, "a", encoding="utf-8") as file:
                file.write(f"{sent[0].metadata.group_id}\n")
        return super().send_and_receive(sent, timeout=timeout)


def in_a_process(settings: Settings, notes: Path, seconds: float) -> int:
    """Runs in a forked process and kills it after `seconds`; returns how it ended."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            run_server(NotingGrid(notes), settings)
            code = 0
        finally:
            os._exit(code)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.timeout(180)
def test_s19_twenty_kills_at_random_moments_lose_no_charge(tmp_path: Path) -> None:
    watched_run(tmp_path / "warm", *RUN, "run.num_rounds=1")  # data decoded, modules imported
    folder, notes = tmp_path / "run", tmp_path / "notes"
    settings = load_settings([*RUN, f"run.output_dir={folder}"], default_directory)
    moments, charged_before, kills = random.Random(), 0, 0
    for _ in range(KILLS * 3):
        if (folder / "checkpoint.safetensors").exists():
            settings = load_settings([f"run.resume={folder}"], default_directory)
        status = in_a_process(settings, notes, moments.uniform(0.02, 0.5))
        assert os.WIFSIGNALED(status), "the run ended by itself; give it more rounds"
        kills += 1
        if not (folder / "checkpoint.safetensors").exists():
            assert not notes.exists()  # nobody was asked; such a run is begun anew
            folder = tmp_path / f"run{kills}"
            settings = load_settings([*RUN, f"run.output_dir={folder}"], default_directory)
            continue
        assert verify(folder / "ledger.sqlite") == []
        charged = Counter(charged_rounds(folder / "ledger.sqlite"))
        asked = Counter(map(int, notes.read_text().split())) if notes.exists() else Counter()
        assert asked <= charged, "clients were asked before the charge was on disk"
        assert charged.total() >= charged_before
        # Everything that the checkpoint releases is paid for, every interrupted round at most once.
        done = RunDirectory(folder).load_checkpoint().round
        assert set(range(1, done + 1)) <= set(charged)
        assert done <= charged.total() <= done + kills
        assert verify_ledger(folder / "ledger.sqlite") == []
        charged_before = charged.total()
        if kills >= KILLS and charged_before > 0:
            break
    assert kills >= KILLS
    assert charged_before > 0
    stop = RunDirectory(folder).load_checkpoint().round + 1
    resumed = load_settings([f"run.resume={folder}", f"run.stop_after={stop}"], default_directory)
    report = run_server(NotingGrid(notes), resumed)
    straight = watched_run(tmp_path / "straight", *RUN, f"run.stop_after={stop}").report
    spent, least = report.guarantees[0].epsilon, straight.guarantees[0].epsilon
    assert spent is not None and least is not None  # noqa: PT018
    assert spent >= least
    assert report.ledger_rows == sum(Counter(charged_rounds(folder / "ledger.sqlite")).values())
