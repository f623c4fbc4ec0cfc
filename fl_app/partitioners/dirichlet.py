"""Label-skewed shares: each label is divided over the clients by a Dirichlet draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_app import checks, rng
from fl_app.plugins import Partitioner
from fl_app.stages import IndexVector

_MOST_DRAWS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Dirichlet(Partitioner):
    """Of each label, client k gets a share p_k with p ~ Dirichlet(alpha, ..., alpha).

    The scheme of Yurochkin et al. 2019 (arXiv:1905.12022) as flwr-datasets implements it, without
    balancing of sizes.

    Attributes:
        alpha: concentration; small: few labels per client, large: nearly IID.
        min_size: fewest rows of a client; a draw with a smaller one is thrown away, and at most 11
            draws are made. With 0, clients may have no row.
    """

    alpha: float
    min_size: int

    def __post_init__(self) -> None:
        checks.positive("partition.alpha", self.alpha)
        checks.at_least("partition.min_size", self.min_size, 0)

    def split(self, labels: IndexVector, population: int, seed: int) -> Sequence[IndexVector]:
        """Returns the row numbers of each client.

        Raises:
            SettingsError: no draw gave every client `min_size` rows.
        """
        possible = population * self.min_size <= len(labels)
        for attempt in range(_MOST_DRAWS if possible else 0):
            parts = self._draw(labels, population, rng.derive_seed(seed, "partition", attempt))
            if min(len(part) for part in parts) >= self.min_size:
                return parts
        raise checks.fail(
            "partition.alpha",
            self.alpha,
            f"does not give each of federation.population={population} clients "
            f"partition.min_size={self.min_size} rows",
            "raise partition.alpha, or lower partition.min_size (0: clients without rows) "
            "or federation.population",
        )

    def _draw(self, labels: IndexVector, population: int, seed: int) -> list[IndexVector]:
        from flwr_datasets.partitioner import DirichletPartitioner

        from fl_app.partitioners.row_table import RowTable

        # The library repeats draws too, but in time quadratic in the population: sizes are checked
        # by the caller instead.
        library = DirichletPartitioner(
            num_partitions=population,
            partition_by="label",
            alpha=self.alpha,
            min_partition_size=0,
            self_balancing=False,
            seed=seed,
        )
        library.dataset = RowTable.of(np.arange(len(labels)), labels)
        return [library.load_partition(client) for client in range(population)]


PLUGIN = Dirichlet
