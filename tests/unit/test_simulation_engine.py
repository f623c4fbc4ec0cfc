"""Where the simulation engine runs, and how many nodes fit there."""

from __future__ import annotations

import socket
import time

import pytest

from fl_app.engines.simulation import SimulationEngine
from fl_app.errors import SettingsError


def engine(ray_address: str | None, num_cpus: int = 1) -> SimulationEngine:
    return SimulationEngine(
        num_cpus_per_client=num_cpus, num_gpus_per_client=0.0, ray_address=ray_address
    )


@pytest.mark.parametrize("address", ["", "ray://head:10001", "head", "head:", ":6379", "a b:1"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(SettingsError, match=r"engine\.ray_address=.*must be HOST:PORT, or auto"):
        engine(address)


def test_nobody_at_the_address_is_said_within_seconds() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(SettingsError, match="no Ray cluster answers there"):
        engine(f"127.0.0.1:{port}")._room()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(("cores", "room"), [(8, 2), (3, 1), (2, 1)])
def test_without_an_address_nodes_fit_this_machine(
    cores: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert engine(None, num_cpus=3)._room() == room
