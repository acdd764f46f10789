"""Honest statistics of retrieval specificity: pure functions of arrays of scores per document.

Of 40 documents that the baseline had right, the condition loses 20:

    >>> scores = FamilyScores([1] * 40, [0, 1] * 20)
    >>> drop = specificity({"nolima": scores}).families["nolima"].drop
    >>> drop.value, drop.interval.method
    (0.5, 'bca')

Read from the bottom up: `families` (scores and their sums per cluster), `bootstrap` (resampling
and BCa), `paired` (score intervals), `clustered` (few clusters), `hypotheses` (tests and sizes),
`estimates` (which interval applies), `results` and `specificity` (all there is to say of one
condition).
"""

from __future__ import annotations

from lm_eval_locos.statistics.estimates import Estimate, Interval
from lm_eval_locos.statistics.families import FamilyScores
from lm_eval_locos.statistics.hypotheses import (
    detectable_effect,
    documents_needed,
    holm,
    mcnemar,
    permutation_p,
)
from lm_eval_locos.statistics.results import (
    CEILING,
    FLOOR,
    OK,
    Controls,
    FamilyResult,
    RandomControl,
    SpecificityResult,
    holm_across,
)
from lm_eval_locos.statistics.specificity import specificity

__all__ = [
    "CEILING",
    "FLOOR",
    "OK",
    "Controls",
    "Estimate",
    "FamilyResult",
    "FamilyScores",
    "Interval",
    "RandomControl",
    "SpecificityResult",
    "detectable_effect",
    "documents_needed",
    "holm",
    "holm_across",
    "mcnemar",
    "permutation_p",
    "specificity",
]
