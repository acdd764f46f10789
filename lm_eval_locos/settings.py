"""The arguments of ``locos-ablated``: what they may be, and what they mean together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from lm_eval_locos.conditions import Condition, parse_head_list
from lm_eval_locos.errors import LocosError, RankingError
from lm_eval_locos.ranking import HeadRanking

_log = logging.getLogger(__name__)

Overlength = Literal["error", "skip", "truncate"]
Select = Literal["top", "bottom", "random", "layer-random", "list"]
NUM_HEADS = 50
EXAMPLE = (
    "lm_eval --model locos-ablated --model_args "
    "pretrained=HuggingFaceTB/SmolLM2-135M-Instruct,heads=ranking.json,num_heads=20 "
    "--tasks nolima,musique --apply_chat_template"
)
"""A command line that works."""


def check(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raises LocosError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        raise LocosError(f"{name}={value!r} is not known. Use one of {', '.join(allowed)}.")


def count(name: str, value: object, least: int = 0) -> int:
    """``value`` where it is a whole number from ``least`` on; LocosError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise LocosError(f"{name}={value!r}: expected a whole number, at least {least}.")
    return value


def condition_of(
    select: str, k: int, head_list: str | Sequence[str] | None, seed: int
) -> Condition:
    """The condition that ``select``, ``num_heads``, ``head_list`` and ``seed`` mean."""
    check("select", select, get_args(Select))
    if select == "list":
        if head_list is None:
            raise RankingError("select=list needs head_list, such as head_list=3-1;7-2.")
        # The harness makes numbers of what looks like one: 3.1 was meant to be 3-1.
        listed = [head_list] if isinstance(head_list, str | int | float) else head_list
        text = ";".join(map(str, listed))
        return Condition("heads", heads=parse_head_list(text))
    if head_list is not None:
        raise RankingError(f"head_list={head_list} needs select=list; select={select} ignores it.")
    if k == 0:
        return Condition("baseline")
    return Condition(select, k, seed if select.endswith("random") else 0)


def ranking_of(
    heads: str | HeadRanking | None, bundled: Path | None, *, needed: bool
) -> HeadRanking | None:
    """The ranking that ``heads`` names, or else the bundled one; None where none is needed."""
    if heads is None:
        if not needed:
            return None
        if bundled is None:
            raise RankingError(
                "locos-ablated: heads is missing, and no ranking of this model is bundled. For "
                f"example:\n  {EXAMPLE}\nTo make one: locos detect --model MODEL --output DIR"
            )
        _log.warning("heads is not given: using the bundled ranking %s", bundled)
        return HeadRanking.load(bundled)
    if isinstance(heads, HeadRanking):
        return heads
    if not isinstance(heads, str):
        raise RankingError(
            f"heads={heads!r} was read as a {type(heads).__name__}, not a path. Quote it, as in "
            "--model_args \"heads='3.1'\", or choose heads by select=list,head_list=3-1;7-2."
        )
    return HeadRanking.load(heads)


def recorded_k(ranking: HeadRanking | None) -> int:
    """How many heads the ranking says that it is for (``meta.k``), or else `NUM_HEADS`."""
    recorded = ranking.meta.get("k") if ranking is not None else None
    return NUM_HEADS if recorded is None else count("meta.k of the ranking", recorded)
