"""Rule 9: sampler, noise and accountant agree or the run refuses; realized cohorts stay hidden."""

import json
import re
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import dp_accounting
import pytest
import yaml
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from harness import PUBLIC_FILES, UNLIMITED, Watched, spoil_client, watched_run
from safetensors import safe_open

from fl_app import client_round
from fl_app.accounting.plan import PrivacyPlan, make_plan
from fl_app.errors import SettingsError
from fl_app.overrides import compose
from fl_app.stages import ClientPartition

CENTRAL = ["mechanism=central_gaussian", "mechanism.noise_multiplier=1", *UNLIMITED]
HUNDRED = [*CENTRAL, "federation.population=100", "privacy.target_delta=1e-5"]
FIXED = [*HUNDRED, "cohort=fixed_size", "cohort.size=10"]
SEED = 918_273_645


def plan(*overrides: str) -> PrivacyPlan:
    return make_plan(compose([*overrides]))


# --- what composes with what


def test_fixed_size_with_pld_is_refused_with_every_way_out() -> None:
    with pytest.raises(SettingsError) as refusal:
        plan(*FIXED, "accountant=pld")
    for way_out in ("accountant=rdp", "cohort.amplification=false", "cohort=poisson"):
        assert way_out in str(refusal.value)
    plan(*FIXED, "accountant=rdp")
    plan(*FIXED, "accountant=pld", "cohort.amplification=false")
    plan(*HUNDRED, "accountant=pld", "cohort=poisson")


@pytest.mark.parametrize(
    ("overrides", "relation", "epsilon"),
    [
        ([*HUNDRED, "cohort=poisson", "accountant=pld"], "ADD_OR_REMOVE_ONE", 7.05),
        ([*HUNDRED, "cohort=poisson", "accountant=rdp"], "ADD_OR_REMOVE_ONE", 7.90),
        ([*FIXED, "accountant=rdp"], "REPLACE_ONE", 83.9),
        ([*FIXED, "accountant=rdp", "cohort.amplification=false"], "REPLACE_ONE", 294.9),
        ([*FIXED, "accountant=pld", "cohort.amplification=false"], "REPLACE_ONE", 284.4),
        ([*HUNDRED, "cohort=all", "accountant=pld"], "ZERO_OUT", 91.8),
        ([*HUNDRED, "cohort=all", "accountant=rdp"], "ZERO_OUT", 96.1),
        ([*HUNDRED, "cohort=round_robin", "accountant=pld"], "ZERO_OUT", 17.86),
    ],
)
def test_epsilon_of_each_sampler_after_100_rounds(
    overrides: list[str], relation: str, epsilon: float
) -> None:
    """The published numbers of the scenario table: q 0.1, z 1, delta 1e-5."""
    first = plan(*overrides, "run.num_rounds=100").guarantees(100)[0]
    assert (first.view, first.relation) == ("OBSERVER", relation)
    assert first.epsilon == pytest.approx(epsilon, abs=0.051 if epsilon > 10 else 0.0051)


LAPLACE = ["mechanism=central_laplace", "mechanism.noise_multiplier=10", *HUNDRED[2:], *UNLIMITED]


@pytest.mark.parametrize("mechanism", ["central_laplace", "local_laplace"])
def test_a_hundred_laplace_releases_of_a_tenth_cost_4_22_not_10(mechanism: str) -> None:
    """The scenario table of the project; `simple` adds the pure epsilons."""
    whole = [*LAPLACE, f"mechanism={mechanism}", "run.num_rounds=100", "cohort=all"]
    for accountant, epsilon in (("pld", 4.22), ("simple", 10.0)):
        first = plan(*whole, f"accountant={accountant}").guarantees(100)[0]
        assert (first.unit, first.relation) == ("CLIENT", "ZERO_OUT")
        assert first.epsilon == pytest.approx(epsilon, abs=0.0051)
        assert any("continuous Laplace" in text for text in first.assumptions)


def test_poisson_sampled_laplace_is_for_pld_and_equals_the_plain_library() -> None:
    sampled = [*LAPLACE, "mechanism.noise_multiplier=1", "cohort=poisson", "run.num_rounds=50"]
    first = plan(*sampled, "accountant=pld").guarantees(50)[0]
    plain = PLDAccountant(value_discretization_interval=1e-4)
    step = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0))
    plain.compose(step, 50)
    assert first.relation == "ADD_OR_REMOVE_ONE"
    assert first.epsilon == pytest.approx(plain.get_epsilon(1e-5), rel=1e-3)
    for accountant in ("rdp", "gdp"):
        with pytest.raises(SettingsError, match=r"accountant=pld"):
            plan(*sampled, f"accountant={accountant}")


