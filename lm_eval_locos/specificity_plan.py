"""What `locos_specificity` asks: of which families, how many documents, under which conditions.

>>> Plan.of({"num_heads": 5, "random_seeds": 2}).conditions
('baseline', 'top:5', 'layer-random:5:0', 'layer-random:5:1')
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lm_eval_locos.bundled import bundled_ranking, resolve, running_unnamed
from lm_eval_locos.errors import DataError
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.settings import NUM_HEADS, recorded_k

if TYPE_CHECKING:
    from lm_eval_locos.statistics.families import Side

RANDOM_SEEDS = 10
_RANDOM_KINDS = ("layer-random", "random")


@dataclass(frozen=True)
class Member:
    """A family inside the specificity task.

    Attributes:
        task: the task whose documents, prompts, settings of generation and score it uses.
        side: "retrieval" or "control".
        metric: the score that counts; the others are the task's own business.
        floor: what guessing scores; a baseline at it leaves nothing to lose.
        spread: take documents from all over the task, whose order is not balanced, instead of its
            first.
    """

    task: str
    side: Side
    metric: str
    floor: float = 0.0
    spread: bool = False


MEMBERS = {
    "nolima": Member("nolima", "retrieval", "rouge_l"),
    "musique": Member("musique", "retrieval", "acc", spread=True),  # sorted by hops on the hub
    "babilong": Member("locos_babilong_qa2_0k", "retrieval", "acc", floor=1 / 6),  # six rooms
    "parametric": Member("locos_parametric", "control", "exact_match"),
    "arithmetic": Member("locos_arithmetic", "control", "exact_match"),
}
"""By family; the metrics are the paper's (arXiv 2607.01002)."""


@dataclass(frozen=True)
class Plan:
    """What is asked: families, how many documents of each, and the conditions."""

    families: tuple[str, ...] = tuple(MEMBERS)
    per_family: int | Mapping[str, int] | None = None
    k: int = NUM_HEADS
    seeds: tuple[int, ...] = tuple(range(RANDOM_SEEDS))
    random: str = _RANDOM_KINDS[0]

    KEYS: ClassVar = ("families", "per_family", "k", "random_seeds", "random")
    """The metadata that `of` reads; ``num_heads`` and ``select`` are model arguments."""

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> Plan:
        """Reads a task's metadata, in which the model's arguments are as well.

        Raises:
            DataError: a value that is not understood.
        """
        if (select := metadata.get("select", "top")) != "top":
            raise DataError(
                f"select={select}: locos_specificity compares the top heads with random ones. "
                "Leave select out of --model_args."
            )
        random = metadata.get("random", _RANDOM_KINDS[0])
        if random not in _RANDOM_KINDS:
            raise DataError(f"random={random!r}: expected one of {', '.join(_RANDOM_KINDS)}.")
        return cls(
            _families(metadata.get("families")),
            _per_family(metadata.get("per_family")),
            _k(metadata),
            _seeds(metadata.get("random_seeds", RANDOM_SEEDS)),
            random,
        )

    def documents(self, family: str) -> int | None:
        """The most documents of one family; None: all there are."""
        if isinstance(self.per_family, Mapping):
            return self.per_family.get(family)
        return self.per_family

    @property
    def conditions(self) -> tuple[str, ...]:
        """The baseline, the heads in question, the random controls."""
        controls = (f"{self.random}:{self.k}:{seed}" for seed in self.seeds)
        return ("baseline", f"top:{self.k}", *controls)


def _whole(name: str, value: Any, more: str = "", least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{name}={value!r}: expected a whole number, at least {least}{more}.")
    return value


def _per_family(value: Any) -> int | dict[str, int] | None:
    more = ", 'all', or such a number by family"
    if not isinstance(value, Mapping):
        return None if value in (None, "all") else _whole("per_family", value, more)
    unknown = [name for name in value if name not in MEMBERS]
    if unknown:
        raise DataError(f"per_family: no family {unknown[0]!r}. Known: {', '.join(MEMBERS)}.")
    return {name: _whole(f"per_family of {name}", count) for name, count in value.items()}


def _families(value: Any) -> tuple[str, ...]:
    if value is None:
        return tuple(MEMBERS)
    names = value.replace(",", " ").split() if isinstance(value, str) else value
    known = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
    if not known or len(set(names)) < len(names) or not set(names) <= set(MEMBERS):
        raise DataError(
            f"families={value!r}: expected different names out of {', '.join(MEMBERS)}, as a list."
        )
    if len({MEMBERS[name].side for name in names}) < 2:
        raise DataError(
            f"families={value!r}: specificity compares a retrieval family (nolima, musique, "
            "babilong) with a control (parametric, arithmetic). Name at least one of each."
        )
    return tuple(name for name in MEMBERS if name in names)


def _k(metadata: Mapping[str, Any]) -> int:
    given = {key: metadata[key] for key in ("num_heads", "k") if metadata.get(key) is not None}
    for key, value in given.items():
        _whole(key, value, " heads to ablate (the baseline is asked in any case)")
    if len(set(given.values())) > 1:
        raise DataError(
            f"num_heads={given['num_heads']} in --model_args and k={given['k']} in --metadata "
            "disagree. Leave one out."
        )
    return next(iter(given.values())) if given else _default_k(metadata)


def _default_k(metadata: Mapping[str, Any]) -> int:
    """What ``locos-ablated`` takes where ``num_heads`` is not given."""
    model = resolve(metadata["pretrained"]) if "pretrained" in metadata else running_unnamed()
    heads = metadata.get("heads") or bundled_ranking(model, metadata.get("gguf_file"))
    return recorded_k(HeadRanking.load(heads) if isinstance(heads, str | Path) else None)


def _seeds(value: Any) -> tuple[int, ...]:
    seeds = value
    if isinstance(value, int) and not isinstance(value, bool):
        seeds = range(value) if value >= 0 else None
    whole = isinstance(seeds, list | tuple | range) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in seeds
    )
    if not whole or len(set(seeds)) < len(seeds):
        raise DataError(
            f"random_seeds={value!r}: expected how many seeds (0 for no random control), or a "
            "list of different whole numbers such as [0, 1, 2]."
        )
    return tuple(seeds)
