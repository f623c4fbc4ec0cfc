"""Every file in ``conf/experiment/`` composes, states what it should, and starts."""

from pathlib import Path

import pytest
import yaml
from harness import watched_run

from fl_app.accounting.plan import make_plan
from fl_app.overrides import CONF_DIR, compose, compose_mapping
from fl_app.privacy import NoiseKind, PrivacyUnit

EXPERIMENTS = sorted((CONF_DIR / "experiment").glob("*.yaml"))
WENZHU = sorted(p.stem for p in EXPERIMENTS if p.stem.startswith("wenzhu_"))
PRIVATE = [name for name in WENZHU if name != "wenzhu_no_dp"]
SMALL = [
    "dataset=digits", "model=linear", "federation.population=10", "run.num_rounds=2",
    "privacy.target_delta=1e-5",
]  # fmt: skip


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


@pytest.mark.parametrize("name", WENZHU)
def test_the_classic_set_holds_differences_only(name: str) -> None:
    text = (CONF_DIR / "experiment" / f"{name}.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    own = yaml.safe_load(text)
    groups = [f"{k[10:]}={v}" for d in own.pop("defaults", []) if isinstance(d, dict)
              for k, v in d.items()]  # fmt: skip
    without = values_at(compose_mapping(groups))
    for key, value in values_at(own).items():
        assert without.get(key, ...) != value, f"{name}: {key[1:]} is the default already"


@pytest.mark.parametrize("name", WENZHU)
def test_two_small_rounds_of_the_classic_set_run(name: str, tmp_path: Path) -> None:
    run = watched_run(tmp_path / "run", f"experiment={name}", *SMALL)
    assert run.results["status"] == "completed"
    private = run.settings.privacy.target_epsilon is not None
    assert [row["epsilon"] is not None for row in run.results["history"]] == [private] * 2


def test_the_classic_set_is_complete() -> None:
    names = ("gaussian_moments", "gaussian_pld", "gaussian_simple", "laplace", "no_dp")
    assert [f"wenzhu_{name}" for name in names] == WENZHU


@pytest.mark.parametrize("name", WENZHU)
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
