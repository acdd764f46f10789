"""What a gate is: a threshold on a reported number, and which rows it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

POINTS = ("p_random", "random_specificity")
"""Numbers that have no interval by their nature: judged as they are."""
WHOLE = ("specificity", "retrieval_drop", "control_drop", "controls_held", *POINTS)
PARTS = ("drop", "difference", "baseline", "ablated")
KNOWN = (
    f"{', '.join(WHOLE)}, FAMILY_{', FAMILY_'.join(PARTS)} (such as nolima_drop) or TASK:METRIC "
    "(such as nolima:contains)"
)
JUDGES = ("bound", "point")


@dataclass(frozen=True)
class Gate:
    """One threshold.

    Attributes:
        metric: see `KNOWN`.
        name: shown in tables and JUnit.
        minimum: the least it may be, or None.
        maximum: the most it may be, or None.
        judge: "bound", the end of the interval that is nearer to failing, or "point", the value.
        level: confidence of the interval.
        margin: of controls_held.
        effect: largest minimum detectable effect that the sample may have, or None.
        model: pattern that a row's model has to match, or None for every row; as are the next.
        ranking: pattern for the ranking's method, path or file name.
        condition: pattern for the condition ("top:20") or its kind ("top").
        k: number of heads ablated.
        allow_bundled: whether numbers from the package's sample count.
        allow_undefined: whether a mean over families may leave out those at their floor.
    """

    metric: str
    name: str = ""
    minimum: float | None = None
    maximum: float | None = None
    judge: str = "bound"
    level: float = 0.95
    margin: float = 0.05
    effect: float | None = None
    model: str | None = None
    ranking: str | None = None
    condition: str | None = None
    k: int | None = None
    allow_bundled: bool = False
    allow_undefined: bool = False

    @property
    def threshold(self) -> str:
        """The threshold as text."""
        if self.metric == "controls_held":
            return f"margin {self.margin:g}"
        ends = ((">=", self.minimum), ("<=", self.maximum))
        return " and ".join(f"{sign} {end:g}" for sign, end in ends if end is not None)


@dataclass(frozen=True)
class GateFile:
    """All gates of a file.

    Attributes:
        path: of the file.
        gates: one or more, with names that differ.
        metrics: metric by family that drops are computed from; by default a task's first.
    """

    path: str
    gates: tuple[Gate, ...]
    metrics: Mapping[str, str] = field(default_factory=dict)
