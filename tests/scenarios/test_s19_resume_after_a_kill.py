"""S19: 6 rounds straight against 3, a kill in the fourth, and the rest: never less is stated."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Message, MessageType
from harness import CENTRAL, UNLIMITED, RecordingGrid, charged_rounds, watched_run

from fl_app.errors import LedgerError
from fl_app.run import default_directory
from fl_app.server_run import load_settings, run_server

SIX = [*UNLIMITED, "run.num_rounds=6"]
KINDS = {
    "central": [*CENTRAL, "mechanism.noise_multiplier=1"],
    "schedule": [*CENTRAL, "mechanism.noise_multiplier=1", "mechanism.noise_schedule=0.9"],
    "record": ["training.noise_multiplier=1"],
    # 10 clients by turns, 6 a round: rounds 1 to 6 ask a client 4 times, round 4 twice makes 5.
    "by turns": [
        "mechanism=central_gaussian",
        "mechanism.noise_multiplier=1",
        "cohort=round_robin",
        "cohort.size=6",
        "cohort.fraction=null",
    ],
}


class Killed(BaseException):
    """Ends the process, as far as the run can tell."""


class KillingGrid(RecordingGrid):
    """Kills the run in a round, when the cohort is asked or when the replies are in."""

    def __init__(self, round: int, when: str) -> None:
        super().__init__(2)
        self.round, self.when = round, when

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        sent = list(messages)
        hit = any(
            m.metadata.message_type == MessageType.TRAIN and m.metadata.group_id == str(self.round)
            for m in sent
        )
        if hit and self.when == "asked":
            raise Killed
        replies = super().send_and_receive(sent, timeout=timeout)
        if hit:
            raise Killed
        return replies


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("when", ["asked", "answered"])
def test_s19_a_kill_costs_one_charge_more_and_never_one_less(
    tmp_path: Path, kind: str, when: str
) -> None:
    straight = watched_run(tmp_path / "straight", *SIX, *KINDS[kind]).results
    folder = tmp_path / "killed"
    settings = load_settings([*SIX, *KINDS[kind], f"run.output_dir={folder}"], default_directory)
    with pytest.raises(Killed):
        run_server(KillingGrid(4, when), settings)
    old = tmp_path / "old.sqlite"
    shutil.copy(folder / "ledger.sqlite", old)
    resumed = load_settings([f"run.resume={folder}"], default_directory)
    report = run_server(RecordingGrid(2), resumed)
    assert report.status == "completed"
    assert charged_rounds(folder / "ledger.sqlite") == [1, 2, 3, 4, 4, 5, 6]
    spent = [row["epsilon"] for row in straight["history"]]
    after = [row.epsilon for row in report.history]
    assert after[:3] == spent[:3]
    assert all(a > s for a, s in zip(after[3:], spent[3:], strict=True))
    # The ledger as it was at the kill is older than the finished run's record.
    shutil.copy(old, folder / "ledger.sqlite")
    with pytest.raises(LedgerError, match="older"):
        run_server(RecordingGrid(2), load_settings([f"run.resume={folder}"], default_directory))
