"""The interface of each plug-in kind, and the loader that finds a plug-in by its file name.

A plug-in is one file and one yaml. The file ``fl_app/models/cnn.py`` defines one frozen dataclass,
a subclass of the kind's interface below, named in the module as ``PLUGIN``; the dataclass fields
are the keys of the yaml ``conf/model/cnn.yaml`` (which also says ``kind: cnn``). There is no
central list.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from fl_app import checks
from fl_app.errors import SettingsError
from fl_app.privacy import NoiseKind, NoiseShares, Placement, PrivacyEvent

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fl_app.rng import NoiseSource
    from fl_app.settings import Settings
    from fl_app.stages import (
        ClientPartition,
        CohortSum,
        DoubleVector,
        IndexVector,
        InputSpec,
        LoadedData,
        LocalUpdate,
        PrivatizedUpdate,
        ProtectedUpdate,
        Release,
        RoundOrder,
    )

PACKAGES: Mapping[str, str] = {
    "dataset": "fl_app.data",
    "partition": "fl_app.partitioners",
    "model": "fl_app.models",
    "training": "fl_app.training",
    "mechanism": "fl_app.mechanisms",
    "protection": "fl_app.protection",
    "accountant": "fl_app.accounting",
    "engine": "fl_app.engines",
    "cohort": "strategies.cohorts",
    "server_optimizer": "strategies.server_optimizers",
}
"""The Hydra group of each kind and the package (folder) that holds its plug-ins."""


class Plugin(ABC):
    """Base of all plug-ins: a frozen dataclass whose fields are the values of its yaml."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """The plug-in's name: the name of its file."""
        return type(self).__module__.rpartition(".")[2]


