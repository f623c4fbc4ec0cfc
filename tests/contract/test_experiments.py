"""Every file in ``conf/experiment/`` composes, states what it should, and trains on real rows."""

import math
import os
from dataclasses import replace
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import yaml
from dp_accounting.pld import PLDAccountant
from harness import watched_run
from scipy.stats import norm

from fl_app import plugins
from fl_app.accounting.plan import make_plan
from fl_app.errors import SettingsError
from fl_app.models import build_model, num_parameters
from fl_app.overrides import CONF_DIR, compose, compose_mapping
from fl_app.partitioners import split_of
from fl_app.privacy import NoiseKind, PrivacyUnit, View
from fl_app.server_run import plan_of
from fl_app.stages import LoadedData, Table

EXPERIMENTS = sorted((CONF_DIR / "experiment").glob("*.yaml"))
NAMES = [path.stem for path in EXPERIMENTS]
METHODS = ["no_dp", "laplace", "gaussian_simple", "gaussian_moments", "gaussian_pld"]
CLASSIC = [f"wenzhu_{method}" for method in METHODS]
OTHER_DATA = ["cifar10", "femnist", "shakespeare"]
WENZHU = [name for name in NAMES if name.startswith("wenzhu_")]
PRIVATE = [name for name in CLASSIC if name != "wenzhu_no_dp"]
PRESETS = {"medical": (5, 8, 2, 3), "finance": (10, 10, 3, 5), "recommender": (20, 20, 5, 5)}
NUM_CLIENTS, ROWS_OF_A_CLIENT = 10, 4


def slice_of(data: LoadedData, *, natural: bool) -> LoadedData:
    """A few real rows of each of the first clients, so that two rounds take seconds."""
    rows = np.arange(NUM_CLIENTS * ROWS_OF_A_CLIENT)
    if natural:
        groups = np.asarray(data.train.groups)
        rows = np.concatenate(
            [np.flatnonzero(groups == g)[:ROWS_OF_A_CLIENT] for g in range(NUM_CLIENTS)]
        )

    def some(table: Table, rows: np.ndarray) -> Table:
        chosen = None if table.groups is None else table.groups[rows]
        return replace(
            table, features=table.features[rows], labels=table.labels[rows], groups=chosen
        )

    return replace(data, train=some(data.train, rows), test=some(data.test, np.arange(40)))


