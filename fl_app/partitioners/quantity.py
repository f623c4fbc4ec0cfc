"""Unequal sizes: shuffled rows, so labels are IID, but some clients have many more than others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fl_app import checks, rng
from fl_app.plugins import Partitioner
from fl_app.stages import DoubleVector, IndexVector

_SHARES: dict[str, Callable[[int], DoubleVector]] = {
    "linear": lambda population: np.arange(1.0, population + 1),
    "square": lambda population: np.arange(1.0, population + 1) ** 2,
    "exponential": lambda population: np.exp(np.arange(1.0, population + 1) - population),
}
"""Size of client k = 1, 2, ... up to a factor, as flwr-datasets' LinearPartitioner and its like."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity(Partitioner):
    """Every client gets `min_size` rows; the law shares out the others.

    The Dirichlet law is the quantity skew of Li et al. 2022 (arXiv:2102.02079, section 4.3). The
    laws by the client's number are those of flwr-datasets, whose classes are not used because they
    give the last client all rows that rounding leaves and overflow from 710 clients on.

    Attributes:
        law: dirichlet: the shares are one draw of Dirichlet(alpha, ..., alpha); linear, square,
            exponential: the share of client k grows with k, k squared, e to the k.
        alpha: concentration of the Dirichlet law; small: few clients have most rows. The other
            laws do not look at it.
        min_size: fewest rows of a client. With 0, clients may have no row.
    """

    law: str
    alpha: float
    min_size: int

    def __post_init__(self) -> None:
        checks.one_of("partition.law", self.law, ("dirichlet", *_SHARES))
        checks.positive("partition.alpha", self.alpha)
        checks.at_least("partition.min_size", self.min_size, 0)

    def split(self, labels: IndexVector, population: int, seed: int) -> Sequence[IndexVector]:
        """Returns the row numbers of each client.

        Raises:
            SettingsError: not enough rows to give every client `min_size`.
        """
        free = len(labels) - population * self.min_size
        if free < 0:
            raise checks.fail(
                "partition.min_size",
                self.min_size,
                f"times federation.population={population} must not exceed the training rows",
                "lower one of them",
            )
        stream = rng.stream(seed, "partition")
        rows = stream.permutation(len(labels))
        sizes = self.min_size + _round(free, self._shares(population, stream))
        return np.split(rows, np.cumsum(sizes)[:-1])

    def _shares(self, population: int, stream: np.random.Generator) -> DoubleVector:
        """Returns what each client gets of the whole; sums to 1."""
        if self.law == "dirichlet":
            return stream.dirichlet(np.full(population, self.alpha))
        shares = _SHARES[self.law](population)
        shares /= shares.sum()
        return shares


def _round(total: int, shares: DoubleVector) -> IndexVector:
    """Returns whole numbers that sum to `total`, each within one of its share (largest rest)."""
    exact = shares * total
    sizes: IndexVector = np.floor(exact).astype(np.int64)
    missing = total - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:missing]] += 1
    return sizes


PLUGIN = Quantity
