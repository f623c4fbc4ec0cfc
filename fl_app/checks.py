"""Checks of single values and the building of checked dataclasses from plain mappings.

A check returns the value it was given or raises `SettingsError` with a text of the form
``key=value: what is allowed; what to do``.
"""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from fl_app.errors import SettingsError

T = TypeVar("T")

NOISE_MULTIPLIERS = (1e-3, 1e6)
"""The least and the most noise that accountants are exact at."""
CLIPPING_NORMS = (1e-6, 1e6)
"""The least and the largest C: where float32 clips exactly."""


def fail(key: str, value: object, allowed: str, remedy: str = "") -> SettingsError:
    """Returns (does not raise) the error for ``key=value``; `allowed` and `remedy` are phrases."""
    shown = "null" if value is None else value
    return SettingsError(f"{key}={shown}: {allowed}" + (f"; {remedy}" if remedy else ""))


def number(key: str, value: object, remedy: str = "") -> float:
    """Returns `value` if it is a finite int or float (not a bool)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise fail(key, value, "must be a finite number", remedy)
    return value


def positive(key: str, value: object, remedy: str = "") -> float:
    """Returns `value` if it is finite and > 0."""
    if number_or_none(value) is None or typing.cast(float, value) <= 0:
        raise fail(key, value, "must be a finite number > 0", remedy)
    return typing.cast(float, value)


def non_negative(key: str, value: object, remedy: str = "") -> float:
    """Returns `value` if it is finite and >= 0."""
    if number_or_none(value) is None or typing.cast(float, value) < 0:
        raise fail(key, value, "must be finite and >= 0", remedy)
    return typing.cast(float, value)


def noise_multiplier(key: str, value: object) -> float:
    """Returns `value` if it is 0, or from 0.001 to 1,000,000: where accountants are exact."""
    number = number_or_none(value)
    least, most = NOISE_MULTIPLIERS
    if number is None or not (number == 0 or least <= number <= most):
        allowed = "must be finite and >= 0: 0, or a number from 0.001 to 1000000"
        raise fail(key, value, allowed, "set 0 for no noise, or null to calibrate it")
    return number


def clipping_norm(key: str, value: object) -> float:
    """Returns `value` if it is from 0.000001 to 1,000,000: where float32 clips exactly."""
    number, (least, largest) = number_or_none(value), CLIPPING_NORMS
    if number is None or not least <= number <= largest:
        raise fail(key, value, "must be a finite number > 0, from 0.000001 to 1000000")
    return number


def open_unit(key: str, value: object, remedy: str = "") -> float:
    """Returns `value` if it lies strictly between 0 and 1."""
    if number_or_none(value) is None or not 0 < typing.cast(float, value) < 1:
        raise fail(key, value, "must lie strictly between 0 and 1", remedy)
    return typing.cast(float, value)


def rate(key: str, value: object, remedy: str = "") -> float:
    """Returns `value` if it is a probability in (0, 1]."""
    if number_or_none(value) is None or not 0 < typing.cast(float, value) <= 1:
        raise fail(key, value, "must be a rate > 0 and <= 1", remedy)
    return typing.cast(float, value)


def at_least(key: str, value: object, smallest: int, remedy: str = "") -> int:
    """Returns `value` if it is an int >= `smallest` (a bool is not an int here)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise fail(key, value, f"must be a whole number >= {smallest}", remedy)
    return value


def one_of(key: str, value: object, allowed: Iterable[str], remedy: str = "") -> str:
    """Returns `value` if it is one of `allowed`, else names the nearest one."""
    choices = sorted(allowed)
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}?" if near else remedy
        raise fail(key, value, f"must be one of {', '.join(choices)}", hint)
    return value


def number_or_none(value: object) -> float | None:
    """Returns `value` as it is if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def build(cls: type[T], section: str, values: Mapping[str, Any]) -> T:
    """Returns `cls(**values)` with every key known, given and of the declared type.

    Args:
        cls: a dataclass whose annotations are bool, int, float, str, None, or unions or tuples of
            them.
        section: the name that the user sees in front of each key, e.g. ``training``.
        values: plain values by key, as they come out of a YAML file.

    Raises:
        SettingsError: unknown key (with the nearest known one), missing key, or wrong type.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {section}.{near[0]}?" if near else "remove it"
            allowed = f"unknown key; {section} has {', '.join(sorted(known))}"
            raise fail(f"{section}.{key}", value, allowed, hint)
    for name, field in known.items():
        needed = field.default is MISSING and field.default_factory is MISSING
        if name not in values and needed:
            raise fail(f"{section}.{name}", "(missing)", "must be given", f"set {section}.{name}")
    converted = {k: _convert(f"{section}.{k}", v, hints[k]) for k, v in values.items()}
    return cls(**converted)


def _convert(key: str, value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    options = typing.get_args(hint) if _is_union(hint) else (hint,)
    for option in options:
        if (result := _as_type(key, value, option)) is not MISSING:
            return result
    names = " or ".join(_type_name(option) for option in options)
    raise fail(key, value, f"must be {names}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _as_type(key: str, value: Any, hint: Any) -> Any:
    """Returns `value` as `hint`, or MISSING if it is not of that type."""
    if hint is type(None):
        return None if value is None else MISSING
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            return MISSING
        item = typing.get_args(hint)[0]
        return tuple(_convert(f"{key}[{i}]", v, item) for i, v in enumerate(value))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (bool, int, float, str):
        matches = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
        return value if matches else MISSING
    return MISSING


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is tuple:
        return f"a list of {_type_name(typing.get_args(hint)[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return names.get(hint, "null")