def test_fixed_size_laplace_is_never_sent_to_an_accountant_that_refuses_it() -> None:
    fixed = [*LAPLACE, "cohort=fixed_size", "cohort.size=10"]
    with pytest.raises(SettingsError, match=r"cohort\.amplification=false") as refusal:
        plan(*fixed, "accountant=pld")
    assert "accountant=rdp" not in str(refusal.value)
    # Replacing a client moves the L1 norm by 2C: epsilon 2 / z a round.
    replaced = plan(*fixed, "cohort.amplification=false", "accountant=simple").guarantees(3)[0]
    assert replaced.epsilon == pytest.approx(3 * 2 / 10, rel=1e-12)


def test_the_server_gets_no_amplification() -> None:
    for cohort in (["cohort=poisson"], ["cohort=fixed_size", "cohort.size=10"]):
        for row in plan(*HUNDRED, *cohort, "accountant=rdp").guarantees(10):
            assert row.view == "OBSERVER" or row.epsilon is None
        local = plan(
            "mechanism=local_gaussian", "mechanism.noise_multiplier=1", *UNLIMITED, *cohort,
            "federation.population=100", "accountant=rdp",
        )  # fmt: skip
        plain = RdpAccountant()
        plain.compose(dp_accounting.GaussianDpEvent(1.0), 10)
        for row in local.guarantees(10):
            assert row.relation == "ZERO_OUT"
            assert row.epsilon == pytest.approx(plain.get_epsilon(1e-4), rel=1e-6)


def test_fixed_size_of_the_whole_population_is_the_unsampled_mechanism() -> None:
    everybody = [*HUNDRED, "cohort=fixed_size", "cohort.size=100", "accountant=rdp"]
    sampled = plan(*everybody).guarantees(5)[0].epsilon
    plain = plan(*everybody, "cohort.amplification=false").guarantees(5)[0].epsilon
    assert sampled == pytest.approx(plain, rel=0.01)


@pytest.mark.parametrize(
    "cohort", [["cohort=all"], ["cohort=poisson"], ["cohort=fixed_size", "cohort.size=3"]]
)
def test_record_level_takes_no_credit_for_the_sampling_of_clients(cohort: list[str]) -> None:
    """Poisson steps at the batch rate, 4 of each of the 30 rounds, against the plain library."""
    made = plan(*UNLIMITED, "training.noise_multiplier=1.5", "accountant=rdp", *cohort)
    plain = RdpAccountant()
    step = dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(1.5))
    plain.compose(step, 30 * 4)
    for row in made.guarantees(30):
        assert (row.unit, row.relation) == ("RECORD", "ADD_OR_REMOVE_ONE")
        assert row.epsilon == pytest.approx(plain.get_epsilon(1e-4), rel=1e-6)


# --- membership and cohort size stay hidden


PRIVATE_WORDS = (
    "seed", "answered", "absent", "cohort\":", "cohort_size\":[1-9]", "seconds", "duration",
    "bytes", "elapsed", "timestamp", "violation", "error", "clients\":",
)  # fmt: skip


def poisson_run(folder: Path, seed: int, *overrides: str) -> Watched:
    return watched_run(
        folder, *CENTRAL, "cohort=poisson", "cohort.sampling_rate=0.5", "run.num_rounds=4",
        "privacy.target_delta=1e-5", f"run.seed={seed}", *overrides, num_nodes=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watched, Watched]:
    """The same public settings; other cohorts, and in the second one clients that fail."""
    first = poisson_run(tmp_path_factory.mktemp("first") / "run", SEED)
    genuine = client_round.client_partition

    def partition(client: int, *rest: Any) -> ClientPartition:
        if client in (2, 5, 7):
            raise RuntimeError("the disk is full")
        return genuine(client, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_round, "client_partition", partition)
        second = poisson_run(tmp_path_factory.mktemp("second") / "run", SEED + 1)
    return first, second


def rounds(run: Watched) -> list[dict[str, Any]]:
    lines = [json.loads(x) for x in (run.folder / "operator.jsonl").read_text().splitlines()]
    return [x for x in lines if x["event"] == "round"]


