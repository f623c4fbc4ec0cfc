"""Every benchmark runs at its smallest size, and the results that it times are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DPFL_HOME": str(home), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_all_benchmarks_give_right_results(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    done = bench("--all", "--tiny", "--repeats", "1", "--json", str(report), home=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    files = (ROOT / "tests" / "bench").glob("[a-z]*.py")
    names = {f.stem for f in files if "\nBENCHMARK = " in f.read_text(encoding="utf-8")}
    assert set(found["benchmarks"]) == names >= {"classic_round", "dp_sgd_epoch_cnn", "char_lstm"}
    assert found["machine"]["torch"]
    assert all("text" in entry for entry in found["benchmarks"].values())


def test_an_unknown_benchmark_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = bench("clasic", home=tmp_path)
    assert done.returncode == 2
    assert "classic_round" in done.stderr
