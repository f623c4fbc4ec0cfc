"""What a node's configuration may say, and what its floors refuse."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness import UNLIMITED, composed

from fl_app.client_policy import LOCAL_SIMULATION, Node
from fl_app.errors import PrivacyError, ProtocolError, SettingsError
from fl_app.node_policy import KEYS, NodePolicy, order_of
from fl_app.privacy import View

PLACE = {"partition-id": 0, "num-partitions": 1}
SIMULATED = {**PLACE, LOCAL_SIMULATION: True}
ROOT = Path(__file__).resolve().parents[2]


def policy(**config: object) -> NodePolicy:
    keys = {key.replace("_", "-"): value for key, value in config.items()}
    return Node.from_config({**PLACE, **keys}).policy


def check(made: NodePolicy, *overrides: str, **order: float) -> None:
    settings = composed(*overrides, *UNLIMITED)
    made.check(settings, replace(order_of(settings), **order))  # type: ignore[arg-type]


LOCAL = ("mechanism=local_gaussian", "mechanism.noise_multiplier=2", "mechanism.clipping_norm=1")
CENTRAL = ("mechanism=central_gaussian", "mechanism.noise_multiplier=2")
RECORD = ("training=dp_sgd", "training.noise_multiplier=1.5", "training.clipping_norm=1")
NOTHING = ("training=sgd",)


# Reading the configuration.


def test_all_keys_are_read(tmp_path: Path) -> None:
    made = policy(
        ledger_path=str(tmp_path / "l"),
        data_id="ward-7",
        max_epsilon=4,
        max_delta=1e-6,
        min_noise_multiplier=1,
        max_clipping_norm=2.5,
        allowed_placements="local, central",
        allowed_protections="none",
    )
    assert made == NodePolicy(
        ledger_path=tmp_path / "l",
        ledger_folder=made.ledger_folder,
        data_id="ward-7",
        max_epsilon=4.0,
        max_delta=1e-6,
        min_noise_multiplier=1,
        max_clipping_norm=2.5,
        allowed_placements=("local", "central"),
        allowed_protections=("none",),
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ledger-path", "relative/ledger.sqlite"), ("ledger-path", ""), ("ledger-path", 7),
        ("data-id", ""), ("data-id", "a/b"), ("data-id", "../x"), ("data-id", 7),
        ("data-id", ".hidden"), ("data-id", "x" * 101),
        ("max-epsilon", "4"), ("max-epsilon", 0), ("max-epsilon", -1.0), ("max-epsilon", True),
        ("max-epsilon", float("nan")), ("max-epsilon", float("inf")),
        ("max-delta", 0), ("max-delta", 1), ("max-delta", 1e-13), ("max-delta", "1e-5"),
        ("min-noise-multiplier", -1), ("min-noise-multiplier", "1"),
        ("max-clipping-norm", 0), ("max-clipping-norm", "1"),
        ("allowed-placements", ""), ("allowed-placements", "remote"),
        ("allowed-placements", "local,"), ("allowed-placements", 1), ("allowed-placements", True),
        ("allowed-protections", "none;secagg"), ("allowed-protections", ""),
    ],
)  # fmt: skip
def test_a_value_that_is_not_allowed_names_its_key(key: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"^{key}="):
        Node.from_config({**PLACE, key: value})


@pytest.mark.parametrize(
    "key",
    ["max_epsilon", "max-epsilom", "Max-Epsilon", "epsilon", "min-noise-multipler", "max-clip-norm",
     "allowed-placement", "ledger_path", "dataid", "partition_id", "allow-seeded-noises"],
)  # fmt: skip
def test_a_misspelt_key_is_refused_and_the_right_one_named(key: str) -> None:
    with pytest.raises(SettingsError, match=f"{key}=.*did you mean"):
        Node.from_config({**PLACE, key: 1})


@pytest.mark.parametrize("key", ["site", "data-root", "region", "gpu", "simulated"])
def test_keys_of_others_are_left_alone(key: str) -> None:
    Node.from_config({**PLACE, key: 1})


def test_a_place_in_the_federation_is_still_needed() -> None:
    with pytest.raises(ProtocolError, match="partition-id"):
        Node.from_config({"max-epsilon": 4.0})


def test_a_deployed_node_charges_a_ledger_named_after_its_data_by_default(tmp_path: Path) -> None:
    made = policy(data_path=str(tmp_path))
    assert made.max_epsilon is None
    assert made.allowed_placements == ("local", "distributed", "record")
    assert made.ledger_path == made.ledger_folder / f"{made.data_id}.sqlite"
    ledger = made.ledger
    assert ledger is not None
    assert ledger.path.parent.is_dir()


def test_a_simulation_charges_nothing_and_allows_everything_unless_told_to() -> None:
    made = Node.from_config(SIMULATED).policy
    assert made.ledger is None
    for overrides in (LOCAL, CENTRAL, RECORD, NOTHING):
        check(made, *overrides)
    for key, value in {"max-epsilon": 4.0, "data-id": "x", "ledger-path": "/x"}.items():
        assert Node.from_config({**SIMULATED, key: value}).policy.ledger_path is not None


def test_the_default_data_id_depends_on_where_the_data_are_and_on_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ward").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "ward")
    made = policy(data_path=str(tmp_path / "ward")).data_id
    assert made.startswith("ward-")
    for same in ("link", "ward/", "ward/../ward"):
        assert policy(data_path=f"{tmp_path}/{same}").data_id == made
    for other in (tmp_path / "ward2", tmp_path / "ward" / "ward"):
        assert policy(data_path=str(other)).data_id != made
    config = {"partition-id": 3, "num-partitions": 9, "data-path": str(tmp_path / "ward")}
    assert Node.from_config(config).policy.data_id == made  # another place, another process:
    code = (
        f"from fl_app.client_policy import Node\nprint(Node.from_config({config!r}).policy.data_id)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == made, done.stderr


def test_without_a_data_path_all_data_have_one_budget() -> None:
    """What a run reads then is the server's choice: another name must not be a new budget."""
    assert policy().data_id == "all-data"