def public_values(run: Watched) -> dict[str, Any]:
    """Everything public but what noise and the run's identity decide."""
    results = run.results
    for row in [*results["history"], results["final"]]:
        for name in ("accuracy", "loss"):
            row[name] = None
    results["ledger"]["head"] = ""
    table = (run.folder / "metrics.csv").read_text().splitlines()
    with closing(sqlite3.connect(run.folder / "ledger.sqlite")) as connection:
        charges = connection.execute("SELECT seq, round, event FROM releases").fetchall()
        keys = connection.execute("SELECT key FROM meta ORDER BY key").fetchall()
        schema = connection.execute("SELECT sql FROM sqlite_master").fetchall()
    with safe_open(run.folder / "checkpoint.safetensors", framework="np") as file:
        metadata = dict(file.metadata())
        shapes = {name: file.get_tensor(name).shape for name in sorted(file.keys())}
    history = json.loads(metadata.pop("history"))
    del metadata["ledger_head"]
    report = re.sub(r"head `\w+`", "head", (run.folder / "privacy_report.md").read_text())
    report = re.sub(r"- metrics: accuracy [\d.]+, loss [\d.]+ on", "- metrics on", report)
    return {
        "results": results,
        "columns": table[0],
        "table": [[x for i, x in enumerate(line.split(",")) if i not in (1, 2)] for line in table],
        "charges": charges,
        "ledger": (keys, schema),
        "checkpoint": (metadata, shapes, [{**r, "accuracy": 0, "loss": 0} for r in history]),
        "report": report,
        "config": yaml.safe_load((run.folder / "config.yaml").read_text()),
    }


def test_public_files_do_not_depend_on_who_was_sampled_and_who_answered(
    two_runs: tuple[Watched, Watched],
) -> None:
    first, second = two_runs
    cohorts = [[(r["cohort"], r["answered"]) for r in rounds(run)] for run in two_runs]
    assert cohorts[0] != cohorts[1]
    assert any(r["absent"] for r in rounds(second))
    assert public_values(first) == public_values(second)


def test_public_files_are_these_and_hold_expected_values_only(
    two_runs: tuple[Watched, Watched],
) -> None:
    for run in two_runs:
        assert {p.name for p in run.folder.iterdir()} == PUBLIC_FILES | {"operator.jsonl"}
        assert {row["cohort_expected"] for row in run.results["history"]} == {5.0}
        for row in run.results["history"]:
            assert set(row) == {
                "round", "accuracy", "loss", "epsilon", "cohort_expected", "clipping_norm",
                "noise_std_of_sum",
            }  # fmt: skip


def test_neither_seed_nor_names_of_private_facts_are_in_a_public_file(
    two_runs: tuple[Watched, Watched],
) -> None:
    stated = ("seeded_noise", "come from run.seed, which the adversary neither knows")
    for run in two_runs:
        for name in PUBLIC_FILES:
            content = (run.folder / name).read_bytes()
            for number in (SEED, SEED + 1):
                assert str(number).encode() not in content, name
            if name in ("model.safetensors", "curves.png"):
                continue
            text = content.decode("utf-8", "replace")
            for allowed in stated:
                text = text.replace(allowed, "")
            if name in ("results.json", "metrics.csv", "config.yaml", "ledger.sqlite"):
                text = re.sub(r"amplification by Poisson sampling[^\n]*", "", text)
                for word in PRIVATE_WORDS:
                    assert not re.search(word, text, re.IGNORECASE), (name, word)


def test_only_the_operator_may_read_what_really_happened(
    two_runs: tuple[Watched, Watched],
) -> None:
    for run, seed in zip(two_runs, (SEED, SEED + 1), strict=True):
        path = run.folder / "operator.jsonl"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert json.loads(path.read_text().splitlines()[0])["seed"] == seed
        assert len(rounds(run)) == 4


def test_a_stated_amplification_names_what_must_stay_hidden(
    two_runs: tuple[Watched, Watched],
) -> None:
    (row,) = [g for g in two_runs[0].results["privacy"]["guarantees"] if g["epsilon"] is not None]
    text = " ".join(row["assumptions"])
    assert "how many, stays hidden from the observer" in text
    assert "run.seed, which the adversary neither knows nor guesses" in text


def test_a_resumed_run_keeps_the_operators_file_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fl_app.server_run import load_settings

    spoil_client(monkeypatch, 0, "empty")
    run = poisson_run(tmp_path / "run", SEED, "run.stop_after=2")
    settings = load_settings([f"run.resume={run.folder}"], lambda: tmp_path)
    resumed = watched_run(run.folder, settings=settings, num_nodes=3)
    assert stat.S_IMODE((run.folder / "operator.jsonl").stat().st_mode) == 0o600
    assert len(rounds(resumed)) == 4
    assert str(SEED) not in (run.folder / "config.yaml").read_text()
