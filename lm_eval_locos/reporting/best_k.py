"""k*: the number of heads chosen on one half of the documents and reported on the other.

    >>> (choice,) = best_k(board)
    >>> choice.k, choice.result.specificity.value
    (20, 0.68)

Looking for the most specific k and reporting its specificity on the same documents would flatter
it. Clusters (a needle, a story) go to a half as a whole, by the hash of their name, so that the
halves are the same for every ranking and k.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from lm_eval_locos.reporting.board import Board, Row
from lm_eval_locos.reporting.cells import family_scores
from lm_eval_locos.reporting.text import SIDES
from lm_eval_locos.statistics import FLOOR, FamilyScores, SpecificityResult, specificity

_FEW = 100  # resamples where only the value is wanted


@dataclass(frozen=True)
class Choice:
    """The k* of one ranking on one model.

    Attributes:
        model, ranking: short names.
        k: k*, the most specific on the development half; the smallest of equals.
        development: specificity on that half by k; None where it is not defined.
        result: of k* on the other half.
        documents: on the other half.
        site, mode, source: as in the rows.
        chosen_with: families whose drop had a part in the choice.
        lost: the same families that have none in `result`, and why.
        gained: families that have a part in `result` alone, and why.
    """

    model: str
    ranking: str
    k: int
    development: Mapping[int, float | None]
    result: SpecificityResult
    documents: int
    site: str | None = None
    mode: str | None = None
    source: str = "runs"
    chosen_with: tuple[str, ...] = ()
    lost: Mapping[str, str] = field(default_factory=dict)
    gained: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, row: Row) -> bool:
        """Whether k* is the k of this row or of one that differs in k alone."""
        mine = (self.model, self.ranking, self.site, self.mode, self.source)
        return row.kind == "top" and mine == (
            row.model,
            row.ranking,
            row.site,
            row.mode,
            row.source,
        )


def best_k(board: Board) -> list[Choice]:
    """k* of every ranking whose top was ablated at two k or more, with samples of both sides.

    A ranking without a defined specificity on one of the halves has none.
    """
    found = []
    for row in board.rows:
        group = board.group(row)
        if row.kind != "top" or row is not group[0] or len({r.k for r in group}) < 2:
            continue
        values = {r.k: _value(_half(r, development=True)) for r in group}
        known = {k: value for k, value in values.items() if value is not None}
        if not known:
            continue
        k = min(known, key=lambda k: (-known[k], k))
        best = next(r for r in group if r.k == k)
        chosen, families = (_half(best, development=side) for side in (True, False))
        if _value(families) is None:
            continue
        result = specificity(
            families,
            resamples=board.resamples,
            seed=board.seed,
            level=board.level,
            margin=board.margin,
        )
        documents = sum(len(scores.baseline) for scores in families.values())
        before, after = specificity(chosen, resamples=_FEW), result
        found.append(
            Choice(
                model=row.model,
                ranking=row.ranking,
                k=k,
                development=values,
                result=result,
                documents=documents,
                site=row.site,
                mode=row.mode,
                source=row.source,
                chosen_with=tuple(_defined(before)),
                lost=_without(before, after),
                gained=_without(after, before),
            )
        )
    return found


def _defined(result: SpecificityResult) -> list[str]:
    return [family for family, of in result.families.items() if of.status != FLOOR]


def _without(with_it: SpecificityResult, without: SpecificityResult) -> dict[str, str]:
    """Families whose drop is defined on one half and not on the other, and why it is not."""
    missing = [family for family in _defined(with_it) if family not in _defined(without)]
    return {
        family: FLOOR if family in without.families else "all its clusters are in one half"
        for family in missing
    }


def _half(row: Row, *, development: bool) -> dict[str, FamilyScores]:
    """The families' scores on the documents of one half."""
    halves = {}
    for family, cell in row.cells.items():
        if family not in SIDES:  # shown, but no part of specificity
            continue
        pairs = [
            pair for pair in cell.pairs if in_development(family, pair[0].cluster) == development
        ]
        scores = family_scores(family, pairs, cell.metric) if pairs else None
        if scores is not None:
            halves[family] = scores
    return halves


def in_development(family: str, cluster: str) -> bool:
    """Whether a cluster is in the half on which k is chosen."""
    return hashlib.sha256(f"{family} {cluster}".encode()).digest()[0] % 2 == 0


def _value(families: Mapping[str, FamilyScores]) -> float | None:
    """The specificity; None unless both sides are there and it is defined."""
    if {scores.side for scores in families.values()} < {"retrieval", "control"}:
        return None
    return specificity(families, resamples=_FEW).specificity.value
