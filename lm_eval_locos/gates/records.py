"""What the task ``locos_specificity`` wrote into a results file, as numbers with intervals.

The statistics are in ``configs.TASK.metadata.locos_specificity.statistics``, in the form of
`lm_eval_locos.statistics.SpecificityResult.as_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_eval_locos.errors import DataError
from lm_eval_locos.reporting.results import Task, known_form
from lm_eval_locos.reporting.text import SIDES, number, title
from lm_eval_locos.statistics import FLOOR, Estimate, Interval

UNDEFINED = (
    "{}: undefined, the baseline is at its floor, so the mean leaves it out. Drop the family from "
    "the run, or set allow_undefined = true."
)


@dataclass(frozen=True)
class Number:
    """A reported number.

    Attributes:
        estimate: value, interval and what the sample can detect.
        bundled: whether it is from the package's sample.
        broken: why it may not be used at all, or None.
        undefined: which families a mean had to leave out, or None.
        seeds: of the random control.
        remark: what to know of a number that passes, or None.
    """

    estimate: Estimate
    bundled: bool
    broken: str | None = None
    undefined: str | None = None
    seeds: int | None = None
    remark: str | None = None


def skipped(counts: Mapping[str, Any]) -> str | None:
    """What to know where documents were skipped (too long, ``on_overlength=skip``), by family."""
    listed = [f"{count} of {title(family)}" for family, count in counts.items() if count]
    return f"Skipped documents do not count: {', '.join(listed)}." if listed else None


def recorded(
    task: Task, record: Mapping[str, Any], reported: Mapping[str, Any], path: str
) -> dict[str, Number]:
    """The numbers of a ``locos_specificity`` task by metric.

    Args:
        task: as read.
        record: what it wrote into its metadata; {} for a version that wrote nothing.
        reported: its line in the file's ``results``, NaN included.
        path: of the file, for messages.

    Raises:
        DataError: statistics that are not of the known form.
    """
    with known_form(f"{path}: the statistics of {task.name} have a form"):
        return _recorded(task, record, reported, path)


def _recorded(
    task: Task, record: Mapping[str, Any], reported: Mapping[str, Any], path: str
) -> dict[str, Number]:
    statistics = record.get("statistics") or {}
    left_out = record.get("skipped") or {}
    missing = [family for family in record.get("missing") or () if family in SIDES]
    values = {key.partition(",")[0]: value for key, value in reported.items() if "," in key}
    plain = Estimate(None, reason="the results file has no statistics, only numbers: run it again.")

    found: dict[str, Number] = {}

    def put(name: str, estimate: Estimate | None, **more: Any) -> None:
        if name not in values:
            return
        value = number(values[name])
        broken = more.pop("broken", None)
        if estimate is None:
            estimate = Estimate(value, reason=plain.reason)
        if isinstance(values[name], float) and value is None:
            broken = f"{name} is {values[name]} in {path}, not a finite number."
        elif not _agree(value, estimate.value):
            broken = (
                f"{path} contradicts itself: {name} is {values[name]} among the results and "
                f"{estimate.value} among the statistics. Was it edited?"
            )
        here = {f: n for f, n in left_out.items() if not name.startswith(tuple(SIDES)) or f in name}
        found[name] = Number(estimate, task.bundled, broken, remark=skipped(here), **more)

    families = statistics.get("families") or {}
    floor = [name for name, one in families.items() if one.get("status") == FLOOR]
    lacking = None
    if missing:
        lacking = f"no document of {', '.join(map(title, missing))} was scored."
    for name, sides in (
        ("retrieval_drop", ("retrieval",)),
        ("control_drop", ("control",)),
        ("specificity", ("retrieval", "control")),
    ):
        left = [title(family) for family in floor if SIDES.get(family) in sides]
        here = any(SIDES[family] in sides for family in missing)
        put(
            name,
            _estimate(statistics.get(name)),
            broken=lacking if here else None,
            undefined=UNDEFINED.format(", ".join(left)) if left else None,
        )
    for family in {name.rpartition("_")[0] for name in values if name.endswith("_ablated")}:
        one = families.get(family) or {}
        for name, key in (("baseline", "baseline"), ("ablated", "condition"), ("drop", "drop")):
            put(f"{family}_{name}", _estimate(one.get(key)))
        if difference := _estimate(one.get("difference")):
            found[f"{family}_difference"] = Number(difference, task.bundled)
    if "controls_held" in values:
        drop = _estimate((statistics.get("controls") or {}).get("drop")) or plain
        control = any(SIDES[family] == "control" for family in missing)
        found["controls_held"] = Number(drop, task.bundled, lacking if control else None)
        if isinstance(values["controls_held"], float) and number(values["controls_held"]) is None:
            put("controls_held", drop)
    random = statistics.get("random") or {}
    for name, key in (("p_random", "p"), ("random_specificity", "specificity")):
        reason = None if random else "there is no random control (random_seeds=0)."
        estimate = Estimate(number(random.get(key)), reason=reason) if statistics else None
        put(name, estimate, seeds=random.get("seeds"))
    return found


def _agree(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= 1e-6


def _estimate(found: Mapping[str, Any] | None) -> Estimate | None:
    if found is None:
        return None
    ends = found["interval"]
    interval = None
    if ends is not None:
        low, high, level = (number(ends[key]) for key in ("low", "high", "level"))
        if low is None or high is None or level is None:
            raise DataError(f"an interval without ends: {ends}")
        interval = Interval(low, high, level, str(ends["method"]))
    return Estimate(
        number(found["value"]),
        interval,
        number(found["standard_error"]),
        number(found["detectable"]),
        int(found["documents"]),
        float(found["power"]),
        found["reason"],
        int(found.get("clusters") or 0),  # records of earlier versions have neither
        bool(found.get("constant")),
    )
