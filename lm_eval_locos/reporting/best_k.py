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
from dataclasses import dataclass

from lm_eval_locos.reporting.board import Board, Row
from lm_eval_locos.reporting.cells import family_scores
from lm_eval_locos.statistics import FamilyScores, SpecificityResult, specificity

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
    """

    model: str
    ranking: str
    k: int
    development: Mapping[int, float | None]
    result: SpecificityResult
    documents: int


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
        families = _half(next(r for r in group if r.k == k), development=False)
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
        found.append(Choice(row.model, row.ranking, k, values, result, documents))
    return found


def _half(row: Row, *, development: bool) -> dict[str, FamilyScores]:
    """The families' scores on the documents of one half."""
    halves = {}
    for family, cell in row.cells.items():
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