class Transform(ABC):
    """Turns stored features into model input with public constants, never statistics of clients."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, stored: npt.NDArray[Any]) -> torch.Tensor:
        """Returns the input [B, *spec.shape] of the stored features [B, ...].

        It is float32, or int64 tokens where ``spec.vocabulary`` says so.
        """


class Augmentation(ABC):
    """Changes stored features at random, each row by itself."""

    __slots__ = ()

    @abstractmethod
    def __call__(self, stored: npt.NDArray[Any], batches: np.random.Generator) -> npt.NDArray[Any]:
        """Returns new features of the same shape and type as `stored` [B, ...].

        Guarantee:
            A row of the result depends on its own row and on `batches` only, so a record still
            moves a sum of clipped per-sample gradients by the clipping norm at most.

        Args:
            stored: left as it is.
            batches: the job's stream; every row takes the same number of draws, in order, so that
                cutting a batch in parts changes nothing.
        """


class Dataset(Plugin):
    """Where rows come from."""

    __slots__ = ()

    @abstractmethod
    def load(self, *, data_path: str | None, cache_dir: Path) -> LoadedData:
        """Returns the decoded dataset, decoding once per machine into `cache_dir`.

        Args:
            data_path: the node's own ``data-path``, or None.
            cache_dir: folder for decoded arrays, shared by all processes of the machine.

        Raises:
            DataError: not there or not readable, with how to point at local data.
        """


class Partitioner(Plugin):
    """How a simulation spreads training rows over clients."""

    __slots__ = ()

    by: ClassVar[str] = "labels"
    """The column of the training table that `split` is given, labels or groups; or node: a node
    hosts one client, which has all its rows, and `split` is not called."""

    @abstractmethod
    def split(self, labels: IndexVector, population: int, seed: int) -> Sequence[IndexVector]:
        """Returns the row numbers of each of `population` clients; every row exactly once.

        The same arguments give the same split on every node.

        Args:
            labels: [N] the column of the training table that `by` names.
            population: number of clients.
            seed: ``run.seed``.

        Raises:
            SettingsError: the split cannot be made, naming the settings to change.
        """


class Model(Plugin):
    """A network, sized from the dataset's public facts."""

    __slots__ = ()

    takes_tokens: ClassVar[bool] = False
    """True if its inputs are int64 tokens, False if they are float32 numbers."""

    @abstractmethod
    def build(self, spec: InputSpec) -> nn.Module:
        """Returns a new network, initialized from torch's global generator (seeded by the caller).

        Raises:
            ModelError: the network cannot take such inputs.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """What one local training call needs beside the model and the rows.

    Attributes:
        noise_multiplier: record-level z of this round, None without record-level privacy.
        nominal_rows: public row count that rates and denominators refer to.
        batches: stream for batch membership of this client and round.
        noise: stream for this client's record-level noise of this round.
        device: where to compute.
        round: from 1; learning rates decay with it.
    """

    noise_multiplier: float | None
    nominal_rows: int
    batches: np.random.Generator
    noise: NoiseSource
    device: torch.device
    round: int = 1


class Releaser(ABC):
    """Whoever turns the sum over a cohort into what the server may use."""

    __slots__ = ()

    @abstractmethod
    def release(
        self, total: CohortSum, order: RoundOrder, expected_cohort: float, noise: NoiseSource
    ) -> Release:
        """Returns the mean that the server may use; overwrites ``total.sum_P``.

        Args:
            total: the sum over those who answered.
            order: what was sent this round: its C and z scale the noise.
            expected_cohort: the public constant to divide by (rule 5).
            noise: the server's noise stream of this round.
        """


class Training(Plugin):
    """Local training. A private one bounds and noises per-sample gradients."""

    __slots__ = ()

    private: ClassVar[bool]
    """True if it makes a run differentially private at RECORD level."""

    @property
    def releaser(self) -> Releaser | None:
        """Who must noise the sum of its updates; None: they are noised already, or never."""
        return None

    @abstractmethod
    def train(self, model: nn.Module, partition: ClientPartition, job: TrainingJob) -> LocalUpdate:
        """Trains `model` in place on the client's rows and returns local minus global."""

    def check_model(self, model: nn.Module, spec: InputSpec) -> None:
        """Returns if `model` can be trained this way on inputs as `spec` says; leaves it as it is.

        Called before the first round, on both sides. No data is looked at.

        Raises:
            ModelError: it cannot, naming the layer and the way out.
        """

    @abstractmethod
    def event(self, noise_multiplier: float) -> PrivacyEvent | None:
        """Returns the record-level event of one call of `train`, None if it is not private."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortSize:
    """Public facts about how many clients are asked in a round.

    Attributes:
        expected: the constant that a sum is divided by.
        largest: see `Cohort.largest_size`.
    """

    expected: float
    largest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRange:
    """Clients with neighbouring numbers that are asked in the same rounds.

    Attributes:
        first: the first of them.
        last: the last of them.
        most: in how many rounds each of them can be asked.
        rounds: which those are (from 1); None: any of them.
    """

    first: int
    last: int
    most: int
    rounds: tuple[int, ...] | None = None


class Mechanism(Plugin, Releaser):
    """Client-level privacy in two steps: bound the sensitivity, add noise where it belongs."""

    __slots__ = ()

    placement: ClassVar[Placement | None]
    """Who adds the noise, None without client-level privacy."""
    noise_kind: ClassVar[NoiseKind | None]

    @property
    def num_counts(self) -> int:
        """How many coordinates a privatized vector has beyond the parameters."""
        return 0

    @property
    def modulus(self) -> int | None:
        """What clients' integers are summed modulo, None for floats."""
        return None

    def wire_size(self, num_parameters: int) -> int:
        """Returns how long the vectors that clients send are: P, and counts or padding."""
        return num_parameters + self.num_counts

    def own_noise_multiplier(
        self, noise_multiplier: float, num_parameters: int | None = None
    ) -> float:
        """Returns z, or what it is of the noise that one client adds by itself where that is less.

        A node's floor is about this: what others add it cannot verify.

        Args:
            noise_multiplier: z.
            num_parameters: P; None: not known yet, then it may be more than the truth.
        """
        return noise_multiplier

    def can_release(self, num_answered: int) -> bool:
        """Returns whether a sum over so many may be released; else the model stays as it is."""
        return True

    def resolved(self, noise_multiplier: float, num_parameters: int, cohort: CohortSize) -> Self:
        """Returns the mechanism with every value filled in that its configuration left open.

        Args:
            noise_multiplier: z of the run's noisiest round.
            num_parameters: P.
            cohort: how many clients are asked.

        Raises:
            SettingsError: there are no values that work, or given ones do not with that noise.
        """
        return self

    def with_layers(self, layer_sizes: tuple[int, ...]) -> Self:
        """Returns the mechanism for a model whose parameter tensors have these sizes, in order.

        Raises:
            SettingsError: lists by layer do not fit.
        """
        return self

    def check_run(self, noise_multiplier: float, num_parameters: int, cohort: CohortSize) -> None:
        """Raises SettingsError if the resolved mechanism cannot work in such a run."""

    def shares(self, num_parameters: int) -> NoiseShares | None:
        """Returns the shares of integer noise of a resolved mechanism, None for other noise."""
        return None

    def facts(
        self, noise_multiplier: float, num_parameters: int, cohort: CohortSize
    ) -> dict[str, str]:
        """Returns public facts of a resolved mechanism for people, by label."""
        return {}

    def update_multiplier(self, noise_multiplier: float) -> float:
        """Returns the noise scale of the updates / C in a release of `noise_multiplier` in all."""
        return noise_multiplier

    def clipping_norms(self, round: int) -> tuple[float, float] | None:
        """Returns the least and the largest C that `round` can have, None without clipping."""
        norm: float | None = getattr(self, "clipping_norm", None)
        return None if norm is None else (norm, norm)

    @abstractmethod
    def privatize(
        self, update: LocalUpdate, order: RoundOrder, noise: NoiseSource
    ) -> PrivatizedUpdate:
        """Returns the update as it may leave: clipped to the order's C, noised if LOCAL."""