def test_a_policy_can_be_a_key() -> None:
    """Workers cache data and models by node."""
    assert hash(Node.from_config(PLACE)) == hash(Node.from_config(PLACE))
    assert set(KEYS) >= {"max-epsilon", "allowed-protections"}


# Floors.


@pytest.mark.parametrize("overrides", [CENTRAL, NOTHING], ids=["central", "no noise"])
def test_noise_of_its_own_is_what_a_deployed_node_asks_for(overrides: tuple[str, ...]) -> None:
    with pytest.raises(PrivacyError, match="allowed-placements=local,distributed,record"):
        check(policy(), *overrides)


@pytest.mark.parametrize("overrides", [LOCAL, RECORD, (*LOCAL, *RECORD)])
def test_local_and_record_level_noise_are_allowed_by_default(overrides: tuple[str, ...]) -> None:
    check(policy(), *overrides)


@pytest.mark.parametrize(
    ("allowed", "asked"),
    [
        ("local", RECORD), ("record", LOCAL), ("local", (*LOCAL, *RECORD)), ("central", LOCAL),
        ("central,record", NOTHING), ("record", (*CENTRAL, *RECORD)),
    ],
)  # fmt: skip
def test_every_placement_that_is_asked_for_must_be_allowed(
    allowed: str, asked: tuple[str, ...]
) -> None:
    with pytest.raises(PrivacyError, match=f"allowed-placements={allowed}"):
        check(policy(allowed_placements=allowed), *asked)


@pytest.mark.parametrize(
    ("allowed", "asked"),
    [("central", CENTRAL), ("none", NOTHING), ("central,record", (*CENTRAL, *RECORD))],
)
def test_a_node_may_opt_in(allowed: str, asked: tuple[str, ...]) -> None:
    check(policy(allowed_placements=allowed), *asked)


