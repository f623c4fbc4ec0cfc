"""The label histogram of a simulated partition."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fl_app.cli import app
from fl_app.errors import SettingsError
from fl_app.partitioners.histogram import to_text
from fl_app.server_run import plan_of


def test_plan_shows_every_client_and_label_on_request_only() -> None:
    assert "partition" not in plan_of([]).values
    view = plan_of(["partition=shards"], show_partition=True)
    counts = np.array(view.values["partition"])
    assert counts.shape == (10, 10)
    assert counts.sum() == 1437
    assert ((counts > 0).sum(axis=1) <= 4).all()
    assert "10 clients, rows 14" in view.text


def test_the_command_prints_json_and_writes_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    done = CliRunner().invoke(
        app, ["plan", "--json", "--plot-partition", str(path), "partition=iid"]
    )
    assert done.exit_code == 0
    assert np.array(json.loads(done.stdout)["partition"]).sum() == 1437
    with Image.open(path) as image:
        assert image.width > 400


def test_many_clients_and_labels_are_cut_short_in_text() -> None:
    text = to_text(np.ones((60, 25), dtype=np.int64))
    assert len(text.splitlines()) == 1 + 50 + 2
    assert "... and 10 more clients" in text
    assert "60 clients, rows 25 to 25 (median 25), labels of a client 25 to 25" in text


def test_nodes_with_their_own_rows_do_not_tell() -> None:
    overrides = ["partition=own", "training.nominal_rows=10"]
    with pytest.raises(SettingsError, match="partition=own"):
        plan_of(overrides, show_partition=True)
