"""From Hydra overrides to settings: composes ``conf/`` and explains what Hydra refuses."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fl_app import checks, plugins
from fl_app.errors import SettingsError
from fl_app.settings import Settings

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"


def compose(overrides: Sequence[str]) -> Settings:
    """Returns the settings of ``conf/`` with Hydra `overrides` applied.

    Raises:
        SettingsError: an override that Hydra or a check refuses.
    """
    return Settings.from_mapping(compose_mapping(overrides))


def compose_mapping(overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the plain nested values of ``conf/`` with Hydra `overrides` applied."""
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _GROUPS:
            _check_choice(key, value)
    try:
        values = _hydra_values(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, overrides) from error
    if not isinstance(values, dict):
        raise SettingsError(f"{CONF_DIR}: config.yaml must be a mapping")
    return {str(k): v for k, v in values.items() if k != "experiment"}


def check_sweep(arguments: Sequence[str]) -> None:
    """Returns if every choice and every key of a multirun's `arguments` is known.

    Raises:
        SettingsError: one is not, or Hydra cannot read it.
    """
    words = [argument for argument in arguments if not argument.startswith("-")]
    try:
        parsed = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise _explain(error, words) from error
    first: list[str] = []
    for override, text in zip(parsed, words, strict=True):
        key = override.key_or_group
        if key.startswith(("hydra.", "hydra/")):
            continue
        if not override.is_sweep_override():
            first.append(text)
        elif override.is_discrete_sweep():  # else an interval, which some sweepers understand
            values = list(override.sweep_string_iterator())
            for value in values if key in _GROUPS else ():
                _check_choice(key, value)
            first.append(f"{key}={values[0]}")
    compose_mapping(first)


def _check_choice(group: str, choice: str) -> None:
    """Raises SettingsError unless `choice` names a file of the group; Hydra lets some others by."""
    known = sorted(path.stem for path in (CONF_DIR / group).glob("*.yaml"))
    if choice == "null" and group == "experiment":
        raise checks.fail(group, choice, "is what it is without it", "leave it out")
    checks.one_of(group, choice, known)


def _hydra_values(overrides: Sequence[str]) -> Any:
    """Returns what Hydra composes; raises what Hydra raises."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF_DIR), version_base=None):
        config = hydra_compose("config", overrides=list(overrides))
        return OmegaConf.to_container(config, resolve=True)


_REFUSED = ("$", "\\", "_target_")
_GROUPS = (*plugins.PACKAGES, "experiment")
_VALUE_OVERRIDE = re.compile(r"[a-z][a-z0-9_.]*=[^=].*|[a-z][a-z0-9_.]*=")


def split_run_config(text: str) -> list[str]:
    """Returns the Hydra overrides in the ``overrides`` entry of a Flower run config.

    They travel to other people's machines, so only changes of values and choices are accepted.

    Raises:
        SettingsError: anything else (additions, deletions, interpolation, ``_target_``,
            ``hydra.*``).
    """
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise checks.fail("overrides", text, f"cannot be split: {error}", "check quotes") from error
    for part in parts:
        key, _, value = part.partition("=")
        bad = any(mark in part for mark in _REFUSED) or key.split(".")[0] == "hydra"
        # A choice names a file of conf/: never a path.
        bad = bad or (key in _GROUPS and not re.fullmatch(r"[a-z0-9_]+", value))
        if bad or not _VALUE_OVERRIDE.fullmatch(part):
            raise checks.fail(
                "overrides",
                part,
                "only key=value changes of known keys are accepted from a run config",
                'write for example overrides="dataset=mnist run.num_rounds=20"',
            )
    return parts


def _explain(error: Exception, overrides: Sequence[str]) -> SettingsError:
    """Returns Hydra's refusal as one of ours, naming the override and the nearest known key."""
    text = str(error)
    known = _known_keys(overrides)
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        refused = "Could not override" in text or "is not in struct" in text
        if refused and key not in known and key in text:
            dotted = [k for k in known if ("." in k) == ("." in key)]
            near = difflib.get_close_matches(key, dotted, n=1)
            tails = [k for k in known if k.rpartition(".")[2] == key.rpartition(".")[2]]
            guess = near or tails
            hint = f"did you mean {guess[0]}?" if guess else "see conf/config.yaml for all keys"
            return checks.fail(key, value, "unknown key", hint)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return SettingsError("overrides: " + " ".join(lines))


def _known_keys(overrides: Sequence[str]) -> list[str]:
    """Returns every dotted key under the group choices in `overrides`, and every group name.

    The names alone if the choices themselves cannot be composed.
    """

    def walk(prefix: str, node: Any) -> list[str]:
        if not isinstance(node, Mapping):
            return [prefix]
        return [k for name, sub in node.items() for k in walk(f"{prefix}.{name}", sub)]

    choices = [o for o in overrides if o.partition("=")[0] in _GROUPS]
    try:
        keys = walk("", _hydra_values(choices))
    except (HydraException, OmegaConfBaseException):
        keys = []
    return [k[1:] for k in keys] + [*plugins.PACKAGES, "experiment"]
