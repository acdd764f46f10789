"""One number against one gate: passed or not, and why."""

from __future__ import annotations

import math

from lm_eval_locos.gates.gate import POINTS, Gate
from lm_eval_locos.gates.records import Number
from lm_eval_locos.reporting.board import UNPAIRED
from lm_eval_locos.statistics import FLOOR, Estimate


def verdict(gate: Gate, metric: str, number: Number) -> tuple[bool, str]:
    """Whether a number passes, and why not or what to know.

    Args:
        gate: the threshold.
        metric: the gate's, without the task's name.
        number: of one row.
    """
    estimate = number.estimate
    if number.bundled and not gate.allow_bundled:
        return False, (
            "from the package's small sample, not the benchmark. Run with LOCOS_DATA=hub, or set "
            "allow_bundled = true."
        )
    if number.broken:
        return False, number.broken
    if estimate.value is None or not math.isfinite(estimate.value):
        return False, estimate.reason or "undefined, because the specificity is."
    if number.undefined and not gate.allow_undefined:
        return False, number.undefined
    if metric == "controls_held":
        return _held(gate, estimate, number.remark)
    value = low = high = estimate.value
    bound = gate.judge == "bound" and metric not in POINTS
    if bound:
        interval = estimate.interval
        if interval is None:
            return False, _without_interval(estimate)
        if abs(interval.level - gate.level) > 1e-9:
            return False, (
                f"the file has an interval at {interval.level:g}, the gate asks for one at "
                f"{gate.level:g}. Set level = {interval.level:g}."
            )
        low, high = interval.low, interval.high
    if gate.effect is not None and (few := _too_few(estimate, gate.effect)):
        return False, few
    if gate.minimum is not None and low < gate.minimum:
        what = "the interval's lower end" if bound else "the value"
        more = _needed(estimate, value - gate.minimum) if bound else _seeds(number)
        return False, f"{what} {low:.4g} is below {gate.minimum:g}.{more}"
    if gate.maximum is not None and high > gate.maximum:
        what = "the interval's upper end" if bound else "the value"
        more = _needed(estimate, gate.maximum - value) if bound else _seeds(number, gate.maximum)
        return False, f"{what} {high:.4g} is above {gate.maximum:g}.{more}"
    return True, " ".join(filter(None, (number.undefined, number.remark)))


def _held(gate: Gate, drop: Estimate, remark: str | None) -> tuple[bool, str]:
    """Non-inferiority: the upper end of the control drop's 90% interval is below the margin."""
    if drop.reason and FLOOR in drop.reason:
        return False, f"{drop.reason} A control at its floor cannot be shown to hold."
    if drop.interval is None or drop.value is None:
        return False, _without_interval(drop)
    if drop.interval.high < gate.margin:
        return True, remark or ""
    return False, (
        f"the {drop.interval.level:.0%} interval's upper end {drop.interval.high:.4g} of the "
        f"control drop is not below {gate.margin:g}.{_needed(drop, gate.margin - drop.value)}"
    )


def _without_interval(estimate: Estimate) -> str:
    why = estimate.reason or UNPAIRED
    advice = " Run lm_eval with --log_samples." if UNPAIRED in why else ""
    return f"no interval, and a bound is judged: {why}{'' if why.endswith('.') else '.'}{advice}"


def _too_few(estimate: Estimate, effect: float) -> str | None:
    if estimate.detectable is None:
        return f"what effect the sample can show is not known: {_without_interval(estimate)}"
    if estimate.detectable <= effect:
        return None
    needed = estimate.documents_needed(effect)
    return (
        f"too few documents: {estimate.documents} show an effect of {estimate.detectable:.3g} with "
        f"power {estimate.power:g}; {effect:g} needs about {needed}{_in_clusters(estimate)}."
    )


def _in_clusters(estimate: Estimate) -> str:
    """More documents of the same needles or stories would not help."""
    if not 0 < estimate.clusters < estimate.documents:
        return ""
    return f", in as many more clusters ({estimate.clusters} here: needles, stories)"


def _needed(estimate: Estimate, room: float) -> str:
    """How many documents would do, where the value itself clears the threshold."""
    if room <= 0:
        return ""
    needed = estimate.documents_needed(room)
    if needed is None or needed <= estimate.documents:
        return ""
    return (
        f" Too few documents: the value {estimate.value:.4g} itself passes, but "
        f"{estimate.documents} do not show it. About {needed} would{_in_clusters(estimate)}, with "
        f"power {estimate.power:g}."
    )


def _seeds(number: Number, maximum: float | None = None) -> str:
    """For a random control so small that its p-value cannot pass."""
    if number.seeds is None or maximum is None or maximum <= 0:
        return ""
    if 1 / (1 + number.seeds) <= maximum:
        return ""
    return (
        f" With {number.seeds} random seeds it cannot be below {1 / (1 + number.seeds):.3g}: run "
        f"at least {math.ceil(1 / maximum - 1e-9) - 1}."
    )
