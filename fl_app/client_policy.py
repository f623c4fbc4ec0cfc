"""The node's own word: what its configuration allows, whatever the server asks (rules 11 and 13).

Node configuration keys (``flower-supernode --node-config``): ``partition-id``, ``num-partitions``,
``data-path``, ``allow-seeded-noise``, and those of `fl_app.node_policy`. Others are ignored unless
they look like one of these.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_app import checks, node_policy
from fl_app.accounting.node_ledger import NodeLedger
from fl_app.errors import PrivacyError, ProtocolError
from fl_app.node_policy import NodePolicy
from fl_app.settings import Settings
from fl_app.stages import RoundOrder

LOCAL_SIMULATION = "local-simulation"
_KEYS = (
    "partition-id",
    "num-partitions",
    "data-path",
    "allow-seeded-noise",
    LOCAL_SIMULATION,
    *node_policy.KEYS,
)
_LOOKS_LIKE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node that this process works for.

    Attributes:
        partition_id: p; the node hosts the clients c with c mod `num_partitions` = p.
        num_partitions: P.
        data_path: the node's own data, None for the configured dataset.
        simulated: True only in a simulation on the experimenter's machines, known from this
            process's own surroundings and never from a message.
        allow_seeded_noise: a deployed node's consent to repeatable noise.
        cache_dir: decoded datasets.
        policy: the node's floors and budget.
    """

    partition_id: int
    num_partitions: int
    data_path: str | None
    simulated: bool
    allow_seeded_noise: bool
    cache_dir: Path
    policy: NodePolicy

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Node:
        """Returns the node described by its own configuration.

        Raises:
            ProtocolError: ``partition-id`` or ``num-partitions`` missing or out of range.
            SettingsError: another key of ours is misspelt or has a value that is not allowed.
        """
        _check_spelling(config)
        part, parts = config.get("partition-id"), config.get("num-partitions")
        if not (isinstance(part, int) and isinstance(parts, int) and 0 <= part < parts):
            raise ProtocolError(
                f"node config: partition-id={part} num-partitions={parts}: need whole numbers with "
                "0 <= partition-id < num-partitions; set both with --node-config"
            )
        path = config.get("data-path")
        data_path = None if path is None else str(path)
        simulated = config.get(LOCAL_SIMULATION) is True or _inside_ray()
        return cls(
            partition_id=part,
            num_partitions=parts,
            data_path=data_path,
            simulated=simulated,
            allow_seeded_noise=config.get("allow-seeded-noise") is True,
            cache_dir=home() / "cache",
            policy=NodePolicy.from_config(
                config, simulated=simulated, data_path=data_path, ledger_folder=home() / "nodes"
            ),
        )

    @property
    def ledger(self) -> NodeLedger | None:
        """The ledger that every request is charged to, None in a simulation without one."""
        return self.policy.ledger

    def check(self, settings: Settings, order: RoundOrder | None = None) -> None:
        """Refuses what the node's own configuration does not allow.

        Args:
            settings: what both sides agreed on.
            order: what is asked this round, None before the first.

        Raises:
            PrivacyError: seeded noise on a deployed node that did not allow it; noise, clipping,
                placement or protection below the node's floors; or the node's own rows as those of
                several clients, or without a ``data-path``.
        """
        self._check_own_rows(settings)
        self.policy.check(settings, order or node_policy.order_of(settings))
        if settings.run.seeded_noise and not (self.simulated or self.allow_seeded_noise):
            raise PrivacyError(
                "run.seeded_noise=true: this node adds noise from its own entropy only; "
                "set run.seeded_noise=false, or allow-seeded-noise=true in the node's configuration"
            )

    def _check_own_rows(self, settings: Settings) -> None:
        """Refuses ``partition=own`` where two clients would have the same rows."""
        if settings.partition.by != "node":
            return
        population = settings.federation.population
        if self.data_path is None or self.num_partitions != population:
            raise PrivacyError(
                f"partition={settings.partition.kind}: needs a data-path in the node's "
                f"configuration, and one client per node: num-partitions={self.num_partitions}, "
                f"federation.population={population}; set them equal, or choose another partition"
            )

    def check_clients(self, clients: Sequence[int], population: int) -> None:
        """Refuses clients that this node does not host, and repetitions.

        Raises:
            ProtocolError: one of `clients` is not hosted here, or comes twice.
        """
        for client in clients:
            hosted = client % self.num_partitions == self.partition_id
            if not (0 <= client < population and hosted):
                raise ProtocolError(f"client {client}: is not hosted by node {self.partition_id}")
        if len(set(clients)) != len(clients):
            raise ProtocolError("clients: one is asked twice in the same round")


def _check_spelling(config: Mapping[str, object]) -> None:
    """Refuses unknown keys that look like ours: a misspelt floor would be none."""
    for key, value in config.items():
        near = difflib.get_close_matches(key.lower(), _KEYS, n=1, cutoff=_LOOKS_LIKE)
        if key not in _KEYS and near:
            raise checks.fail(
                key, value, "unknown key of the node's configuration", f"did you mean {near[0]}?"
            )


def home() -> Path:
    """Returns ``$DPFL_HOME`` (default ``~/.dpfl``), absolute."""
    return Path(os.environ.get("DPFL_HOME") or Path.home() / ".dpfl").expanduser().absolute()


def _inside_ray() -> bool:
    """Returns True in an actor of Flower's simulation runtime."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