class Cohort(Plugin):
    """Who is asked each round."""

    __slots__ = ()

    @abstractmethod
    def sample(self, population: int, round: int, stream: np.random.Generator) -> IndexVector:
        """Returns the sorted clients of one round, drawn over all of `population`."""

    @abstractmethod
    def expected_size(self, population: int) -> float:
        """Returns the public constant that a sum over a cohort is divided by."""

    def largest_size(self, population: int) -> int:
        """Returns the size of the largest cohorts; of random ones that of nearly all.

        It serves to choose how many bits sums need; no privacy rests on it.
        """
        return math.ceil(self.expected_size(population))

    def probability_below(self, size: int, population: int) -> float:
        """Returns the probability that a round asks fewer than `size` clients."""
        return float(self.expected_size(population) < size)

    @abstractmethod
    def check(self, population: int) -> None:
        """Raises SettingsError if the sampler cannot work on `population` clients."""

    @abstractmethod
    def event(
        self, noise: NoiseKind, noise_multiplier: float, population: int, *, amplified: bool = True
    ) -> PrivacyEvent:
        """Returns the CLIENT event against the OBSERVER of one centrally noised sum over a cohort.

        With `amplified` False no credit is taken for the sampling.
        """

    @abstractmethod
    def max_participations(self, num_rounds: int, population: int) -> int:
        """Returns in how many of `num_rounds` rounds in a row one client can be asked at most."""

    def turns(self, num_rounds: int, population: int) -> tuple[tuple[int, ...], ...] | None:
        """Returns the rounds (from 1) of each client, every different set once.

        None: any `max_participations` of rounds 1 to `num_rounds` may be one client's. Used where
        rounds differ in noise.
        """
        return None

    def ranges(self, num_rounds: int, population: int) -> tuple[ClientRange, ...]:
        """Returns in which rounds clients can be asked, every client in one range."""
        most = self.max_participations(num_rounds, population)
        return (ClientRange(first=0, last=population - 1, most=most),)


class Accountant(Plugin):
    """Turns events into epsilon. Stateless: the ledger is the state."""

    __slots__ = ()

    rdp_may_accept: ClassVar[bool] = True
    """False if RDP can be tighter: then the budget gate asks this accountant alone."""

    @abstractmethod
    def refusal(self, event: PrivacyEvent) -> str | None:
        """Returns None if it can bound `event`, else why not and what to use instead."""

    @abstractmethod
    def epsilon(self, events: Mapping[PrivacyEvent, int], delta: float) -> float:
        """Returns an upper bound on epsilon at `delta` of all events, each composed so often.

        0 without events; ``inf`` if one of them has no noise.

        Raises:
            AccountingError: an event that `refusal` names.
        """

    def caveat(self, events: Mapping[PrivacyEvent, int], delta: float) -> str | None:
        """Returns None if `epsilon` bounds these events, else why its number is only a claim.

        With a caveat no row of the statement has an epsilon. An accountant without formulas that
        are known to fail keeps this default.
        """
        return None


