"""The classic experiments on MNIST at the claimed epsilons, against logged accuracies.

    python -m tests.bench.accuracy_table --rows quick      # epsilon 1 and 10: an hour, 2 cores
    python -m tests.bench.accuracy_table --rows all --readme
    python -m tests.bench.accuracy_table --print-only      # what was measured so far
    python -m tests.bench.accuracy_table --seeds 1 --out FILE -- run.evaluate_on=validation \\
        dataset.validation_fraction=0.1

Every run is one ``dpfl run``; finished ones are kept in --out and not run again. The settings are
those of the ``tuned_*`` experiments, chosen on validation rows; the last line above is how to
choose others. A run reads the test rows once, after its last round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "accuracy_table.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- accuracy-table -->", "<!-- /accuracy-table -->"
SEEDS = (101, 102, 103)
"""Used for nothing else: neither tuning nor a test."""
SAME_NOISE = "noise of the original's row of claimed epsilon 10"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration of the table.

    Attributes:
        method: what the table calls it.
        epsilon: the claimed epsilon; None for the rows without a target.
        logged: accuracy in percent that the original project logged, None where it has no such row.
        overrides: of `dpfl run`, beside seed and directory.
    """

    method: str
    epsilon: float | None
    logged: float | None
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.method if self.epsilon is None else f"{self.method}, epsilon {self.epsilon:g}"


def _gaussian(method: str, accountant: str, logged: Sequence[float | None]) -> list[Row]:
    """Returns the five rows of one accountant; the experiment follows from the noise it needs."""
    noise_names = {
        "simple": ("very_noisy", "noisy", "noisy", "", ""),
        "rdp": ("noisy", "", "", "", ""),
        "pld": ("noisy", "", "", "", ""),
    }[accountant]
    rows = []
    for epsilon, noise, accuracy in zip((1, 5, 10, 20, 30), noise_names, logged, strict=True):
        experiment = "_".join(filter(None, ("tuned_gaussian", noise)))
        overrides = (
            f"experiment={experiment}",
            f"accountant={accountant}",
            f"privacy.target_epsilon={epsilon}",
        )
        rows.append(Row(method=method, epsilon=epsilon, logged=accuracy, overrides=overrides))
    return rows


def _laplace() -> list[Row]:
    rows = []
    for epsilon, accuracy in zip(
        (10, 25, 50, 75, 100), (19.1, 36.8, 35.6, 35.1, 35.1), strict=True
    ):
        experiment = "tuned_laplace" if epsilon >= 50 else "tuned_laplace_noisy"
        overrides = (f"experiment={experiment}", f"privacy.target_epsilon={epsilon}")
        rows.append(
            Row(
                method="Laplace, simple composition",
                epsilon=epsilon,
                logged=accuracy,
                overrides=overrides,
            )
        )
    return rows


ROWS = (
    Row(method="no DP", epsilon=None, logged=90.1, overrides=("experiment=tuned_no_dp",)),
    *_gaussian("Gaussian, simple composition", "simple", (11.3, 54.4, 82.1, 86.5, 86.7)),
    Row(
        method=f"Gaussian, {SAME_NOISE}",
        epsilon=None,
        logged=82.1,
        overrides=("experiment=tuned_gaussian_same_noise",),
    ),
    *_gaussian("Gaussian, moments (RDP)", "rdp", (9.8, 11.5, 17.3, 29.9, 45.6)),
    *_gaussian("Gaussian, PLD", "pld", (None,) * 5),
    *_laplace(),
)
QUICK = (None, 1, 10)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is missing and prints the table; 1 if a run is not above the logged accuracy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", choices=("quick", "all"), default="quick")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--print-only", action="store_true")
    parser.add_argument(
        "--readme", action="store_true", help="write the table into README.md between its markers"
    )
    parser.add_argument("overrides", nargs="*", help="more overrides, e.g. engine.num_workers=4")
    options = parser.parse_args(arguments)
    done = json.loads(options.out.read_text()) if options.out.exists() else []
    if not options.print_only:
        for row in ROWS:
            if (options.rows == "all" or row.epsilon in QUICK) and options.only in row.name:
                for seed in options.seeds:
                    _measure(row, seed, options.overrides, done, options.out)
    table = to_markdown(done)
    print(table)
    if options.readme:
        before, _, rest = README.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    return 0 if all(_exceeds(row, runs) for row, runs in _grouped(done)) else 1


def _measure(
    row: Row, seed: int, more: Iterable[str], done: list[dict[str, Any]], out: Path
) -> None:
    """Runs one configuration unless it is in `done`; appends the result and saves."""
    if any(run["row"] == row.name and run["seed"] == seed for run in done):
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "fl_app.cli", "run", *row.overrides, *more),
            *(f"run.seed={seed}", "run.evaluate_every=1000", f"run.output_dir={folder}/run"),
        ]
        started = time.monotonic()
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        results = json.loads((Path(folder) / "run" / "results.json").read_text())
    done.append(
        {
            "row": row.name,
            "overrides": list(row.overrides),
            "seed": seed,
            "accuracy": results["final"]["accuracy"],
            "rounds": results["num_rounds_done"],
            "noise_std_of_sum": results["history"][-1]["noise_std_of_sum"],
            "clipping_norm": results["history"][-1]["clipping_norm"],
            "epsilon": results["history"][-1]["epsilon"],
            "seconds": round(time.monotonic() - started),
            "versions": results["versions"],
        }
    )
    out.write_text(json.dumps(done, indent=1) + "\n")
    print(f"{row.name}, seed {seed}: {100 * done[-1]['accuracy']:.2f} %", flush=True)


def _grouped(done: list[dict[str, Any]]) -> list[tuple[Row, list[dict[str, Any]]]]:
    groups = [(row, [run for run in done if run["row"] == row.name]) for row in ROWS]
    return [(row, runs) for row, runs in groups if runs]


def _exceeds(row: Row, runs: list[dict[str, Any]]) -> bool:
    """Returns whether every run of `row` is above the logged accuracy."""
    return row.logged is None or min(100 * run["accuracy"] for run in runs) > row.logged


def to_markdown(done: list[dict[str, Any]]) -> str:
    """Returns the table: mean and range of the test accuracy after the last round."""
    lines = [
        "| method | epsilon | noise std / C | test accuracy: mean (lowest to highest) | logged |",
        "|---|---|---|---|---|",
    ]
    for row, runs in _grouped(done):
        accuracy = [100 * run["accuracy"] for run in runs]
        norm = runs[0]["clipping_norm"]
        noise = f"{runs[0]['noise_std_of_sum'] / norm:.3g}" if norm else "-"
        epsilon = f"{row.epsilon:g}" if row.epsilon is not None else _stated(runs)
        logged = "-" if row.logged is None else f"{row.logged} %"
        shown = f"{statistics.mean(accuracy):.1f} % ({min(accuracy):.1f} to {max(accuracy):.1f})"
        lines.append(f"| {row.method} | {epsilon} | {noise} | {shown} | {logged} |")
    return "\n".join(lines)


def _stated(runs: list[dict[str, Any]]) -> str:
    epsilon = runs[0]["epsilon"]
    return "-" if epsilon is None else f"{epsilon:.2f}"


if __name__ == "__main__":
    sys.exit(main())
