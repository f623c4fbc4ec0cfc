"""A plug-in is one file and one yaml of the same name; both are found by listing the folder."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import yaml

from fl_app import plugins
from fl_app.errors import SettingsError
from fl_app.overrides import CONF_DIR, compose_mapping

INTERFACES = {
    "dataset": plugins.Dataset,
    "partition": plugins.Partitioner,
    "model": plugins.Model,
    "training": plugins.Training,
    "mechanism": plugins.Mechanism,
    "protection": plugins.Protection,
    "accountant": plugins.Accountant,
    "engine": plugins.Engine,
    "cohort": plugins.Cohort,
    "server_optimizer": plugins.ServerOptimizer,
}
PLUGINS = [(group, kind) for group in plugins.PACKAGES for kind in plugins.kinds(group)]
YAMLS = [
    (p.parent.name, p) for g in plugins.PACKAGES for p in sorted((CONF_DIR / g).glob("*.yaml"))
]


def values_of(path: Path) -> dict[str, object]:
    values = yaml.safe_load(path.read_text())
    values.pop("defaults", None)
    return values


def test_every_kind_has_an_interface_and_at_least_one_plugin() -> None:
    assert set(INTERFACES) == set(plugins.PACKAGES)
    assert {group for group, _ in PLUGINS} == set(plugins.PACKAGES)


@pytest.mark.parametrize(("group", "kind"), PLUGINS)
def test_plugin_is_a_frozen_dataclass_of_its_interface(group: str, kind: str) -> None:
    cls = plugins.load(group, kind)
    assert issubclass(cls, INTERFACES[group])
    assert not inspect.isabstract(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert cls.__doc__


@pytest.mark.parametrize(("group", "kind"), PLUGINS)
def test_plugin_has_a_yaml_of_the_same_name_with_exactly_its_keys(group: str, kind: str) -> None:
    values = values_of(CONF_DIR / group / f"{kind}.yaml")
    assert values.pop("kind") == kind
    assert set(values) == {f.name for f in dataclasses.fields(plugins.load(group, kind))}


@pytest.mark.parametrize(("group", "path"), YAMLS, ids=lambda v: getattr(v, "stem", v))
def test_yaml_names_an_existing_plugin(group: str, path: Path) -> None:
    assert values_of(path)["kind"] in plugins.kinds(group)


@pytest.mark.parametrize(("group", "path"), YAMLS, ids=lambda v: getattr(v, "stem", v))
def test_shipped_yaml_composes_and_passes_its_own_checks(group: str, path: Path) -> None:
    section = compose_mapping([f"{group}={path.stem}"])[group]
    if path.stem == "hub_image":
        section["hub_id"] = "someone/images"
    assert plugins.build(group, section).kind == section["kind"]


def test_unknown_kind_names_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match=r"cohort\.kind=poison: .*did you mean poisson"):
        plugins.build("cohort", {"kind": "poison"})
