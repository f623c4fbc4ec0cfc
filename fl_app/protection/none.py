"""No protection: the server sees each node's sum."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fl_app import parallel
from fl_app.clipping import is_finite
from fl_app.errors import ProtocolError
from fl_app.plugins import Protection
from fl_app.stages import (
    CohortSum,
    DoubleVector,
    FloatVector,
    IndexVector,
    PrivatizedUpdate,
    ProtectedUpdate,
)

_PART = 1 << 16
"""Elements that are summed at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoProtection(Protection):
    """Plain sums.

    Guarantee:
        Nothing is hidden from the SERVER: the privacy of what is sent is the mechanism's alone.
    """

    hides_from_server: ClassVar[bool] = False

    def protect(self, updates: Iterable[PrivatizedUpdate], round: int) -> ProtectedUpdate:
        """Returns the weighted sum of the updates, float64 (of one client: its float32 update).

        Takes one update at a time. Integers are summed modulo their modulus. A float32 sum over
        many clients would move by more than C when one of them changes.

        Raises:
            ProtocolError: no update, or updates of different sizes or moduli.
        """
        arrivals = iter(updates)
        first = next(arrivals, None)
        if first is None:
            raise ProtocolError("updates=[]: a node sends at least one client's update")
        clients, weights = [first.client], [first.weight]
        sum_P: DoubleVector | None = None
        for update in arrivals:
            if update.modulus != first.modulus:
                raise ProtocolError("updates: must have one modulus")
            if sum_P is None:
                sum_P = _weighted(first).astype(np.float64)
            _check_size(update.vector_P.shape, sum_P.size)
            sum_P += _weighted(update)
            clients.append(update.client)
            weights.append(update.weight)
        vector_P: FloatVector | DoubleVector | IndexVector
        vector_P = _weighted(first) if sum_P is None else sum_P
        if sum_P is not None and first.modulus is not None:
            vector_P = sum_P.astype(np.int64) % first.modulus
        return ProtectedUpdate(
            round=round,
            clients=tuple(clients),
            vector_P=vector_P,
            weight=math.fsum(weights),
            modulus=first.modulus,
        )

    def combine(
        self, updates: Sequence[ProtectedUpdate], num_parameters: int, round: int
    ) -> CohortSum:
        """Returns the float64 sum; non-finite arrivals are left out and their clients named.

        Sums of integers are exact: a modulus is at most 2^32, and float64 counts to 2^53. The order
        of summation is that of `updates`, element by element, whatever the number of threads.

        Raises:
            ProtocolError: an update of another round or another size.
        """
        for update in updates:
            if update.round != round:
                raise ProtocolError(
                    f"update.round={update.round}: round {round} is running; drop late replies"
                )
            _check_size(update.vector_P.shape, num_parameters)
        kept = [u for u in updates if math.isfinite(u.weight) and u.weight >= 0]
        sum_P = np.empty(num_parameters)
        # What is not finite makes the sum not finite, so one look at the sum serves all updates.
        if not _sum_into(sum_P, kept):
            kept = [u for u in kept if is_finite(u.vector_P)]
            _sum_into(sum_P, kept)
        left_out = {id(u) for u in updates} - {id(u) for u in kept}
        return CohortSum(
            round=round,
            sum_P=sum_P,
            weight=sum((u.weight for u in kept), 0.0),
            num_answered=sum(len(u.clients) for u in kept),
            dropped=tuple(c for u in updates if id(u) in left_out for c in u.clients),
        )


def _weighted(update: PrivatizedUpdate) -> FloatVector | DoubleVector | IndexVector:
    """Returns the update itself, or in float64 times its weight if that is not 1."""
    if update.weight == 1:
        return update.vector_P
    return update.weight * update.vector_P.astype(np.float64)


def _sum_into(sum_P: DoubleVector, updates: Sequence[ProtectedUpdate]) -> bool:
    """Overwrites `sum_P` with the sum of the updates; returns whether all of it is finite.

    False also if only the sum of all elements is not.
    """
    sums, vectors = torch.from_numpy(sum_P), [_read_only(u.vector_P) for u in updates]
    unsound: list[slice] = []

    def add(part: slice) -> None:
        # NumPy takes twice as long to add float32 to float64.
        sum_part = sums[part].zero_()
        for update, vector in zip(updates, vectors, strict=True):
            sum_part += vector[part]
            if update.modulus is not None:
                sum_part.remainder_(update.modulus)
        if not math.isfinite(sum_part.sum()):
            unsound.append(part)

    parallel.each_part(sum_P.size, add, _PART)
    return not unsound


def _read_only(vector: npt.NDArray[Any]) -> torch.Tensor:
    """Returns a tensor on the memory of `vector`, which may be an arrived message's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(vector)


def _check_size(shape: tuple[int, ...], num_parameters: int) -> None:
    if shape != (num_parameters,):
        raise ProtocolError(
            f"update shape={shape}: must be ({num_parameters},); "
            "use the same model and dataset on both sides"
        )


PLUGIN = NoProtection