def test_noise_of_multiplier_0_is_no_noise() -> None:
    bare = ("mechanism=local_gaussian", "mechanism.noise_multiplier=0")
    with pytest.raises(PrivacyError, match="training without noise"):
        check(policy(), *bare)
    check(policy(allowed_placements="none"), *bare)
    with pytest.raises(PrivacyError, match="training without noise"):
        check(policy(), "training=dp_sgd", "training.noise_multiplier=0")


def test_record_level_noise_that_the_server_adds_is_central(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = composed(*RECORD, *UNLIMITED)
    genuine = type(settings.training).event

    def at_the_server(self: object, z: float) -> object:
        return replace(genuine(settings.training, z), view=View.OBSERVER)  # type: ignore[type-var]

    monkeypatch.setattr(type(settings.training), "event", at_the_server)
    with pytest.raises(PrivacyError, match="CENTRAL"):
        policy().check(settings, order_of(settings))
    policy(allowed_placements="central").check(settings, order_of(settings))


@pytest.mark.parametrize(
    ("overrides", "order", "key"),
    [
        (LOCAL, {"noise_multiplier": 0.9}, "mechanism.noise_multiplier=0.9"),
        (CENTRAL, {"noise_multiplier": 0.9}, "mechanism.noise_multiplier=0.9"),
        (LOCAL, {"noise_multiplier": float("nan")}, "mechanism.noise_multiplier=nan"),
        (RECORD, {"training_noise_multiplier": 0.9}, "training.noise_multiplier=0.9"),
        ((*LOCAL, *RECORD), {"training_noise_multiplier": 0.9}, "training.noise_multiplier=0.9"),
    ],
)
def test_too_little_noise_is_refused(
    overrides: tuple[str, ...], order: dict[str, float], key: str
) -> None:
    made = policy(min_noise_multiplier=1.0, allowed_placements="central,local,record")
    check(made, *overrides)
    with pytest.raises(PrivacyError, match=rf"min-noise-multiplier=1\.0: .*{key}"):
        check(made, *overrides, **order)


def test_of_noise_shares_the_floor_is_about_the_nodes_own() -> None:
    made = policy(min_noise_multiplier=1.0)
    shares = ("mechanism=distributed_skellam", "mechanism.min_survivors=9", "mechanism.scale=100")
    z = "mechanism.noise_multiplier"
    check(made, *shares, f"{z}=3", noise_multiplier=3.0)
    with pytest.raises(PrivacyError, match=rf"min-noise-multiplier=1\.0: .*{z}=0\.9666"):
        check(made, *shares, f"{z}=2.9", noise_multiplier=2.9)


def test_of_noise_shares_a_coarse_scale_counts_against_them() -> None:
    made = policy(min_noise_multiplier=1.0)
    z = ("mechanism.noise_multiplier=3", "mechanism.min_survivors=4")
    for scale, fine in ((0.01, False), (1.0, False), (1000.0, True)):
        settings = composed(
            "mechanism=distributed_skellam", *z, f"mechanism.scale={scale}", *UNLIMITED
        )
        made.check(settings, order_of(settings))
        if fine:
            made.check(settings, order_of(settings), 650)
            continue
        with pytest.raises(PrivacyError, match=r"min-noise-multiplier=1\.0: "):
            made.check(settings, order_of(settings), 650)


def test_too_large_clipping_norms_are_refused() -> None:
    made = policy(max_clipping_norm=1.0)
    check(made, *LOCAL, *RECORD)
    for norm in (1.001, float("nan")):
        with pytest.raises(
            PrivacyError, match=r"max-clipping-norm=1\.0: .*mechanism.clipping_norm"
        ):
            check(made, *LOCAL, clipping_norm=norm)
    with pytest.raises(PrivacyError, match=r"max-clipping-norm=1.0: .*training.clipping_norm=1\.5"):
        check(made, *RECORD, "training.clipping_norm=1.5")


def test_other_protections_are_refused() -> None:
    made = replace(policy(), allowed_protections=("secagg",))
    with pytest.raises(PrivacyError, match=r"allowed-protections=secagg: .*protection=none"):
        check(made, *LOCAL)
