"""The README's table of results and the measurements behind it, docs/speed_table.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bench import _core

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "speed_table.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- speed-table -->", "<!-- /speed-table -->"


def merged(table: dict[str, Any], report: dict[str, Any]) -> dict[str, Any]:
    """Returns `table` with the benchmarks of `report` in place of older ones of the same name.

    Raises:
        ValueError: they were measured on different machines or versions.
    """
    here, there = (_identity(t["machine"]) for t in (report, table or report))
    if here != there:
        raise ValueError(
            f"{OUT.name}: measured on {there}, this is {here}; remove it and measure every row here"
        )
    benchmarks = table.get("benchmarks", {}) | report["benchmarks"]
    return {"machine": here, "benchmarks": dict(sorted(benchmarks.items()))}


def to_markdown(table: dict[str, Any]) -> str:
    """Returns a line on the machine, the table, and a profile for each target that is not met."""
    machine = ", ".join(f"{key} {value}" for key, value in _identity(table["machine"]).items())
    rows = [
        f"Measured on: {machine}.",
        "",
        "| work | ours | baseline | ratio (lowest to highest) | target | met |",
        "|---|---|---|---|---|---|",
    ]
    notes = []
    for name, found in table["benchmarks"].items():
        benchmark = _core.load(name)
        lines = benchmark.lines(found)
        rows += [
            f"| {x.work} | {x.ours} | {x.baseline} | {x.ratio} | {x.target} | "
            f"{'yes' if x.met else 'no'} |"
            for x in lines
        ]
        explanation = benchmark.explanation(found)
        if explanation and not all(x.met for x in lines):
            notes.append(f"- {benchmark.title}: {explanation}")
    return "\n".join(rows + (["", *notes] if notes else []))


def write(table: dict[str, Any]) -> None:
    """Writes the measurements, and the table between the README's markers."""
    OUT.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = f"{before}{BEGIN}\n{to_markdown(table)}\n{END}{after}"
    README.write_text(text, encoding="utf-8")


def read() -> dict[str, Any]:
    """Returns the measurements so far, empty if there are none."""
    return json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}


def _identity(machine: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in machine.items() if key != "load"}
