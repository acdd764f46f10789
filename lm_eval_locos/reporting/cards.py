"""The page's headline: a card for each ranking on each model, and what it may claim.

    >>> [(card["name"], card["value"]) for card in cards(board, best_k(board))]
    [('locos, k* = 20', '68.1%')]

The highest specificity of several k, measured on the documents it was picked on, is too high on
average even where no head matters. A card therefore shows k*, chosen on one half of the documents
and measured on the other, with the highest of all below it; where there is no k*, it says what the
number is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_eval_locos.reporting.best_k import Choice
from lm_eval_locos.reporting.board import Board, Row
from lm_eval_locos.reporting.details import most_specific
from lm_eval_locos.reporting.grid import detectable_text, estimate_text, held_text, other_families
from lm_eval_locos.reporting.html_table import interval_text
from lm_eval_locos.reporting.text import p_value, percent
from lm_eval_locos.statistics import Estimate


@dataclass(frozen=True)
class Headline:
    """What a card is about.

    Attributes:
        row: shown: k*'s, or the one with the highest specificity.
        best: the row with the highest specificity on all documents.
        settings: number of rows it is the highest of; they differ in k (or in the heads).
        choice: k*, or None.
    """

    row: Row
    best: Row
    settings: int
    choice: Choice | None


def headlines(board: Board, choices: Sequence[Choice]) -> list[Headline]:
    """One for each ranking on each model, at each site and in each mode."""
    found = []
    for best in most_specific(board):
        group = [row for row in board.group(best) if row.retrieval_drop is not None]
        choice = next((choice for choice in choices if choice.is_of(best)), None)
        row = next(r for r in group if r.k == choice.k) if choice else best
        found.append(Headline(row, best, len(group), choice))
    return found


def cards(board: Board, choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """What the template shows of each headline."""
    return [_card(headline) for headline in headlines(board, choices)]


def _card(headline: Headline) -> dict[str, Any]:
    row, choice = headline.row, headline.choice
    of = choice.result if choice else row
    found = of.specificity
    name = f"k* = {choice.k}" if choice else row.name
    random = row.random
    facts = [
        ("retrieval drop", estimate_text(of.retrieval_drop)),
        ("control drop", estimate_text(of.control_drop)),
        ("controls held", held_text(of.controls_held)),
    ]
    if headline.settings > 1:  # the highest of several p-values' own would flatter as well
        facts.append(("p (Holm)", p_value(random.p_holm if random else None)))
    else:
        facts.append(("p (random)", p_value(random.p if random else None)))
    return {
        "name": ", ".join(filter(None, (row.ranking, name))),
        "model": row.model,
        "bundled": row.bundled,
        "value": percent(found.value) if found and found.value is not None else "undefined",
        "interval": f"{interval_text(found)} {detectable_text(found)}".strip(),
        "what": _what(headline, found),
        "facts": facts,
        "remarks": _remarks(headline),
    }


def _what(headline: Headline, found: Estimate | None) -> str:
    """Which number it is, on which documents."""
    choice = headline.choice
    if choice:
        return (
            f"specificity, held out: k chosen on one half of the documents, measured on the other "
            f"({choice.documents:,} documents)"
        )
    if found is None or found.value is None:
        reason = (found.reason or "") if found else ""
        return "specificity" + (f": {reason}" if reason else "")
    if headline.settings > 1:
        return (
            f"specificity, highest of {headline.settings} settings on all documents: chosen and "
            "measured on the same ones, so too high on average"
        )
    return "specificity on all documents"


def _remarks(headline: Headline) -> list[str]:
    """What must not be read into the number."""
    choice, best, count = headline.choice, headline.best, headline.settings
    if choice:
        p = f" p is of all documents, adjusted for {count} settings." if headline.row.random else ""
        return [
            f"Highest of {count} settings on all documents, chosen and measured on the same ones: "
            f"{best.name}, {estimate_text(best.specificity)}.{p}",
            *filter(None, [other_families(choice).strip()]),
        ]
    if count < 2:
        return []
    if best.kind != "top":
        return ["No held-out number: k* is chosen for the top heads of a ranking only."]
    if not any(cell.pairs for cell in best.cells.values()):
        return ["No held-out number: k* needs sample files (--log_samples)."]
    return ["No held-out number: specificity is not defined on each half of the documents."]
