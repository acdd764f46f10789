"""From the scores of one run of `locos_specificity` to the numbers in the harness's table.

>>> record = {"id": "a", "family": "nolima", "cluster": "a",
...           "scores": {"baseline": 1.0, "top:5": 0.0, "layer-random:5:0": 1.0}}
>>> found = summarise([record], ["nolima", "parametric"], list(record["scores"]))
>>> found.numbers["nolima_drop"], found.numbers["specificity"], found.missing
(1.0, 'N/A', ('parametric',))

A record is what the task keeps of a document; a score is None where the request was skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lm_eval_locos.specificity_plan import MEMBERS

if TYPE_CHECKING:
    from lm_eval_locos.statistics import Estimate, SpecificityResult

UNDEFINED = "N/A"
"""In place of a number that is not defined. The harness writes the same for a missing standard
error; a NaN would make the results file invalid JSON."""

Number = float | int | str


def metrics(families: Sequence[str]) -> dict[str, bool | None]:
    """The names of all numbers in the order of computation, and whether higher is better.

    The harness shows ``X_stderr`` in the ± column of ``X`` where it comes after ``X``.
    """
    wanted: dict[str, bool | None] = {
        "specificity": True,
        "specificity_stderr": None,
        "retrieval_drop": True,
        "retrieval_drop_stderr": None,
        "control_drop": False,
        "control_drop_stderr": None,
        "controls_held": True,
        "random_specificity": None,
        "p_random": False,
    }
    for family in families:
        retrieves = MEMBERS[family].side == "retrieval"
        for name, better in (("baseline", True), ("ablated", None), ("drop", retrieves)):
            wanted |= {f"{family}_{name}": better, f"{family}_{name}_stderr": None}
    return wanted


@dataclass(frozen=True)
class Summary:
    """The statistics of a run.

    Attributes:
        result: None where no document was scored.
        numbers: every name of `metrics`, with a float, 0 or 1 (``controls_held``) or `UNDEFINED`.
        documents: scored under every condition, by family.
        skipped: left out because the prompt did not fit under some condition, by family.
        missing: families without a scored document; controls do not count as held without them.
        changed: documents whose answer differs from the baseline's under some condition.
    """

    result: SpecificityResult | None
    numbers: Mapping[str, Number]
    documents: Mapping[str, int]
    skipped: Mapping[str, int]
    missing: tuple[str, ...]
    changed: int

    def as_dict(self) -> dict[str, Any]:
        """For the results file: finite numbers, None, text, dicts and lists."""
        return {
            "documents": dict(self.documents),
            "skipped": dict(self.skipped),
            "missing": list(self.missing),
            "documents_with_another_answer": self.changed,
            "controls_held": bool(self.numbers["controls_held"]),
            "statistics": self.result.as_dict() if self.result else None,
        }

    def remarks(self) -> list[str]:
        """What qualifies the numbers and a table cannot say."""
        found = [f"{family}: no document was scored." for family in self.missing]
        found += [f"{family}: {n} documents skipped." for family, n in self.skipped.items() if n]
        if sum(self.documents.values()) and not self.changed:
            found.append(
                "no answer changed under any condition. Either these heads do nothing here, or the "
                "model ignores conditions (only --model locos-ablated honours them)."
            )
        if self.result and self.result.specificity.reason:
            found.append(f"specificity: {self.result.specificity.reason}")
        if self.result and self.result.controls.reason:
            found.append(f"controls_held: {self.result.controls.reason}")
        return found


def summarise(
    records: Sequence[Mapping[str, Any]], families: Sequence[str], conditions: Sequence[str]
) -> Summary:
    """The statistics over the documents that have a score under every condition.

    Args:
        records: ``id``, ``family``, ``cluster``, ``scores`` by condition, and ``changed``.
        families: those that were asked for.
        conditions: the baseline, the heads in question, and any random controls.
    """
    # Scipy is slow to import, and the harness imports this module to read a YAML file.
    from lm_eval_locos.statistics import FamilyScores, specificity

    baseline, ablated, *random = conditions
    # Processes and limits may give another order; the statistics shall not depend on it.
    records = sorted(records, key=lambda record: (record["family"], record["id"]))
    scored = [r for r in records if all(r["scores"][c] is not None for c in conditions)]
    rows = {family: [r for r in scored if r["family"] == family] for family in families}
    asked = {family: sum(r["family"] == family for r in records) for family in families}
    kept = {family: found for family, found in rows.items() if found}
    missing = tuple(family for family in families if family not in kept)

    def scores(family: str, condition: str) -> list[float]:
        return [record["scores"][condition] for record in kept[family]]

    result = None
    if kept:
        result = specificity(
            {
                family: FamilyScores(
                    scores(family, baseline),
                    scores(family, ablated),
                    clusters=[record["cluster"] for record in kept[family]],
                    side=MEMBERS[family].side,
                    floor=MEMBERS[family].floor,
                )
                for family in kept
            },
            random=[{family: scores(family, c) for family in kept} for c in random],
        )
    return Summary(
        result,
        _numbers(result, families, missing),
        {family: len(found) for family, found in rows.items()},
        {family: asked[family] - len(rows[family]) for family in families},
        missing,
        sum(bool(record.get("changed")) for record in scored),
    )


def _numbers(
    result: SpecificityResult | None, families: Sequence[str], missing: Sequence[str]
) -> dict[str, Number]:
    numbers: dict[str, Number] = dict.fromkeys(metrics(families), UNDEFINED) | {"controls_held": 0}
    if result is None:
        return numbers

    def put(name: str, found: Estimate) -> None:
        numbers[name] = _shown(found.value)
        numbers[f"{name}_stderr"] = _shown(None if found.value is None else found.standard_error)

    for name in ("specificity", "retrieval_drop", "control_drop"):
        put(name, getattr(result, name))
    # A control family that nobody measured did not hold.
    whole = not any(MEMBERS[family].side == "control" for family in missing)
    numbers["controls_held"] = int(result.controls_held and whole)
    numbers["random_specificity"] = _shown(result.random_specificity)
    numbers["p_random"] = _shown(result.p_random)
    for family, one in result.families.items():
        put(f"{family}_baseline", one.baseline)
        put(f"{family}_ablated", one.condition)
        put(f"{family}_drop", one.drop)
    return numbers


def _shown(value: float | None) -> Number:
    return UNDEFINED if value is None else float(value)
