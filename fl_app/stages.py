"""The values that pass between the parts of one round, one frozen dataclass per arrow.

    ClientPartition -> LocalUpdate -> PrivatizedUpdate -> ProtectedUpdate -> CohortSum -> Release
                                                                                  -> LedgerEntry

Shape letters: N rows, P parameters. Flat vectors hold the trainable float parameters of a model in
the order of `named_parameters()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fl_app.plugins import Augmentation, Transform

FloatVector = npt.NDArray[np.float32]
DoubleVector = npt.NDArray[np.float64]
IndexVector = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """Public facts of a dataset that a model is sized from.

    Attributes:
        shape: shape of one input as the model sees it, e.g. (1, 28, 28) or (64,).
        num_classes: number of labels.
        vocabulary: number of tokens if the inputs are int64 tokens in 0..vocabulary-1, None if
            they are float32 numbers.
    """

    shape: tuple[int, ...]
    num_classes: int
    vocabulary: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The decoded rows of one split; the arrays are memory-mapped and shared by all processes.

    Attributes:
        features: [N, ...] as stored (uint8 images, float32 tables).
        labels: [N] int64.
        transform: turns stored features of some rows into the model's float32 input (public
            constants); texts into int64 tokens.
        groups: [N] int64, who wrote or spoke each row (0 to the number of groups - 1), None if the
            dataset does not tell.
        augmentation: changes stored features at random whenever they are trained on; None: not.
    """

    features: npt.NDArray[Any]
    labels: IndexVector
    transform: Transform
    augmentation: Augmentation | None = None
    groups: IndexVector | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedData:
    """A dataset in one process: training rows, the server's public test rows, public facts.

    Attributes:
        train: the clients' rows.
        test: the server's public test rows.
        spec: public facts.
        validation: rows of the training clients that are kept out of training, for choices made
            before a run (rule 14); None if the dataset sets none aside. Read only by a run with
            ``run.evaluate_on=validation``.
    """

    train: Table
    test: Table
    spec: InputSpec
    validation: Table | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPartition:
    """The rows of one client. `rows` [n] indexes `table`; n is private and may be 0."""

    client: int
    table: Table
    rows: IndexVector


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalUpdate:
    """What one local training call leaves: local minus global parameters. Private to the node.

    Attributes:
        client: the client's number.
        delta_P: [P] float32, may hold non-finite values (the mechanism deals with them).
        num_noisy_steps: noisy optimizer steps really taken (0 without record-level privacy, and
            where the server adds the noise: then `delta_P` is minus a sum of clipped gradients).
        num_examples: rows of the client; private, leaves only where nothing is private.
    """

    client: int
    delta_P: FloatVector
    num_noisy_steps: int
    num_examples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """What the server asks of every client this round; all of it public.

    Attributes:
        round: from 1.
        clipping_norm: client-level C of this round, or None without client-level privacy.
        noise_multiplier: client-level z of this round, or None.
        training_noise_multiplier: record-level z of this round, or None.
        nominal_rows: public row count of a client that record-level rates refer to.
        weighting: "uniform" or "examples".
        attempt: how often this round was charged before (0; more after a kill): fresh batches then.
    """

    round: int
    clipping_norm: float | None
    noise_multiplier: float | None
    training_noise_multiplier: float | None
    nominal_rows: int
    weighting: str = "uniform"
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivatizedUpdate:
    """One client's update after the client's side of the mechanism: may be shown to whom it allows.

    Attributes:
        client: the client's number.
        vector_P: [P] float32, finite; clipped, and noised where the placement says so. With a
            modulus [W] int64 from 0 to modulus - 1, of the mechanism's own length W.
        weight: 1 except for example weighting without any privacy.
        modulus: sums are taken modulo it; None: they are plain sums.
    """

    client: int
    vector_P: FloatVector | IndexVector
    weight: float
    modulus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedUpdate:
    """What leaves a node: the weighted sum of its clients' privatized updates under the protection.

    Attributes:
        round: the round it belongs to.
        clients: the clients in it.
        vector_P: [P] float32 of one client, float64 of a sum; with a modulus [W] int64.
        weight: sum of their weights.
        modulus: that of the updates.
    """

    round: int
    clients: tuple[int, ...]
    vector_P: FloatVector | DoubleVector | IndexVector
    weight: float
    modulus: int | None = None


@dataclass(slots=True, kw_only=True)
class CohortSum:
    """The sum over everybody who answered. Un-noised under CENTRAL: used once, then dropped.

    The one stage that is not frozen: `Mechanism.release` overwrites `sum_P` with the released
    value, so that no un-noised copy stays behind.

    Attributes:
        round: the round.
        sum_P: [P] float64; [W] of whole numbers if updates are integers.
        weight: sum of weights of the answers.
        num_answered: clients in it (private under Poisson sampling: operator only).
        dropped: clients whose update was left out: it is not finite (operator only).
    """

    round: int
    sum_P: DoubleVector
    weight: float
    num_answered: int
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What the server may use: the noised mean and the public facts of its noise.

    Attributes:
        round: the round.
        mean_P: [P] float64, the average change of the model; of longer vectors [W],
            of which the first P count.
        noise_std_of_sum: std of the noise on the sum that the accounting relies on (0: none added).
        noise_std_of_mean: the same after the division.
        fraction_within: noised share of updates within C, from 0 to 1; None if it was not counted.
    """

    round: int
    mean_P: DoubleVector
    noise_std_of_sum: float
    noise_std_of_mean: float
    fraction_within: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """One durable row of a ledger: one release. `digest` chains over `previous`."""

    seq: int
    round: int
    event: str
    previous: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """One round in the public record: released metrics and expected values only (rule 9).

    Attributes:
        round: from 1; 0 is the model before training.
        accuracy: on the rows that ``run.evaluate_on`` names, None if the round was not evaluated.
        loss: mean loss on them, likewise.
        epsilon: spent so far by the guarantee that the target binds, None without one.
        cohort_expected: the public constant that sums are divided by.
        clipping_norm: C of the bound unit, None without one.
        noise_std_of_sum: noise std on the sum that C bounds, 0 without noise.
        other_metrics: what evaluation gave beside accuracy and loss (AUC), by name; empty where
            the round was not evaluated.
    """

    round: int
    accuracy: float | None
    loss: float | None
    epsilon: float | None
    cohort_expected: float
    clipping_norm: float | None
    noise_std_of_sum: float
    other_metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrace:
    """What really happened in a round. For the operator only: it tells who was sampled.

    Attributes:
        round: the round.
        cohort: clients that were chosen.
        answered: clients whose update is in the sum.
        errors: reasons that nodes gave.
        violations: arrivals that were dropped, one phrase each.
        seconds: wall time of the round.
        bytes_sent: array bytes sent to nodes.
        bytes_received: array bytes received.
    """

    round: int
    cohort: tuple[int, ...]
    answered: tuple[int, ...]
    errors: tuple[str, ...]
    violations: tuple[str, ...]
    seconds: float
    bytes_sent: int
    bytes_received: int

    @property
    def absent(self) -> tuple[int, ...]:
        """Chosen clients that are not in the sum."""
        return tuple(sorted(set(self.cohort) - set(self.answered)))
