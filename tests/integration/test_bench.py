"""Every benchmark runs at its smallest size, and the results that it times are right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.bench import _core

ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    environment = os.environ | {"DPFL_HOME": str(home), "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-m", "tests.bench", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


def test_all_benchmarks_give_right_results(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    done = bench("--all", "--tiny", "--repeats", "1", "--json", str(report), home=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(report.read_text(encoding="utf-8"))
    names = {name for name in _core.names() if _core.load(name).product is None}
    assert set(found["benchmarks"]) == names >= {"classic_round", "dp_sgd_epoch_cnn", "char_lstm"}
    assert found["machine"]["torch"]
    assert all("text" in entry for entry in found["benchmarks"].values())


@pytest.mark.parametrize(
    "product",
    ["pfl", pytest.param("flower_opacus", marks=pytest.mark.slow)],  # Ray and 100 SuperNodes
)
def test_the_work_against_another_product_is_the_same_or_it_says_what_is_missing(
    product: str, tmp_path: Path
) -> None:
    done = bench("--baseline", product, "--tiny", "--repeats", "1", home=tmp_path)
    missing = next(p for p in _core.PRODUCTS if p.name == product).missing
    if missing:
        assert done.returncode == 1
        assert done.stderr.strip().splitlines() == [missing]
        assert "pip install" in missing
    else:
        assert done.returncode == 0, done.stderr[-2000:]
        assert "target <=" in done.stdout


def test_an_unknown_benchmark_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    done = bench("clasic", home=tmp_path)
    assert done.returncode == 2
    assert "classic_round" in done.stderr


def test_a_missing_product_is_told_with_the_line_that_installs_it() -> None:
    here = f"numpy=={version('numpy')}"
    assert not _core.Product(name="x", requirements=(here,)).missing
    absent = _core.Product(name="x", requirements=(here, "numpy==0.1", "no-such-package==1.0"))
    assert absent.missing == (
        "x: numpy==0.1, no-such-package==1.0 not installed; "
        f"pip install --no-deps {here} numpy==0.1 no-such-package==1.0"
    )


def test_times_of_tiny_sizes_stay_out_of_the_readme(tmp_path: Path) -> None:
    done = bench("classic", "--tiny", "--readme", home=tmp_path)
    assert done.returncode == 2
    assert "--tiny" in done.stderr
