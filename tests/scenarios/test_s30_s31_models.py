"""S30, S31: plain keys everywhere; awkward networks train or say why not before training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import CENTRAL, UNLIMITED, watched_run
from safetensors.torch import load_file
from torch import nn

from fl_app.errors import ModelError
from fl_app.models.linear import PLUGIN as LINEAR

REPO = Path(__file__).resolve().parents[2]
RECORD = [*UNLIMITED, "training.noise_multiplier=1", "federation.population=3"]

LOAD_WITHOUT_OPACUS = """
import sys
sys.modules["opacus"] = None
from safetensors.torch import load_file
from fl_app import plugins
from fl_app.stages import InputSpec
model = plugins.build("model", {"kind": "linear"}).build(InputSpec(shape=(1, 8, 8), num_classes=10))
print(model.load_state_dict(load_file(sys.argv[1]), strict=True))
"""


def test_s30_saved_and_sent_keys_are_plain_and_load_without_the_dp_library(tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", *RECORD, "run.num_rounds=3")
    saved = load_file(run.folder / "model.safetensors")
    for message in run.grid.train_messages():
        assert set(message.content.array_records["model"]) == set(saved)
    assert not any("_module" in name or "grad_sample" in name for name in saved)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHOUT_OPACUS, str(run.folder / "model.safetensors")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "All keys matched" in done.stdout, done.stderr


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.relu(self.first(x))
        scores: torch.Tensor = self.head(self.relu(first + self.second(first)).flatten(1))
        return scores


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x.flatten(1))
        return scores


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 10), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.used(x.flatten(1))
        return scores


@pytest.mark.parametrize("network", [Residual, Table, Unused])
@pytest.mark.parametrize(
    "overrides", [RECORD, [*CENTRAL, *UNLIMITED, "mechanism.noise_multiplier=1"]],
    ids=["record", "client"],
)  # fmt: skip
def test_s31_awkward_networks_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: type, overrides: list[str]
) -> None:
    monkeypatch.setattr(LINEAR, "build", lambda self, spec: network())
    run = watched_run(tmp_path / "run", *overrides, "federation.population=3")
    assert run.report.status == "completed"
    replies = run.grid.train_replies()
    assert len(replies) == 4
    for reply in replies:
        assert reply.content.config_records["config"]["error"] == ""
        assert reply.content.array_records["update"]["vector"].numpy().any()


def test_s31_a_network_that_cannot_be_trained_privately_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Statistics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.InstanceNorm2d(1, track_running_stats=True)
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.head(self.norm(x).flatten(1))
            return scores

    monkeypatch.setattr(LINEAR, "build", lambda self, spec: Statistics())
    with pytest.raises(ModelError, match=r"norm \(InstanceNorm2d\).*track_running_stats=False"):
        watched_run(tmp_path / "run", *RECORD)
    assert not (tmp_path / "run").exists()
