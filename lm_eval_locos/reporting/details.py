"""What is between the numbers: NoLiMa by length and depth, and answers before and after."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lm_eval_locos.reporting.board import Board, Cell, Row
from lm_eval_locos.reporting.samples import Sample


@dataclass(frozen=True)
class Surface:
    """Mean score by context length and needle depth.

    Attributes:
        lengths: ascending.
        depths: in percent, ascending.
        means: (depths, lengths), NaN where no document is.
        counts: (depths, lengths), number of documents.
    """

    lengths: tuple[float, ...]
    depths: tuple[float, ...]
    means: tuple[tuple[float, ...], ...]
    counts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Example:
    """A document's answer without and with ablation.

    Attributes:
        id: of the document.
        question: asked.
        answers: that are right.
        before: the baseline's answer.
        after: the condition's.
        scores: (before, after).
    """

    id: str
    question: str
    answers: tuple[str, ...]
    before: str
    after: str
    scores: tuple[float, float]

    @property
    def change(self) -> str:
        """ "lost", "gained", "kept" or "missed"."""
        before, after = self.scores
        if after < before:
            return "lost"
        if after > before:
            return "gained"
        return "kept" if after > 0 else "missed"


def surface(samples: Iterable[Sample], metric: str) -> Surface | None:
    """The means of samples that have a length and a depth; None where fewer than two places do."""
    scores: dict[tuple[float, float], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.length is not None and sample.depth is not None and metric in sample.scores:
            scores[sample.depth, sample.length].append(sample.scores[metric])
    if len(scores) < 2:
        return None
    depths = tuple(sorted({depth for depth, _ in scores}))
    lengths = tuple(sorted({length for _, length in scores}))

    def mean(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values) if values else math.nan

    return Surface(
        lengths,
        depths,
        tuple(tuple(mean(scores.get((d, n), ())) for n in lengths) for d in depths),
        tuple(tuple(len(scores.get((d, n), ())) for n in lengths) for d in depths),
    )


def most_specific(board: Board) -> list[Row]:
    """Of each model and ranking the row with the highest specificity, then the largest drop."""
    best: dict[tuple[object, ...], Row] = {}
    for row in board.rows:
        if row.kind in ("baseline", "random", "layer-random") or row.retrieval_drop is None:
            continue
        key = (row.model, row.ranking, row.kind, row.site, row.mode, row.source)
        if key not in best or _strength(row) > _strength(best[key]):
            best[key] = row
    return list(best.values())


def _strength(row: Row) -> tuple[float, float]:
    found = (row.specificity, row.retrieval_drop)
    values = [e.value if e and e.value is not None else -math.inf for e in found]
    return values[0], values[1]


def examples(cell: Cell, count: int = 3) -> list[Example]:
    """A few documents of a paired cell: lost ones first, then others of each kind.

    Which ones is decided by the documents' hashes, so that nobody chose them.
    """
    found: dict[str, list[Example]] = defaultdict(list)
    for before, after in cell.pairs:  # in the order of the hashes
        if before.response or after.response:
            example = _example(before, after, cell.metric)
            found[example.change].append(example)
    order = [found[change][:2] for change in ("lost", "kept", "gained", "missed")]
    chosen = [example for part in order for example in part]
    return chosen[:count] if not found["lost"] else [*found["lost"][:2], *chosen[2:]][:count]


def _example(before: Sample, after: Sample, metric: str) -> Example:
    return Example(
        id=after.id,
        question=after.question,
        answers=after.answers,
        before=before.response,
        after=after.response,
        scores=(before.scores[metric], after.scores[metric]),
    )
