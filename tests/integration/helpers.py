"""Short private runs through the real engines, for integration tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fl_app.run import run_one

REPO = Path(__file__).resolve().parents[2]
SMALL = ["run.num_rounds=4", "engine.num_workers=0", "run.seeded_noise=true"]


def run_here(output_dir: Path, *overrides: str, small: bool = True) -> dict[str, Any]:
    """Runs in this process and returns results.json."""
    base = SMALL if small else []
    assert run_one([*base, f"run.output_dir={output_dir}", *overrides]) == 0
    return results(output_dir)


def results(output_dir: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((output_dir / "results.json").read_text())
    return values


def model(output_dir: Path) -> dict[str, np.ndarray]:
    return dict(load_file(output_dir / "model.safetensors"))


def assert_same_model(first: Path, second: Path, tolerance: float = 1e-5) -> None:
    a, b = model(first), model(second)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=name)


def operator_rounds(output_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(x) for x in (output_dir / "operator.jsonl").read_text().splitlines()]
    return [x for x in lines if x["event"] == "round"]


def dpfl(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the dpfl command as a user would."""
    path = os.pathsep.join(p for p in (str(REPO), os.environ.get("PYTHONPATH", "")) if p)
    return subprocess.run(
        [sys.executable, "-m", "fl_app.cli", *arguments],
        cwd=cwd or REPO,
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