class ServerOptimizer(Plugin):
    """Post-processing of the release: moves the global model by the noised mean."""

    __slots__ = ()

    @abstractmethod
    def start(self, num_parameters: int) -> dict[str, DoubleVector]:
        """Returns the optimizer's state before the first round (named flat vectors)."""

    @abstractmethod
    def step(
        self, parameters_P: DoubleVector, mean_P: DoubleVector, state: dict[str, DoubleVector]
    ) -> None:
        """Updates `parameters_P` and `state` in place with the released mean."""


class Protection(Plugin):
    """What hides single updates from the server on their way."""

    __slots__ = ()

    hides_from_server: ClassVar[bool]

    @abstractmethod
    def protect(self, updates: Iterable[PrivatizedUpdate], round: int) -> ProtectedUpdate:
        """Returns what a node sends for the clients it hosts (at least one).

        The updates come one by one, each after its client has trained; keep no more of them than
        needed: a node may host thousands of clients.
        """

    @abstractmethod
    def combine(
        self, updates: Sequence[ProtectedUpdate], num_parameters: int, round: int
    ) -> CohortSum:
        """Returns the sum over all that are finite, zero if none is, and the others' clients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """What an engine runs the clients on.

    Attributes:
        nodes: P.
        workers: processes that the nodes share; 0: the server's own.
    """

    nodes: int
    workers: int


class Engine(Plugin):
    """Where a run runs."""

    __slots__ = ()

    def hosts(self, settings: Settings) -> Hosts:
        """Returns the nodes and worker processes that a run has.

        Raises:
            SettingsError: the engine starts neither, so it cannot tell.
        """
        raise checks.fail(
            "engine",
            self.kind,
            "does not start its nodes itself, so their cost cannot be told",
            "choose engine=local or engine=simulation",
        )

    @abstractmethod
    def run(
        self, settings: Settings, serve: Callable[[Any, Settings], object] | None = None
    ) -> int:
        """Runs all rounds and writes the run directory ``settings.run.output_dir``.

        Args:
            settings: the checked settings.
            serve: what the server does with its Flower Grid; None: the run.

        Returns:
            The exit code of the process: 0 if the run ended well (budget_exhausted included).

        Raises:
            DpflError: the run cannot start or has failed.
        """


def kinds(group: str) -> list[str]:
    """Returns the plug-ins of `group`: the modules of its folder that define ``PLUGIN``."""
    folder = _folder(group)
    names = sorted(p.stem for p in folder.glob("*.py") if not p.stem.startswith("_"))
    return [n for n in names if "\nPLUGIN = " in (folder / f"{n}.py").read_text(encoding="utf-8")]


def load(group: str, kind: object) -> type[Plugin]:
    """Returns the plug-in class of ``<group>.kind=<kind>``.

    Raises:
        SettingsError: no such plug-in.
    """
    if kind is None:
        raise checks.fail(
            f"{group}.kind", kind, "must be given", "write kind: <file name> into the yaml"
        )
    checks.one_of(f"{group}.kind", kind, kinds(group), f"add {_folder(group).name}/{kind}.py")
    plugin = importlib.import_module(f"{PACKAGES[group]}.{kind}").PLUGIN
    if not (isinstance(plugin, type) and issubclass(plugin, Plugin)):
        raise SettingsError(f"{group}.kind={kind}: its PLUGIN is not a fl_app.plugins.Plugin")
    return plugin


def build(group: str, values: Mapping[str, Any]) -> Any:
    """Returns the plug-in that a yaml section describes, every value checked.

    Raises:
        SettingsError: unknown kind or key, missing key, wrong type or value.
    """
    rest = dict(values)
    cls = load(group, rest.pop("kind", None))
    return checks.build(cls, group, rest)


def _folder(group: str) -> Path:
    spec = importlib.util.find_spec(PACKAGES[group])
    if spec is None or spec.origin is None:
        raise SettingsError(f"{group}: the package {PACKAGES[group]} is not installed")
    return Path(spec.origin).parent
