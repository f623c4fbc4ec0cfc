"""No partition: a node has its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fl_app.errors import SettingsError
from fl_app.plugins import Partitioner
from fl_app.stages import IndexVector


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Partitioner):
    """Every node hosts one client, whose rows are all rows below the node's ``data-path``."""

    by: ClassVar[str] = "node"

    def split(self, labels: IndexVector, population: int, seed: int) -> Sequence[IndexVector]:
        """Raises SettingsError: there is nothing to share out."""
        raise SettingsError(
            "partition=own: is for nodes with their own data; choose partition=iid or dirichlet"
        )


PLUGIN = Own
