"""Head rankings: read, check, select from, write.

    >>> ranking = HeadRanking.load("locos.json")
    >>> ranking.top(3)
    (Head(layer=28, head=0), Head(layer=23, head=2), Head(layer=23, head=1))

Three JSON forms are read: Wu's ``{"l-h": [score per trial]}``; an envelope with ``meta`` and
``scores``; and ours, the envelope plus ``answer_steps``. The last one is written. A head whose list
is empty has no score: it ranks after all others and no top-k contains it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import RankingError
from lm_eval_locos.files import expanded, replacing
from lm_eval_locos.ranking_files import DuplicateError, download, fields_of, no_duplicates, to_text

# PEFT adapters may resize the vocabulary; the heads stay the same heads.
_NOT_COMPARED = {"vocab_size"}


@dataclass(frozen=True)
class HeadRanking:
    """Scores of a model's heads and what is known about where they come from.

    Attributes:
        scores: per head its score in each trial (mean over the trial's answer steps); an empty
            tuple means that the head has no score.
        meta: what the file says about method, model, data (form 2 and 3; empty for Wu's form).
        trial_ids: one id a trial, or None where the file has none.
        answer_steps: number of answer steps of each trial, or None; with it heads are pooled by
            equation 4 of the LOCOS paper (every answer step weighs the same).
        confidence_intervals: per head (low, high), as the file has them.
        path: where it was read from.
        sha256: of the file's bytes.
    """

    scores: Mapping[Head, tuple[float, ...]]
    meta: Mapping[str, Any] = field(default_factory=dict)
    trial_ids: tuple[str, ...] | None = None
    answer_steps: tuple[int, ...] | None = None
    confidence_intervals: Mapping[Head, tuple[float, float]] = field(default_factory=dict)
    path: str = "<memory>"
    sha256: str | None = None

    def __post_init__(self) -> None:
        _validate(self)

    # -- reading and writing ---------------------------------------------------------------

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> HeadRanking:
        """Reads a ranking from a path or from ``hf://datasets/OWNER/REPO[@REVISION]/PATH.json``.

        Raises:
            RankingError: no such file, not JSON, or not a ranking; the message says which.
        """
        name = os.fspath(source)
        try:
            path = download(name) if name.startswith("hf://") else expanded(name)
            data = path.read_bytes()
        except RankingError:
            raise
        except (OSError, ValueError) as error:  # also a name with a NUL
            reason = getattr(error, "strerror", None) or error
            raise RankingError(
                f"heads={name}: cannot be read ({reason}). Give the path of a ranking "
                "(JSON) or hf://datasets/OWNER/REPO/PATH.json."
            ) from error
        return cls.from_bytes(data, name)

    @classmethod
    def from_bytes(cls, data: bytes, path: str = "<memory>") -> HeadRanking:
        """The ranking in a file's bytes; ``path`` is what error messages call it."""
        try:
            content = json.loads(data.decode("utf-8-sig"), object_pairs_hook=no_duplicates)
            fields = fields_of(content, path)
        except RankingError:
            raise
        except DuplicateError as error:
            raise RankingError(
                f"heads={path}: {error.args[0]!r} occurs twice. A ranking names each head once; "
                "remove one of the two."
            ) from None
        except (ValueError, RecursionError) as error:  # also a number of thousands of digits
            raise RankingError(
                f"heads={path}: not JSON ({error}). Expected a ranking such as "
                '{"0-0": [0.1, 0.2], "0-1": [0.0, 0.3]}.'
            ) from None
        return cls(**fields, path=path, sha256=hashlib.sha256(data).hexdigest())

    def to_json(self) -> str:
        """The ranking as JSON text of the third form."""
        content: dict[str, Any] = {
            "meta": dict(self.meta),
            "scores": {str(head): list(scores) for head, scores in self.scores.items()},
        }
        if self.trial_ids is not None:
            content["trial_ids"] = list(self.trial_ids)
        if self.answer_steps is not None:
            content["answer_steps"] = list(self.answer_steps)
        if self.confidence_intervals:
            content["confidence_intervals"] = {
                str(head): list(interval) for head, interval in self.confidence_intervals.items()
            }
        return to_text(content)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the third form, whole or not at all."""
        with replacing(path) as temporary:
            temporary.write_text(self.to_json(), encoding="utf-8")

    # -- pooling and order -----------------------------------------------------------------

    @cached_property
    def pooled(self) -> dict[Head, float]:
        """One score per head that has any: equation 4 where answer steps are known, else the mean.

        Equation 4 pools over all (trial, answer step) pairs. A trial's score is the mean over its
        n_t answer steps, so the pooled score is ``sum(n_t * s_t) / sum(n_t)``.
        """
        pooled: dict[Head, float] = {}
        for head, scores in self.scores.items():
            if scores:
                steps = self.answer_steps or (1,) * len(scores)
                total = sum(steps)
                pooled[head] = math.fsum(n / total * s for n, s in zip(steps, scores, strict=True))
        return pooled

    @cached_property
    def order(self) -> tuple[Head, ...]:
        """Heads with a score, highest first; ties by (layer, head)."""
        return tuple(sorted(self.pooled, key=lambda head: (-self.pooled[head], head)))

    @property
    def method(self) -> str:
        """The method the file names, or ``unknown``."""
        return str(self.meta.get("method", "unknown"))

    # -- selection -------------------------------------------------------------------------

    def top(self, k: int) -> tuple[Head, ...]:
        """The ``k`` heads with the highest scores, highest first."""
        return self.order[: self._checked(k)]

    def bottom(self, k: int) -> tuple[Head, ...]:
        """The ``k`` heads with the lowest scores, lowest first."""
        return self.order[::-1][: self._checked(k)]

    def above(self, threshold: float) -> tuple[Head, ...]:
        """Heads whose score is greater than ``threshold``, highest first."""
        return tuple(head for head in self.order if self.pooled[head] > threshold)

    def random(
        self,
        k: int,
        seed: int,
        population: Sequence[Head],
        *,
        exclude_top: bool = True,
        match_layers: bool = False,
    ) -> tuple[Head, ...]:
        """``k`` heads drawn uniformly without replacement, sorted.

        Args:
            k: how many.
            seed: of the draw; the same seed gives the same heads.
            population: the heads to draw from, usually all of the model's.
            exclude_top: leave out the top ``k``, so that the draw is a control for them.
            match_layers: draw from each layer as many as the top ``k`` has there.

        Raises:
            RankingError: there are not enough heads to draw from.
        """
        top = self.top(k)
        pool = sorted(set(population) - (set(top) if exclude_top else set()))
        generator = random.Random(f"{seed}")
        if not match_layers:
            if k > len(pool):
                raise RankingError(
                    f"random:{k}: only {len(pool)} heads are left to draw from"
                    f"{' without the top-' + str(k) if exclude_top else ''}. Use a smaller k."
                )
            return tuple(sorted(generator.sample(pool, k)))
        drawn: list[Head] = []
        for layer, count in sorted(Counter(head.layer for head in top).items()):
            here = [head for head in pool if head.layer == layer]
            if count > len(here):
                raise RankingError(
                    f"random:{k} matched per layer: the top-{k} has {count} heads in layer {layer} "
                    f"and only {len(here)} others are there. Use a smaller k, or draw without "
                    "matching layers."
                )
            drawn += generator.sample(here, count)
        return tuple(sorted(drawn))

    def _checked(self, k: int) -> int:
        if not 0 <= k <= len(self.order):
            raise RankingError(
                f"k={k}, but heads={self.path} has scores for {len(self.order)} heads. "
                f"Use num_heads between 0 and {len(self.order)}."
            )
        return k

    # -- fit to a model --------------------------------------------------------------------

    def check_fits(self, fingerprint: Mapping[str, str | int]) -> None:
        """Raises RankingError unless the ranking belongs to a model with this fingerprint.

        The file's own fingerprint (``meta.fingerprint``) is compared where it has one; the range of
        its heads always.
        """
        recorded = self.meta.get("fingerprint")
        recorded = recorded if isinstance(recorded, dict) else {}
        differ = {
            key: (recorded[key], fingerprint[key])
            for key in fingerprint
            if key in recorded and key not in _NOT_COMPARED and recorded[key] != fingerprint[key]
        }
        if differ:
            listed = ", ".join(f"{key} {a} there, {b} here" for key, (a, b) in differ.items())
            raise RankingError(
                f"heads={self.path} was made on another model "
                f"({self.meta.get('model', 'unnamed')}): {listed}. Use a ranking of this model."
            )
        layers, heads = int(fingerprint["num_layers"]), int(fingerprint["num_heads"])
        outside = sorted(h for h in self.scores if h.layer >= layers or h.head >= heads)
        with_attention = fingerprint.get("attention_layers")
        if not outside and with_attention is not None:
            kept = set(map(int, str(with_attention).split()))
            if without := sorted(head for head in self.scores if head.layer not in kept):
                raise RankingError(
                    f"heads={self.path} names head {without[0]}, but layer {without[0].layer} of "
                    f"the model has no attention ({len(without)} heads are in such layers; those "
                    f"with attention are {with_attention}). Use a ranking of this model."
                )
        if outside:
            raise RankingError(
                f"heads={self.path} names head {outside[0]}, but the model has layers "
                f"0-{layers - 1} and heads 0-{heads - 1} ({len(outside)} heads are outside). "
                "Use a ranking of this model."
            )


def _validate(ranking: HeadRanking) -> None:
    path, scores = ranking.path, ranking.scores
    for head, values in scores.items():
        wrong = [value for value in values if not math.isfinite(value)]
        if wrong:
            raise RankingError(
                f"heads={path}: head {head} has the score {wrong[0]}. Scores must be finite; "
                "run the detection again, or remove that trial."
            )
    if not any(scores.values()):
        raise RankingError(
            f"heads={path}: no head has a score ({len(scores)} heads, all lists empty). No trial "
            "passed when it was made; run the detection again with trials that the model answers."
        )
    for head, ends in ranking.confidence_intervals.items():
        if not all(map(math.isfinite, ends)):
            raise RankingError(
                f"heads={path}: the confidence interval of head {head} is {list(ends)}. Expected "
                "[low, high]; remove confidence_intervals to have them computed."
            )
    for name in ("trial_ids", "answer_steps"):
        given = getattr(ranking, name)
        if given is None:
            continue
        for head, values in scores.items():
            if values and len(values) != len(given):
                raise RankingError(
                    f"heads={path}: head {head} has {len(values)} scores, but {name} has "
                    f"{len(given)} entries. Expected one score a trial (or none)."
                )
