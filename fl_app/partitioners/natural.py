"""One client for each group that the dataset names: a writer, a speaking role, a user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fl_app import checks
from fl_app.plugins import Partitioner
from fl_app.stages import IndexVector


@dataclass(frozen=True, slots=True, kw_only=True)
class Natural(Partitioner):
    """Client k has all rows of the k-th group, in the order of the groups' names.

    The same clients as NaturalIdPartitioner of flwr-datasets, which loops over rows and prints.
    ``run.seed`` does not matter.
    """

    by: ClassVar[str] = "groups"

    def split(self, labels: IndexVector, population: int, seed: int) -> Sequence[IndexVector]:
        """Returns the row numbers of each client; `labels` are the groups.

        Raises:
            SettingsError: `population` is not the number of groups, which the text tells.
        """
        _, sizes = np.unique(labels, return_counts=True)
        if len(sizes) != population:
            raise checks.fail(
                "federation.population",
                population,
                f"partition=natural has one client for each group, and there are {len(sizes)}",
                f"set federation.population={len(sizes)}",
            )
        return np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])


PLUGIN = Natural
