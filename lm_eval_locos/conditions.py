"""What is ablated while a request runs: conditions, as text and as heads.

    >>> condition = Condition.parse("random:50:7")
    >>> condition.select(ranking, architecture.heads)
    (Head(layer=0, head=3), ...)

=======================  ==========================================
``baseline``            nothing
``top:K``               the K heads with the highest scores
``bottom:K``            the K heads with the lowest scores
``random:K:SEED``       K heads drawn from all of the model's, without the top K
``layer-random:K:SEED``  the same, as many in each layer as the top K has
``heads:3-1;7-2``       these heads
=======================  ==========================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import RankingError
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.ranking_files import parse_head

REQUEST_KEY = "locos_condition"
"""The generation kwarg by which a request names its condition."""

_RANDOM = ("random", "layer-random")
_FORMS = "baseline, top:K, bottom:K, random:K:SEED, layer-random:K:SEED or heads:L-H;L-H"


@dataclass(frozen=True)
class Condition:
    """A parsed condition; ``str()`` gives the text back, so that equal ones compare equal."""

    kind: str
    k: int = 0
    seed: int = 0
    heads: tuple[Head, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Reads one of the forms above.

        Raises:
            RankingError: any other text.
        """
        kind, _, rest = text.strip().partition(":")
        parts = rest.split(":") if rest else []
        if kind == "baseline" and not parts:
            return cls("baseline")
        if kind == "heads" and len(parts) == 1:
            return cls("heads", heads=parse_head_list(parts[0]))
        counts = {"top": 1, "bottom": 1, "random": 2, "layer-random": 2}
        if counts.get(kind) == len(parts) and all(part.isdecimal() for part in parts):
            k, seed = int(parts[0]), int(parts[1]) if len(parts) == 2 else 0
            return cls(kind, k, seed) if k else cls("baseline")
        raise RankingError(f"condition {text!r} is not understood. Expected {_FORMS}.")

    def __str__(self) -> str:
        if self.kind == "baseline":
            return "baseline"
        if self.kind == "heads":
            return "heads:" + ";".join(map(str, self.heads))
        return f"{self.kind}:{self.k}" + (f":{self.seed}" if self.kind in _RANDOM else "")

    @property
    def needs_ranking(self) -> bool:
        """Whether heads are chosen by their scores."""
        return self.kind not in ("baseline", "heads")

    def select(self, ranking: HeadRanking | None, population: Sequence[Head]) -> tuple[Head, ...]:
        """The heads to ablate.

        Args:
            ranking: needed where :attr:`needs_ranking`.
            population: every head of the model, from which random ones are drawn.
        """
        if not self.needs_ranking:
            return self.heads
        if ranking is None:
            raise RankingError(f"condition {self} needs a ranking. Give one with heads=FILE.")
        if self.kind == "top":
            return ranking.top(self.k)
        if self.kind == "bottom":
            return ranking.bottom(self.k)
        matched = self.kind == "layer-random"
        return ranking.random(self.k, self.seed, population, match_layers=matched)


def parse_head_list(text: str) -> tuple[Head, ...]:
    """Heads written as ``3-1;7-2`` (blanks or semicolons between them).

    Raises:
        RankingError: something else, nothing, or a head twice.
    """
    heads = []
    for part in text.replace(";", " ").split():
        head = parse_head(part)
        if head is None:
            raise RankingError(
                f"head_list: {part!r} is no head. Expected LAYER-HEAD;LAYER-HEAD, such as 3-1;7-2."
            )
        heads.append(head)
    if not heads:
        raise RankingError("head_list is empty. Expected heads such as 3-1;7-2.")
    if len(set(heads)) != len(heads):
        raise RankingError(f"head_list={text} names a head twice. Name each head once.")
    return tuple(heads)
