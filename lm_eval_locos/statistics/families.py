"""One family's scores on the same documents, and its sums per cluster.

    >>> scores = FamilyScores([1, 1, 0], [1, 0, 0], clusters=["a", "a", "b"])
    >>> scores.table[:, :4]          # a row a cluster: documents, baseline, condition, difference
    array([[2., 2., 1., 1.],
           [1., 0., 0., 0.]])

Every statistic of this package is a ratio of two of these columns' totals, which is why resampling
clusters never has to touch a document.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lm_eval_locos.errors import DataError

Floats = NDArray[np.float64]
Side = Literal["retrieval", "control"]
SIDES: tuple[Side, ...] = ("retrieval", "control")

N, BASELINE, CONDITION, DIFFERENCE, LOSS, GAIN = range(6)
"""Columns of a family's table; LOSS and GAIN are the parts of DIFFERENCE that fell and rose."""


@dataclass(frozen=True, eq=False)
class FamilyScores:
    """Scores of one task family under the baseline and under a condition.

    Attributes:
        baseline: (n,), a score per document in [0, ceiling]; booleans count as 0 and 1.
        condition: (n,), the same documents in the same order.
        clusters: (n,) labels; documents with one label (a needle, a story) are drawn together.
            None makes every document its own cluster.
        side: "retrieval" or "control".
        floor: the score that needs no ability (chance); a baseline not above it gives no ratio.
        ceiling: the highest possible score.

    Raises:
        DataError: no documents, lengths that differ, a score that is not a number in [0, ceiling],
            an unknown side.
    """

    baseline: ArrayLike
    condition: ArrayLike
    clusters: Sequence[Hashable] | NDArray[Any] | None = None
    side: Side = "retrieval"
    floor: float = 0.0
    ceiling: float = 1.0

    def __post_init__(self) -> None:
        if self.side not in SIDES:
            raise DataError(f"side={self.side!r}: expected 'retrieval' or 'control'.")
        if not 0 <= self.floor < self.ceiling < np.inf:
            raise DataError(
                f"floor={self.floor}, ceiling={self.ceiling}: expected 0 <= floor < ceiling, "
                "for example 0 and 1."
            )
        for name in ("baseline", "condition"):
            object.__setattr__(self, name, self.checked(getattr(self, name), name))
        documents = len(self.baseline)
        for name, found in (("condition", self.condition), ("clusters", self.clusters)):
            if found is not None and len(found) != documents:
                raise DataError(
                    f"{name}: {len(found)} values for {documents} documents. Baseline, condition "
                    "and clusters describe the same documents in the same order."
                )

    def checked(self, scores: ArrayLike, name: str) -> Floats:
        """The scores as a float64 array (n,), or a `DataError` that says what is wrong."""
        try:
            found = np.asarray(scores, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{name}: not numbers ({error}). Expected a score a document."
            ) from None
        if found.ndim != 1 or not len(found):
            raise DataError(
                f"{name}: shape {found.shape}. Expected one score a document, of one or more."
            )
        wrong = ~((found >= 0) & (found <= self.ceiling))
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DataError(
                f"{name}: score {found[place]} of document {place} is not in "
                f"[0, {self.ceiling:g}]. Leave skipped documents out on both sides, or set ceiling."
            )
        return found

    @cached_property
    def codes(self) -> NDArray[np.intp]:
        """(n,) cluster number of each document; numbers follow the sorted labels."""
        if self.clusters is None:
            return np.arange(len(self.baseline))
        labels = list(self.clusters)
        try:
            order = sorted(set(labels))
        except TypeError:  # labels of several types
            order = sorted(set(labels), key=lambda label: (type(label).__name__, str(label)))
        number = {label: i for i, label in enumerate(order)}
        return np.array([number[label] for label in labels], dtype=np.intp)

    @cached_property
    def table(self) -> Floats:
        """(clusters, 6): the totals per cluster of the columns above, scores divided by ceiling."""
        base, cond = self.baseline / self.ceiling, self.condition / self.ceiling
        change = base - cond
        columns = (None, base, cond, change, np.maximum(change, 0), np.maximum(-change, 0))
        return np.stack([np.bincount(self.codes, weights=c) for c in columns], axis=1).astype(float)

    @property
    def binary(self) -> bool:
        """Whether every score is 0 or the ceiling."""
        return all(np.isin(x, (0.0, self.ceiling)).all() for x in (self.baseline, self.condition))

    @property
    def at_ceiling(self) -> bool:
        """Whether the baseline has the highest score on every document."""
        return bool((self.baseline == self.ceiling).all())
