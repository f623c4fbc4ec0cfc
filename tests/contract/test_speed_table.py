"""The README's table of speed is what the committed measurements say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import _core, _table

TABLE = _table.read()
MACHINE = {"processor": "x", "cores": 2, "load": [0.1], "torch": "1"}


def measured(seconds: float, **machine: object) -> dict[str, Any]:
    """A report of one benchmark: `seconds` of ours against one second."""
    found = {
        "ours_seconds": [seconds] * 3,
        "baseline_seconds": [1.0] * 3,
        "ratio": seconds,
        "spread": [seconds, seconds],
    }
    return {"machine": MACHINE | machine, "benchmarks": {"classic_round": found}}


def test_the_readme_shows_what_was_measured() -> None:
    _, _, rest = _table.README.read_text(encoding="utf-8").partition(_table.BEGIN)
    assert rest.partition(_table.END)[0].strip() == _table.to_markdown(TABLE)


def test_every_committed_row_is_a_benchmark_and_was_timed_more_than_once() -> None:
    assert set(TABLE["benchmarks"]) <= set(_core.names())
    for name, found in TABLE["benchmarks"].items():
        assert _core.load(name).lines(found)
        assert len(found.get("ours_seconds", [0, 0])) > 1, name


def test_a_later_call_replaces_its_own_rows_and_keeps_the_others() -> None:
    older = {"machine": MACHINE, "benchmarks": {"classic_round": {}, "memory": {"ratio": 1.0}}}
    table = _table.merged(older, measured(0.5, load=[7.0]))
    assert list(table["benchmarks"]) == ["classic_round", "memory"]
    assert table["benchmarks"]["classic_round"]["ratio"] == 0.5
    assert table["benchmarks"]["memory"] == {"ratio": 1.0}
    assert _table.merged({}, measured(0.5)) == _table.merged(
        table | {"benchmarks": {}}, measured(0.5)
    )


@pytest.mark.parametrize("other", [{"torch": "2"}, {"cores": 4}, {"processor": "y"}])
def test_rows_of_another_machine_or_version_are_refused(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"speed_table\.json: measured on .*remove it"):
        _table.merged(measured(0.5), measured(0.5, **other))


@pytest.mark.parametrize(("seconds", "met"), [(0.7, "yes"), (0.71, "no")])
def test_a_line_says_whether_the_target_is_met(seconds: float, met: str) -> None:
    line = _table.to_markdown(measured(seconds)).splitlines()[-1]
    assert line.endswith(f"| {seconds:.2f} ({seconds:.2f} to {seconds:.2f}) | <= 0.70 | {met} |")


def test_a_target_that_is_not_met_has_its_profile_below() -> None:
    table = measured(0.7)
    table["benchmarks"]["classic_round"]["profile"] = "all of it in convolutions"
    assert "convolutions" not in _table.to_markdown(table)
    table["benchmarks"]["classic_round"] |= measured(0.71)["benchmarks"]["classic_round"]
    note = _table.to_markdown(table).splitlines()[-1]
    assert note == f"- {_core.load('classic_round').title}: all of it in convolutions"
