"""Fixtures for all tests: a private home, offline copies of the hub datasets, no telemetry."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    data_root = os.environ.get("DPFL_DATA_ROOT", str(ROOT.parent / "shared" / "data"))
    values = {
        "DPFL_DATA_ROOT": data_root,
        "DPFL_HOME": str(tmp_path_factory.mktemp("dpfl-home")),
        "FLWR_TELEMETRY_ENABLED": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of decoded datasets that the whole session shares."""
    return tmp_path_factory.mktemp("decoded")