def shrink(name: str, monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> list[str]:
    """Makes the experiment's dataset a slice of itself; returns overrides that make a run small."""
    settings = compose([f"experiment={name}"])
    hub_id = getattr(settings.dataset, "hub_id", None)
    if hub_id and not (Path(os.environ["DPFL_DATA_ROOT"]) / hub_id).is_dir():
        pytest.skip(f"no copy of {hub_id} in $DPFL_DATA_ROOT")
    genuine = type(settings.dataset).load
    natural = settings.partition.by == "groups"

    def load(self: plugins.Dataset, **_: object) -> LoadedData:
        whole: LoadedData = genuine(self, data_path=None, cache_dir=cache_dir)  # type: ignore[arg-type]
        return slice_of(whole, natural=natural)

    monkeypatch.setattr(type(settings.dataset), "load", load)
    population = min(settings.federation.population, NUM_CLIENTS)
    values = [f"experiment={name}", f"federation.population={population}", "run.num_rounds=2"]
    if settings.training.private:
        values.append("training.local_steps=1")
    if settings.model.kind == "char_lstm":
        values += ["model.hidden=16", "model.num_layers=1"]
    return values


def values_at(values: object, path: str = "") -> dict[str, object]:
    if not isinstance(values, dict):
        return {path: values}
    return {
        k: v for name, sub in values.items() for k, v in values_at(sub, f"{path}.{name}").items()
    }


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda p: p.stem)
def test_every_shipped_experiment_composes_and_can_be_planned(path: Path) -> None:
    settings = compose([f"experiment={path.stem}"])
    plan = make_plan(settings, nominal_rows=600)
    assert plan.to_json()["private"] is (settings.bound_unit is not None)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_holds_differences_only(name: str) -> None:
    text = (CONF_DIR / "experiment" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    own = yaml.safe_load(text)
    groups = [f"{k[10:]}={v}" for d in own.pop("defaults", []) if isinstance(d, dict)
              for k, v in d.items()]  # fmt: skip
    without = values_at(compose_mapping(groups))
    for key, value in values_at(own).items():
        assert without.get(key, ...) != value, f"{name}: {key[1:]} is the default already"


@pytest.mark.parametrize("name", NAMES)
def test_two_rounds_on_real_rows_run_and_state_an_epsilon(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    run = watched_run(tmp_path / "run", *shrink(name, monkeypatch, cache_dir))
    assert run.results["status"] == "completed"
    assert math.isfinite(run.results["final"]["loss"])
    # The reproduction's claim over so few rounds is epsilon 10 in one step: no bound, so none.
    private = run.settings.bound_unit is not None and name != "wenzhu_gaussian_reproduction"
    assert [row["epsilon"] is not None for row in run.results["history"]] == [private] * 2
    assert run.results["privacy"]["private"] is private


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_model_of_an_experiment_can_be_built(
    name: str, monkeypatch: pytest.MonkeyPatch, cache_dir: Path
) -> None:
    shrink(name, monkeypatch, cache_dir)
    settings = compose([f"experiment={name}"])
    spec = settings.dataset.load(data_path=None, cache_dir=cache_dir).spec
    private = settings.bound_unit is not None
    assert num_parameters(build_model(settings.model, spec, seed=0, private=private)) > 0


def test_the_classic_set_is_complete() -> None:
    data = [f"{name}_{data}" for name in CLASSIC for data in OTHER_DATA]
    assert sorted([*CLASSIC, *data, "wenzhu_gaussian_reproduction"]) == WENZHU


@pytest.mark.parametrize("method", METHODS)
def test_the_other_data_of_the_classic_set_change_nothing_of_its_method(method: str) -> None:
    known = compose([f"experiment=wenzhu_{method}"]).to_mapping()
    for data in OTHER_DATA:
        other = compose([f"experiment=wenzhu_{method}_{data}"]).to_mapping()
        assert other["training"] | {"physical_batch_size": None} == known["training"] | {
            "physical_batch_size": None
        }
        for section in ("run", "privacy", "mechanism", "cohort", "accountant", "server_optimizer"):
            assert other[section] == known[section]
        hub_ids = {"cifar10": "uoft-cs/cifar10", "femnist": "flwrlabs/femnist",
                   "shakespeare": "flwrlabs/shakespeare"}  # fmt: skip
        assert other["dataset"]["hub_id"] == hub_ids[data]


@pytest.mark.parametrize("name", CLASSIC)
def test_words_on_the_command_line_win_over_an_experiment(name: str) -> None:
    words = ["dataset=fashion_mnist", "model=linear", "partition=iid", "federation.population=50"]
    settings = compose([f"experiment={name}", *words])
    assert settings.to_mapping()["dataset"]["hub_id"] == "zalando-datasets/fashion_mnist"
    assert (settings.model.kind, settings.partition.kind) == ("linear", "iid")
    assert settings.federation.population == 50
    assert settings.cohort == compose([f"experiment={name}"]).cohort


@pytest.mark.parametrize("data", ["femnist", "shakespeare"])
def test_the_natural_population_is_that_of_the_small_copy_and_a_wrong_one_names_it(
    data: str, cache_dir: Path
) -> None:
    settings = compose([f"experiment=wenzhu_gaussian_pld_{data}"])
    hub_id = settings.to_mapping()["dataset"]["hub_id"]
    if not (Path(os.environ["DPFL_DATA_ROOT"]) / hub_id).is_dir():
        pytest.skip(f"no copy of {hub_id} in $DPFL_DATA_ROOT")
    loaded = settings.dataset.load(data_path=None, cache_dir=cache_dir)
    population = settings.federation.population
    assert min(map(len, split_of(settings, loaded))) > 0
    wrong = replace(settings, federation=replace(settings.federation, population=100))
    with pytest.raises(SettingsError, match=f"set federation.population={population}$"):
        split_of(wrong, loaded)


@pytest.mark.parametrize("name", CLASSIC)
def test_the_classic_set_asks_everybody_twenty_times_for_one_full_batch_step(name: str) -> None:
    settings = compose([f"experiment={name}"])
    assert settings.cohort.max_participations(settings.run.num_rounds, 100) == 20
    assert settings.federation.population == 100
    training = settings.to_mapping()["training"]
    assert (training["local_steps"], training["learning_rate"]) == (1, 0.1)
    assert training.get("batch_rate", 1.0) == 1.0


@pytest.mark.parametrize("name", PRIVATE)
def test_the_classic_set_spends_the_claimed_epsilon_over_twenty_steps(name: str) -> None:
    for target in (10.0, 30.0):
        settings = compose([f"experiment={name}", f"privacy.target_epsilon={target}"])
        plan = make_plan(settings, nominal_rows=600)
        (event,) = plan.events
        laplace = name == "wenzhu_laplace"
        assert event.noise is (NoiseKind.LAPLACE if laplace else NoiseKind.GAUSSIAN)
        assert (event.unit, event.sampling_rate, event.steps) == (PrivacyUnit.RECORD, 1.0, 1)
        for row in plan.guarantees(100):
            assert row.epsilon == pytest.approx(target, rel=2e-3)
            assert row.epsilon <= target
        if laplace:  # scale b = 20 C / epsilon
            assert plan.training_noise_multiplier == pytest.approx(20 / target, rel=2e-4)


def test_the_tighter_the_accountant_the_less_noise() -> None:
    noise = {
        name: make_plan(compose([f"experiment={name}"]), 600).training_noise_multiplier or 0.0
        for name in PRIVATE
    }
    assert (
        noise["wenzhu_gaussian_pld"]
        < noise["wenzhu_gaussian_moments"]
        < 0.5 * noise["wenzhu_gaussian_simple"]
    )


def test_the_reproduction_is_marked_once_a_step_has_epsilon_1() -> None:
    name = "experiment=wenzhu_gaussian_reproduction"
    plan = make_plan(compose([name]), 600)
    # sqrt(2 ln(1.25 / delta)) / epsilon with a twentieth of epsilon 10 and delta 1e-5 a step.
    expected = math.sqrt(2 * math.log(1.25 * 20 / 1e-5)) / (10 / 20)
    assert plan.training_noise_multiplier == pytest.approx(expected, rel=1e-3)
    assert all(row.private for row in plan.guarantees(100))
    assert not plan.warnings
    above = make_plan(compose([name, "privacy.target_epsilon=30"]), 600)
    assert not any(row.private for row in above.guarantees(100))
    assert any("NOT a valid bound" in text for text in above.warnings)


def test_the_noise_of_the_original_at_claimed_epsilon_10_is_epsilon_three_quarters() -> None:
    words = ["training.noise_multiplier=21.71", "privacy.target_epsilon=null"]
    plan = make_plan(compose(["experiment=wenzhu_gaussian_pld", *words]), 600)
    mu = math.sqrt(20) / 21.71  # 20 Gaussians are one (Dong et al. 2019, arXiv:1905.02383)

    def delta(epsilon: float) -> float:
        upper = norm.cdf(mu / 2 - epsilon / mu)
        return float(upper - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

    (row, *_) = plan.guarantees(100)
    assert row.epsilon is not None
    assert delta(row.epsilon) <= 1e-5 < delta(row.epsilon - 0.01)
    assert row.epsilon == pytest.approx(0.75, abs=0.01)


def test_the_edge_demo_says_what_its_noise_multiplier_really_is() -> None:
    settings = compose(["experiment=edge_demo"])
    training = settings.to_mapping()["training"]
    assert training["local_steps"] * training["batch_rate"] == pytest.approx(2)  # epochs
    assert (training["clipping_norm"], training["noise_multiplier"]) == (1.0, 0.5)
    assert (settings.federation.population, settings.run.num_rounds) == (3, 5)
    assert settings.privacy.target_epsilon is None

    # One Gaussian step on a Poisson batch, 125 steps a round, 5 rounds, composed without us.
    one = dp_accounting.PoissonSampledDpEvent(
        training["batch_rate"], dp_accounting.GaussianDpEvent(0.5)
    )
    independent = PLDAccountant(value_discretization_interval=1e-4).compose(one, 125 * 5)
    expected = independent.get_epsilon(1e-5)
    view = plan_of(["experiment=edge_demo"])
    stated = {(g["unit"], g["view"]): g["epsilon"] for g in view.values["guarantees"]}
    assert stated[PrivacyUnit.RECORD, View.SERVER] == pytest.approx(expected, rel=1e-3)
    shown = math.ceil(expected * 1000) / 1000
    assert f"RECORD against SERVER: epsilon {shown:.3f} at delta 1e-05" in view.text
    text = (CONF_DIR / "experiment" / "edge_demo.yaml").read_text()
    assert f"epsilon {expected:.2f} at delta 1e-5" in text


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_keeps_its_budget_and_local_epochs(name: str) -> None:
    lowest, highest, fewest, most = PRESETS[name]
    settings = compose([f"experiment={name}"])
    target = settings.privacy.target_epsilon
    assert target is not None
    assert lowest <= target <= highest
    training = settings.to_mapping()["training"]
    epochs = training.get("local_epochs") or training["local_steps"] * training["batch_rate"]
    assert fewest <= epochs <= most
    plan = make_plan(settings, nominal_rows=30)
    (row, *_) = plan.guarantees(settings.run.num_rounds)
    assert row.epsilon == pytest.approx(target, rel=2e-3)
    assert row.epsilon is not None
    assert row.epsilon <= target
    recommends = name == "recommender"
    assert row.unit is (PrivacyUnit.CLIENT if recommends else PrivacyUnit.RECORD)
    assert row.view is (View.OBSERVER if recommends else View.SERVER)


def test_client_level_is_the_setting_that_people_compare() -> None:
    settings = compose(["experiment=client_level"])
    values = settings.to_mapping()
    assert values["dataset"]["hub_id"] == "zalando-datasets/fashion_mnist"
    assert (values["partition"]["kind"], values["partition"]["alpha"]) == ("dirichlet", 0.5)
    assert (values["cohort"]["kind"], values["cohort"]["sampling_rate"]) == ("poisson", 0.1)
    assert (settings.federation.population, settings.run.num_rounds) == (1000, 100)
    assert settings.mechanism.kind == "central_gaussian"
    plan = make_plan(settings, nominal_rows=60)
    # Calibrated noise for epsilon 4, q 0.1, 100 rounds: docs/privacy.md, checked against Opacus.
    assert plan.mechanism_noise_multiplier == pytest.approx(1.386, abs=1e-3)
