"""What a leaderboard is made of: plain records, and their form for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from lm_eval_locos.reporting.results import Run
from lm_eval_locos.reporting.samples import Sample
from lm_eval_locos.statistics import Controls, Estimate

UNPAIRED = "unpaired: sample files are missing, so there is no interval"
NO_BASELINE = "no baseline"

Pairs = tuple[tuple[Sample, Sample], ...]


@dataclass(frozen=True)
class Cell:
    """One family in one row.

    Attributes:
        tasks: names of the family's tasks; their documents are put together.
        metric: that is shown.
        documents: number scored.
        score: mean score; with an interval where there are samples.
        bundled: whether a task ran on the package's sample.
        baseline: mean score of the baseline on the same documents, or None without one.
        drop: (baseline - score) / baseline, or None without a baseline.
        difference: baseline - score.
        status: "ok", "undefined (floor)", "ceiling", or "" without a baseline.
        paired: whether baseline and condition were compared document by document.
        p: exact p-value of a paired binary family.
        p_holm: the same, adjusted over the k and families of the row's ranking.
        lost: documents whose score fell.
        gained: documents whose score rose.
        skipped: documents left out because a side has no score for them.
        pairs: (baseline, condition) samples of each document; not part of the JSON form.
    """

    tasks: tuple[str, ...]
    metric: str
    documents: int | None
    score: Estimate
    bundled: bool
    baseline: Estimate | None = None
    drop: Estimate | None = None
    difference: Estimate | None = None
    status: str = ""
    paired: bool = False
    p: float | None = None
    p_holm: float | None = None
    lost: int | None = None
    gained: int | None = None
    skipped: int = 0
    pairs: Pairs = field(default=(), repr=False)


@dataclass(frozen=True)
class RandomResult:
    """The random conditions that belong to a row.

    Attributes:
        kind: "random" or "layer-random".
        seeds: number of conditions.
        specificity: mean over them.
        values: specificity of each, by seed.
        p: (1 + #{random >= the row's}) / (1 + seeds).
        p_holm: the same, adjusted over the k of the row's ranking.
    """

    kind: str
    seeds: int
    specificity: float | None
    values: tuple[float, ...]
    p: float | None
    p_holm: float | None = None


@dataclass(frozen=True)
class Row:
    """One model under one condition, or under several that differ in their random seed alone.

    Attributes:
        model: short name.
        ranking: short name, "" where no ranking chose the heads.
        ranking_path: of the file, as the run was given it.
        ranking_sha256: of its bytes.
        condition: as text; without the seed where `seeds` says how many there are.
        kind: "baseline", "top", "bottom", "random", "layer-random" or "heads".
        k: number of heads ablated.
        site: where.
        mode: by what.
        heads: that were ablated, in order; empty for several seeds.
        seeds: the seeds put together, or ().
        cells: by family.
        retrieval_drop: mean drop over the retrieval families.
        control_drop: over the controls.
        specificity: retrieval_drop - control_drop.
        controls: whether the controls held, or None where that is not known.
        controls_held: the same as True or False, from whatever source.
        random: the random control, or None.
        spread: for several seeds (lowest, highest) score by family, else {}.
        source: "runs", or the name of the task that computed the row itself.
        bundled: whether a part of it is from the package's sample.
        notes: what to know about the row.
        runs: paths of the results files.
    """

    model: str
    ranking: str
    ranking_path: str | None
    ranking_sha256: str | None
    condition: str
    kind: str
    k: int
    site: str | None
    mode: str | None
    heads: tuple[str, ...]
    cells: Mapping[str, Cell]
    seeds: tuple[int, ...] = ()
    retrieval_drop: Estimate | None = None
    control_drop: Estimate | None = None
    specificity: Estimate | None = None
    controls: Controls | None = None
    controls_held: bool | None = None
    random: RandomResult | None = None
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    source: str = "runs"
    bundled: bool = False
    notes: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The condition, and how many seeds are behind it."""
        return f"{self.condition} × {len(self.seeds)} seeds" if self.seeds else self.condition


@dataclass(frozen=True)
class Board:
    """All there is to show.

    Attributes:
        rows: in the order of the tables.
        families: columns, ours first.
        warnings: about the whole.
        runs: every results file, oldest first.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        level: of the intervals.
        margin: largest control drop that counts as held.
    """

    rows: tuple[Row, ...]
    families: tuple[str, ...]
    warnings: tuple[str, ...]
    runs: tuple[Run, ...]
    resamples: int
    seed: int
    level: float
    margin: float

    @property
    def bundled(self) -> bool:
        """Whether any number is from the package's sample."""
        return any(row.bundled for row in self.rows)

    def group(self, row: Row) -> tuple[Row, ...]:
        """The rows that differ from `row` in k alone, by k."""
        key = group_key(row)
        return tuple(sorted((r for r in self.rows if group_key(r) == key), key=lambda r: r.k))

    def baseline(self, model: str) -> Row | None:
        """The baseline's row of a model."""
        return next((r for r in self.rows if r.model == model and r.kind == "baseline"), None)


def group_key(row: Row) -> tuple[Any, ...]:
    """Equal for rows that differ in k alone."""
    return (row.model, row.ranking, row.kind, row.site, row.mode, row.source)


def plain(value: Any) -> Any:
    """Records as dicts and lists for JSON: every number finite or None, pairs left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            entry.name: plain(getattr(value, entry.name))
            for entry in fields(value)
            if entry.name not in ("pairs", "samples")
        }
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)
