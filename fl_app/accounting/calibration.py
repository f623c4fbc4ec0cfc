"""From a target epsilon to the smallest noise multiplier that keeps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fl_app.accounting.simple import analytic_gaussian_epsilon
from fl_app.accounting.steps import loss_std, sensitivity_multiplier
from fl_app.errors import AccountingError
from fl_app.plugins import Accountant
from fl_app.privacy import PrivacyEvent

SMALLEST_NOISE_MULTIPLIER = 1e-2
LARGEST_NOISE_MULTIPLIER = 1e3
"""Of a calibrated run: with more noise nothing is learned, so its target is out of reach."""
RELATIVE_TOLERANCE = 1e-4
_LIMITS = (math.log(SMALLEST_NOISE_MULTIPLIER), math.log(LARGEST_NOISE_MULTIPLIER))
_GUESS_TOLERANCE = 1e-3
_FAR_STRIDE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One evaluation: log noise multiplier, and log(epsilon / target), which falls with it."""

    log_z: float
    excess: float


def calibrate(
    accountant: Accountant,
    make_events: Callable[[float], Mapping[PrivacyEvent, int]],
    target_epsilon: float,
    delta: float,
) -> float:
    """Returns the smallest noise multiplier z whose events stay within `target_epsilon`.

    Guarantee: ``accountant.epsilon(make_events(z), delta) <= target_epsilon`` for the returned z
        itself: it is one that was evaluated. It lies at most 1e-4 (relative) above the smallest
        such z, and is never below 0.01, where noise no longer protects anything.

    Args:
        accountant: the accountant that will also gate the run.
        make_events: the events of the whole run at a noise multiplier; more noise, less epsilon.
        target_epsilon: > 0, finite.
        delta: in (0, 1).

    Raises:
        AccountingError: no noise multiplier up to 1000 reaches the target, or an event is refused.
    """
    if not (math.isfinite(target_epsilon) and target_epsilon > 0):
        raise AccountingError(
            f"privacy.target_epsilon={target_epsilon}: must be a finite number > 0"
        )

    def evaluate(log_z: float) -> _Point:
        epsilon = accountant.epsilon(make_events(math.exp(log_z)), delta)
        ratio = epsilon / target_epsilon
        return _Point(log_z=log_z, excess=math.log(ratio) if ratio > 0 else -math.inf)

    low, high = _bracket(evaluate, _guess(make_events, target_epsilon, delta))
    if high is None:
        integers = any(event.shares is not None for event in make_events(1.0))
        remedy = ", raise mechanism.scale or mechanism.bits" if integers else ""
        raise AccountingError(_unreachable(accountant, target_epsilon, delta) + remedy)
    if low is None:
        return math.exp(high.log_z)
    return math.exp(_narrow(evaluate, low, high).log_z)


def _guess(
    make_events: Callable[[float], Mapping[PrivacyEvent, int]], target_epsilon: float, delta: float
) -> float:
    """Returns the log noise multiplier to begin with: exact without sampling, else near.

    The losses of all steps together are taken for those of one Gaussian (the central limit of Dong,
    Roth and Su 2019, arXiv:1905.02383), which costs no accounting. It only says where to begin.
    """

    def too_much(log_z: float) -> bool:
        events = make_events(math.exp(log_z))
        if any(e.noise_multiplier == 0 for e in events):
            return True
        variance = math.fsum(
            n * e.steps * loss_std(e.noise, sensitivity_multiplier(e), e.sampling_rate) ** 2
            for e, n in events.items()
        )
        return variance > 0 and analytic_gaussian_epsilon(variance**-0.5, delta) > target_epsilon

    low, high = _LIMITS
    while high - low > _GUESS_TOLERANCE:
        middle = (low + high) / 2
        low, high = (middle, high) if too_much(middle) else (low, middle)
    return high


def _bracket(
    evaluate: Callable[[float], _Point], first: float
) -> tuple[_Point | None, _Point | None]:
    """Returns a point above the target and one within, near `first` if the target is met there.

    The first is None if even the smallest multiplier is within, the second if the largest is not.
    """
    point = evaluate(first)
    direction, stride = (1 if point.excess > 0 else -1), _first_stride(point.excess)
    while True:
        log_z = min(max(point.log_z + direction * stride, _LIMITS[0]), _LIMITS[1])
        if log_z == point.log_z:
            return (point, None) if direction > 0 else (None, point)
        after = evaluate(log_z)
        if (after.excess > 0) != (point.excess > 0):
            return (point, after) if direction > 0 else (after, point)
        point, stride = after, stride * 2


def _first_stride(excess: float) -> float:
    """Returns how far to go for the other side: epsilon mostly falls like 1/z to 1/z^2."""
    if not math.isfinite(excess):
        return _FAR_STRIDE
    return min(max(abs(excess), 2 * RELATIVE_TOLERANCE), _FAR_STRIDE)


def _narrow(evaluate: Callable[[float], _Point], low: _Point, high: _Point) -> _Point:
    """Returns the upper end after shrinking the bracket to the tolerance (secant, else halving).

    The secant's aim is moved a little, to either side in turn, so that both ends come along; every
    third step halves, which bounds the number of evaluations.
    """
    step = 0
    while high.log_z - low.log_z > RELATIVE_TOLERANCE:
        width = high.log_z - low.log_z
        share = 0.5
        if step % 3 != 2 and math.isfinite(low.excess) and math.isfinite(high.excess):
            share = low.excess / (low.excess - high.excess)
            margin = 0.4 * RELATIVE_TOLERANCE / width
            share = min(max(share + (margin if step % 2 == 0 else -margin), margin), 1 - margin)
        middle = evaluate(low.log_z + share * width)
        low, high = (middle, high) if middle.excess > 0 else (low, middle)
        step += 1
    return high


def _unreachable(accountant: Accountant, target_epsilon: float, delta: float) -> str:
    return (
        f"privacy.target_epsilon={target_epsilon}: not reached by accountant={accountant.kind} at "
        f"delta={delta} with any noise multiplier up to {LARGEST_NOISE_MULTIPLIER:g}; raise "
        "privacy.target_epsilon or privacy.target_delta, or lower run.num_rounds, the local steps "
        "or the sampling rate"
    )
