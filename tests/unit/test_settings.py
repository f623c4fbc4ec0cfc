"""Bad input is refused before any work: key, value, what is allowed, what to do."""

import json

import pytest

from fl_app.errors import SettingsError
from fl_app.overrides import check_sweep, compose, split_run_config
from fl_app.privacy import PrivacyUnit
from fl_app.settings import Settings

# overrides -> what the message must hold
REFUSED = [
    (["privacy.target_epsilon=0"], "privacy.target_epsilon=0"),
    (["privacy.target_epsilon=-1"], "privacy.target_epsilon=-1"),
    (["privacy.target_epsilon=nan"], "privacy.target_epsilon=nan"),
    (["privacy.target_epsilon=inf"], "privacy.target_epsilon=inf"),
    (["privacy.target_epsilon='1e-5 '"], "privacy.target_epsilon=1e-5 : must be a number or null"),
    (["privacy.target_delta=0"], "privacy.target_delta=0"),
    (["privacy.target_delta=1"], "privacy.target_delta=1"),
    (["privacy.target_delta=2"], "privacy.target_delta=2"),
    (["privacy.target_delta=nan"], "privacy.target_delta=nan"),
    (["training.clipping_norm=0"], "training.clipping_norm=0"),
    (["training.clipping_norm=nan"], "training.clipping_norm=nan"),
    (["training.clipping_norm=inf"], "training.clipping_norm=inf"),
    (["mechanism=central_gaussian", "mechanism.clipping_norm=0"], "mechanism.clipping_norm=0"),
    (["mechanism=central_gaussian", "mechanism.clipping_norm=inf"], "mechanism.clipping_norm=inf"),
    (["mechanism=local_gaussian", "mechanism.clipping_norm=nan"], "mechanism.clipping_norm=nan"),
    (["training.noise_multiplier=-1"], "training.noise_multiplier=-1"),
    (
        ["mechanism=local_gaussian", "mechanism.noise_multiplier=-1"],
        "mechanism.noise_multiplier=-1",
    ),
    (["training.batch_rate=0"], "training.batch_rate=0"),
    (["training.batch_rate=1.5"], "training.batch_rate=1.5"),
    (["cohort=poisson", "cohort.sampling_rate=-0.1"], "cohort.sampling_rate=-0.1"),
    (["cohort=poisson", "cohort.sampling_rate=1.01"], "cohort.sampling_rate=1.01"),
    (
        ["cohort=fixed_size", "cohort.size=11", "accountant=rdp"],
        "must be <= federation.population=10",
    ),
    (["federation.population=0"], "federation.population=0"),
    (["federation.population=true"], "federation.population=True"),
    (["run.num_rounds=0"], "run.num_rounds=0"),
    (["run.num_rounds=2.5"], "run.num_rounds=2.5: must be a whole number"),
    (["run.seed=-1"], "run.seed=-1"),
    (["run.device=tpu"], "run.device=tpu: must be one of auto, cpu, cuda, mps"),
    (["federation.on_missing=skp"], "did you mean skip?"),
    (["training=sgd"], "nothing adds noise"),
    (["training=sgd", "privacy.privacy_unit=record"], "choose training=dp_sgd"),
    (["privacy.privacy_unit=client"], "choose mechanism=central_gaussian"),
    (["privacy.privacy_unit=none"], "something private is chosen"),
    (["mechanism=central_gaussian", "training=dp_sgd"], "training.noise_multiplier=null"),
    (["training.noise_multiplier=0"], "cannot hold without noise"),
    (["privacy.target_epsilon=null"], "one of it and privacy.target_epsilon must be a number"),
    (["federation.weighting=examples"], "example counts are private"),
    (["mechanism=central_gaussian", "cohort=fixed_size", "cohort.size=5"], "accountant=rdp"),
    (["sigmaa=2"], "sigmaa=2: unknown key"),
    (["training.clip_norm=2"], "did you mean training.clipping_norm?"),
    (["run.num_round=3"], "did you mean run.num_rounds?"),
    (["dataset=mnits"], "mnist"),
    (["+training.extra=1"], "training.extra=1: unknown key"),
    (["dataset.kind=nope"], "dataset.kind=nope"),
    (
        ["mechanism=central_gaussian", "training.clipping_norm=1"],
        "training.clipping_norm=1: unknown",
    ),
    (
        ["mechanism=central_gaussian", "cohort=fixed_size", "cohort.size=50", "accountant=rdp"],
        "cohort.size=50: must be <= federation.population=10",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda v: " ".join(v)[:60])
def test_bad_input_is_named_and_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        compose(overrides)
    assert message in str(caught.value)


def test_all_problems_of_all_sections_are_reported_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        compose(["run.num_rounds=0", "privacy.target_delta=2", "cohort=poisson",
                 "cohort.sampling_rate=7"])  # fmt: skip
    for part in ("run.num_rounds=0", "privacy.target_delta=2", "cohort.sampling_rate=7"):
        assert part in str(caught.value)


def test_default_configuration_is_record_level_dp_sgd_at_epsilon_8() -> None:
    settings = compose([])
    assert settings.bound_unit is PrivacyUnit.RECORD
    assert (settings.privacy.target_epsilon, settings.privacy.target_delta) == (8.0, 1e-4)
    assert (settings.run.num_rounds, settings.federation.population) == (30, 10)
    (event,) = settings.events(1.0)
    assert (event.sampling_rate, event.steps) == (0.2, 4)


def test_choosing_a_client_level_mechanism_trains_with_sgd_unless_told_otherwise() -> None:
    assert compose(["mechanism=central_gaussian"]).training.kind == "sgd"
    both = compose(["mechanism=central_gaussian", "training=dp_sgd", "training.noise_multiplier=1"])
    assert both.training.kind == "dp_sgd"
    assert both.bound_unit is PrivacyUnit.CLIENT
    assert len(both.events()) == 2


def test_settings_survive_the_wire_unchanged() -> None:
    settings = compose(["dataset=mnist", "model=mlp", "mechanism=local_gaussian", "cohort=poisson"])
    again = Settings.from_mapping(json.loads(settings.to_wire()))
    assert again == settings


def test_public_values_hold_neither_seed_nor_paths() -> None:
    public = compose(["run.seed=77", "run.output_dir=/somewhere/x"]).to_public()
    assert "77" not in json.dumps(public)
    assert "somewhere" not in json.dumps(public)


def test_run_config_accepts_value_changes_only() -> None:
    parts = split_run_config('dataset=mnist run.num_rounds=3 model.hidden="[8,8]"')
    assert parts == ["dataset=mnist", "run.num_rounds=3", "model.hidden=[8,8]"]
    assert split_run_config("") == []


@pytest.mark.parametrize(
    "text",
    [
        "+new=1",
        "~dataset",
        "hydra.run.dir=/x",
        "hydra=x",
        "model._target_=os.system",
        "run.seed=${oc.env:HOME}",
        "dataset@x=mnist",
        "--multirun",
        "just-words",
        'unclosed="',
    ],
)
def test_run_config_refuses_everything_else(text: str) -> None:
    with pytest.raises(SettingsError, match="overrides="):
        split_run_config(text)


def test_unweighted_run_without_privacy_may_weight_by_examples() -> None:
    settings = compose(
        ["training=sgd", "privacy.target_epsilon=null", "federation.weighting=examples"]
    )
    assert settings.bound_unit is None
    assert settings.events() == []


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("experiment=wenzhu_laplce", r"experiment=wenzhu_laplce: must be one of .*wenzhu_laplace"),
        ("experiment=null", r"experiment=null: .*leave it out"),
        ("model=null", r"model=null: must be one of .*linear"),
        ("cohort=[all,poisson]", r"must be one of all, fixed_size, poisson, round_robin"),
    ],
)
def test_a_choice_that_is_not_there_is_refused_not_left_out(word: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        compose([word])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model=linear,cnnn"], r"model=cnnn: must be one of .*did you mean cnn"),
        (["experiment=medical,fiance"], r"experiment=fiance: must be one of .*finance"),
        (["runn.seed=1,4"], r"runn\.seed=1: unknown key; did you mean run\.seed"),
        (["-m", "run.seed=choice(1,2)", "model=null,linear"], r"model=null: must be one of"),
        (["model"], "overrides: "),
    ],
)
def test_an_unknown_key_or_choice_of_a_sweep_is_refused_before_its_first_job(
    words: list[str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        check_sweep(words)


def test_a_sweep_of_known_keys_is_accepted_whatever_their_values() -> None:
    check_sweep(["-m", "privacy.target_epsilon=-1,4", "model=linear,cnn", "run.seed=range(1,3)"])
    check_sweep(["experiment=medical,finance", "hydra/launcher=basic", "hydra.job.name=x"])
