"""Label shards: rows sorted by label are cut into equal pieces, a few for each client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_app import checks, rng
from fl_app.plugins import Partitioner
from fl_app.stages import IndexVector


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards(Partitioner):
    """Every client gets `shards_per_client` random shards of the rows sorted by label.

    The scheme of McMahan et al. 2017 (arXiv:1602.05629, section 3), which has two shards per
    client. Shards differ by at most one row. The ShardPartitioner of flwr-datasets would leave out
    the rows that remain after the division, or hand out unequal numbers of shards, so it is not
    used.

    Attributes:
        shards_per_client: k; a client has about k labels at most (one more for each shard that
            lies over the border of two labels).
    """

    shards_per_client: int

    def __post_init__(self) -> None:
        checks.at_least("partition.shards_per_client", self.shards_per_client, 1)

    def split(self, labels: IndexVector, population: int, seed: int) -> Sequence[IndexVector]:
        """Returns the row numbers of each client.

        Raises:
            SettingsError: more shards than rows.
        """
        num_shards = population * self.shards_per_client
        if num_shards > len(labels):
            raise checks.fail(
                "partition.shards_per_client",
                self.shards_per_client,
                f"times federation.population={population} must not exceed the training rows",
                "lower one of them",
            )
        stream = rng.stream(seed, "partition")
        shuffled = stream.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        shards = np.array_split(by_label, num_shards)
        chosen = stream.permutation(num_shards).reshape(population, self.shards_per_client)
        return [np.concatenate([shards[i] for i in mine]) for mine in chosen]


PLUGIN = Shards
