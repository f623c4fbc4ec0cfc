"""Equal shares of shuffled rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fl_app import rng
from fl_app.plugins import Partitioner
from fl_app.stages import IndexVector


@dataclass(frozen=True, slots=True, kw_only=True)
class Iid(Partitioner):
    """Every client gets a random sample without replacement; sizes differ by at most one row."""

    def split(self, labels: IndexVector, population: int, seed: int) -> Sequence[IndexVector]:
        """Returns the row numbers of each client."""
        from flwr_datasets.partitioner import IidPartitioner

        from fl_app.partitioners.row_table import RowTable

        # The library cuts the table as it lies, so it must be shuffled first.
        rows = rng.stream(seed, "partition").permutation(len(labels))
        library = IidPartitioner(num_partitions=population)
        library.dataset = RowTable.of(rows, labels[rows])
        return [library.load_partition(client) for client in range(population)]


PLUGIN = Iid
