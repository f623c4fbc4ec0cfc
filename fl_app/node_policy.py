"""What a node's own configuration allows a server to ask for, and its budget (rule 13).

Keys of the node configuration that this module reads, all optional; lists are comma-separated:

- ``ledger-path``: absolute path of the node's ledger.
- ``data-id``: whose budget it is: letters, digits, ``. _ -``.
- ``max-epsilon``, ``max-delta``: the budget of one record over the life of the data.
- ``min-noise-multiplier``: smallest z of any noise that is asked for.
- ``max-clipping-norm``: largest C of any clipping that is asked for.
- ``allowed-placements``: of central, local, distributed (client-level noise), record (record-level
  noise) and none (training without noise).
- ``allowed-protections``: by name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fl_app import checks, plugins
from fl_app.accounting.node_charge import SMALLEST_DELTA
from fl_app.accounting.node_ledger import NodeLedger
from fl_app.errors import LedgerError, PrivacyError
from fl_app.privacy import Placement, PrivacyUnit, View
from fl_app.settings import Settings
from fl_app.stages import RoundOrder

KEYS = (
    "ledger-path",
    "data-id",
    "max-epsilon",
    "max-delta",
    "min-noise-multiplier",
    "max-clipping-norm",
    "allowed-placements",
    "allowed-protections",
)
RECORD, NO_NOISE = "record", "none"
PLACEMENTS = (*(placement.lower() for placement in Placement), RECORD, NO_NOISE)

_DEFAULT_DELTA = 1e-5
_BUDGET_KEYS = ("ledger-path", "data-id", "max-epsilon")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePolicy:
    """The floors and the budget of one node.

    Attributes:
        ledger_path: the node's ledger; None: nothing is charged (simulations only).
        ledger_folder: made if the ledger is to lie there: the default place.
        data_id: whose budget it is.
        max_epsilon: RECORD budget, None for a ledger without limit.
        max_delta: its delta.
        min_noise_multiplier: smallest z.
        max_clipping_norm: largest C, None without a limit.
        allowed_placements: see the module.
        allowed_protections: names of protections.
    """

    ledger_path: Path | None
    ledger_folder: Path
    data_id: str
    max_epsilon: float | None
    max_delta: float
    min_noise_multiplier: float
    max_clipping_norm: float | None
    allowed_placements: tuple[str, ...]
    allowed_protections: tuple[str, ...]

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        *,
        simulated: bool,
        data_path: str | None,
        ledger_folder: Path,
    ) -> NodePolicy:
        """Returns the policy in a node's configuration.

        Defaults of a deployed node: noise of its own is required (placements local, distributed and
        record), and every request is charged, without limit, to a ledger in `ledger_folder` that is
        named after the data. Defaults in a simulation: everything is allowed and nothing charged.

        Args:
            config: the node's configuration.
            simulated: whether the node runs in a simulation.
            data_path: the node's ``data-path``.
            ledger_folder: for ledgers without ``ledger-path``.

        Raises:
            SettingsError: a value that is not allowed, with its key.
        """
        data_id = _data_id(config.get("data-id"), data_path)
        charged = not simulated or any(key in config for key in _BUDGET_KEYS)
        path = _ledger_path(config.get("ledger-path")) or ledger_folder / f"{data_id}.sqlite"
        own = [p for p in PLACEMENTS if p not in (Placement.CENTRAL.lower(), NO_NOISE)]
        protections = plugins.kinds("protection")
        epsilon, norm = config.get("max-epsilon"), config.get("max-clipping-norm")
        return cls(
            ledger_path=path if charged else None,
            ledger_folder=ledger_folder,
            data_id=data_id,
            max_epsilon=None if epsilon is None else float(checks.positive("max-epsilon", epsilon)),
            max_delta=_delta(config.get("max-delta", _DEFAULT_DELTA)),
            min_noise_multiplier=checks.non_negative(
                "min-noise-multiplier", config.get("min-noise-multiplier", 0.0)
            ),
            max_clipping_norm=None if norm is None else checks.positive("max-clipping-norm", norm),
            allowed_placements=_names(
                config, "allowed-placements", PLACEMENTS, PLACEMENTS if simulated else own
            ),
            allowed_protections=_names(config, "allowed-protections", protections, protections),
        )

    @property
    def ledger(self) -> NodeLedger | None:
        """The ledger that every request is charged to, None if none is.

        Raises:
            LedgerError: the default folder cannot be made.
        """
        if self.ledger_path is None:
            return None
        if self.ledger_path.parent == self.ledger_folder:
            try:
                self.ledger_folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LedgerError(f"{self.ledger_folder}: cannot be made ({error})") from error
        return NodeLedger(
            path=self.ledger_path,
            data_id=self.data_id,
            max_epsilon=self.max_epsilon,
            max_delta=self.max_delta,
        )

    def check(
        self, settings: Settings, order: RoundOrder, num_parameters: int | None = None
    ) -> None:
        """Refuses what falls below the node's floors.

        A noise multiplier that is still to be calibrated (None) passes: an order that asks for
        training without a number is refused by `client_round.check_order`.

        Args:
            settings: what both sides agreed on.
            order: what is asked.
            num_parameters: P; None: the model is not there yet, and rounding does not count.

        Raises:
            PrivacyError: with the node's key, what was asked and what is allowed.
        """
        for placement in sorted(_placements(settings, order)):
            if placement not in self.allowed_placements:
                raise _below("allowed-placements", self.allowed_placements, _ASKED[placement])
        if settings.protection.kind not in self.allowed_protections:
            asked = f"protection={settings.protection.kind}"
            raise _below("allowed-protections", self.allowed_protections, asked)
        for key, z in _noises(settings, order, num_parameters).items():
            if z is not None and not z >= self.min_noise_multiplier:
                raise _below("min-noise-multiplier", self.min_noise_multiplier, f"{key}={z}")
        limit = self.max_clipping_norm
        for key, norm in _norms(settings, order).items():
            if limit is not None and norm is not None and not norm <= limit:
                raise _below("max-clipping-norm", limit, f"{key}={norm}")


_ASKED = {
    "central": "noise that the server adds (CENTRAL)",
    "local": "noise that every client adds (LOCAL)",
    "distributed": "noise shares (DISTRIBUTED)",
    RECORD: "record-level noise",
    NO_NOISE: "training without noise",
}


def order_of(settings: Settings) -> RoundOrder:
    """Returns the order of round 1 that the settings describe, for checks before any round."""
    return RoundOrder(
        round=1,
        clipping_norm=getattr(settings.mechanism, "clipping_norm", None),
        noise_multiplier=settings.noise_multiplier_in(PrivacyUnit.CLIENT, 1),
        training_noise_multiplier=settings.noise_multiplier_in(PrivacyUnit.RECORD, 1),
        nominal_rows=1,
    )


def _noises(
    settings: Settings, order: RoundOrder, num_parameters: int | None
) -> dict[str, float | None]:
    """Returns the noise multipliers that count, by key."""
    found: dict[str, float | None] = {}
    if settings.client_level and order.noise_multiplier is not None:
        own = settings.mechanism.own_noise_multiplier(order.noise_multiplier, num_parameters)
        found["mechanism.noise_multiplier"] = own
    if settings.training.private:
        found["training.noise_multiplier"] = order.training_noise_multiplier
    return found


def _norms(settings: Settings, order: RoundOrder) -> dict[str, float | None]:
    """Returns the clipping norms that count, by key."""
    found: dict[str, float | None] = {}
    if settings.client_level:
        found["mechanism.clipping_norm"] = order.clipping_norm
    if settings.training.private:
        found["training.clipping_norm"] = getattr(settings.training, "clipping_norm", None)
    return found


def _placements(settings: Settings, order: RoundOrder) -> set[str]:
    """Returns where the noise that is asked for comes from; noise of multiplier 0 is none."""
    found = set()
    placement = settings.mechanism.placement
    if placement is not None and order.noise_multiplier != 0:
        found.add(placement.lower())
    record = settings.training.event(order.training_noise_multiplier or 1.0)
    if record is not None and order.training_noise_multiplier != 0:
        # Against the OBSERVER only: it is the server that adds it.
        central = record.view is View.OBSERVER
        found.add(Placement.CENTRAL.lower() if central else RECORD)
    return found or {NO_NOISE}


def _below(key: str, value: object, asked: str) -> PrivacyError:
    shown = ",".join(value) if isinstance(value, tuple) else value
    return PrivacyError(
        f"{key}={shown}: this node does not take part in {asked}; ask for what it allows, or let "
        f"its owner change {key}"
    )


def _data_id(given: object, data_path: str | None) -> str:
    """Returns the configured id, or one that depends on where the data are and on nothing else.

    Without ``data-path`` all data of the node have one id: which of them a run reads is the
    server's choice, and must not give it a new budget.
    """
    if given is not None:
        if not isinstance(given, str) or not _ID.fullmatch(given):
            raise checks.fail(
                "data-id",
                given,
                "must be 1 to 100 letters, digits, dots, dashes and underscores, the first one a "
                "letter or digit",
                'quote a number, e.g. data-id="7"',
            )
        return given
    if data_path is None:
        return "all-data"
    resolved = str(Path(data_path).expanduser().resolve())
    name = re.sub(r"[^A-Za-z0-9]+", "-", Path(resolved).name).strip("-")[:40] or "data"
    return f"{name}-{hashlib.sha256(resolved.encode()).hexdigest()[:16]}"


def _ledger_path(given: object) -> Path | None:
    if given is None:
        return None
    path = Path(given).expanduser() if isinstance(given, str) and given else None
    if path is None or not path.is_absolute():
        raise checks.fail(
            "ledger-path",
            given,
            "must be an absolute path: the budget must not depend on where a process was started",
            "write it from the root of the file system on",
        )
    return path


def _delta(given: object) -> float:
    delta = checks.open_unit("max-delta", given, "well below 1 / number of records")
    if delta < SMALLEST_DELTA:
        raise checks.fail("max-delta", given, f"must be at least {SMALLEST_DELTA}")
    return delta


def _names(
    config: Mapping[str, object], key: str, known: Collection[str], default: Iterable[str]
) -> tuple[str, ...]:
    """Returns a comma-separated list of known names as a tuple; `default` without the key."""
    if key not in config:
        return tuple(default)
    given = config[key]
    remedy = f"separate names by commas, e.g. {key}={','.join(sorted(known)[:2])}"
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else [given]
    return tuple(checks.one_of(key, name, known, remedy) for name in names)
