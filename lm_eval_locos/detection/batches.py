"""Which trials run together: batches by length, and groups that share the text before the needle.

    >>> plan(trials, batch_size=4)
    [Batch(members=(3, 7), shared=(1, 4, 52, ...)), Batch(members=(0, 2, 5, 1), shared=())]

Trials of one haystack have the same tokens up to where the first of their needles stands. Keys and
values of a token depend on nothing after it, so that one prefill of that text serves them all.
The plan depends on the trials and the batch size only: the same arguments give the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from lm_eval_locos.detection.scores import ANCHOR_ROWS
from lm_eval_locos.errors import DataError

_COVERED = 0.9  # a trial joins a group that shares this part of its text before the needle
_WORTH = 0.1  # sharing must save this part of a trial's tokens, and of a group's
_SPREAD = 1.15  # rows of a batch are filled up to at most this multiple of what they need


@dataclass(frozen=True)
class Trial:
    """One probe prompt, tokenised.

    Attributes:
        ids: the whole prompt, as fed to the model.
        needle: [start, end) of the needle's tokens in ``ids``.
        gold: the answer's text.
    """

    ids: tuple[int, ...]
    needle: tuple[int, int]
    gold: str

    def __post_init__(self) -> None:
        start, end = self.needle
        if not 0 <= start < end <= len(self.ids):
            raise DataError(
                f"needle={list(self.needle)} in a prompt of {len(self.ids)} tokens. Expected "
                "0 <= start < end <= number of tokens; was the needle lost in tokenisation?"
            )


@dataclass(frozen=True)
class Batch:
    """Trials that run together.

    Attributes:
        members: their indices.
        shared: tokens that are prefilled once for all batches with the same ``shared``; each
            member starts with a part of them. Empty: nothing is shared.
    """

    members: tuple[int, ...]
    shared: tuple[int, ...] = ()


def reusable(ids: Sequence[int], shared: Sequence[int]) -> int:
    """Number of leading tokens of ``ids`` that need not be computed again.

    The last prompt rows are always computed: their queries are scored.
    """
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, shared, strict=False))
    )
    return max(0, min(same, len(ids) - ANCHOR_ROWS))


def plan(trials: Sequence[Trial], *, batch_size: int, share: bool = True) -> list[Batch]:
    """Batches that cover every trial once, in each group the longest first (a batch that is too
    large fails early). Trials in a batch have about the same number of tokens to prefill.

    Args:
        trials: any number.
        batch_size: most trials in a batch.
        share: whether the text before the needle is prefilled once where that saves work.
    """
    if batch_size < 1:
        raise DataError(f"batch_size={batch_size}: expected at least 1.")
    groups = _groups(trials) if share else []
    grouped = {i for _, members in groups for i in members}
    groups.append(((), [i for i in range(len(trials)) if i not in grouped]))
    batches = []
    for shared, members in groups:
        left = {i: len(trials[i].ids) - reusable(trials[i].ids, shared) for i in members}
        members = sorted(members, key=lambda i: (-left[i], i))
        while members:
            fits = [i for i in members[:batch_size] if left[members[0]] <= _SPREAD * left[i]]
            batches.append(Batch(tuple(fits), shared))
            members = members[len(fits) :]
    return batches


def _groups(trials: Sequence[Trial]) -> list[tuple[tuple[int, ...], list[int]]]:
    """(shared tokens, members) of each group that is worth it."""
    groups: list[tuple[tuple[int, ...], list[int]]] = []
    waiting = sorted(range(len(trials)), key=lambda i: (-trials[i].needle[0], trials[i].ids, i))
    while waiting:
        first = trials[waiting[0]]
        shared = first.ids[: first.needle[0]]
        members = [i for i in waiting if _fits(trials[i], shared)]
        saved = sum(reusable(trials[i].ids, shared) for i in members) - len(shared)
        if saved >= _WORTH * sum(len(trials[i].ids) for i in members):
            groups.append((shared, members))
        taken = {waiting[0], *members}
        waiting = [i for i in waiting if i not in taken]
    return groups


def _fits(trial: Trial, shared: Sequence[int]) -> bool:
    """Whether ``shared`` spares the trial a good part of its own text before the needle.

    A little of it, as with a needle near the start, is not worth a slower kernel.
    """
    same = reusable(trial.ids, shared)
    return same >= max(_COVERED * trial.needle[0], _WORTH * len(trial.ids))
