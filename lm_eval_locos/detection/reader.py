"""From what was captured of a batch to the scores of one of its trials.

This is the seam between `capture` (what is kept), `steps` (which rows matter) and `scores` (the
arithmetic). All rows of a trial are neighbours: the last prompt positions, of which the very last
produces token 0, then one row for each token that was fed back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm_eval_locos.architecture import Kind
from lm_eval_locos.detection import scores
from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.captured import LayerCapture
from lm_eval_locos.detection.steps import Generation

_CHUNK = 2**23  # logits held at a time: 32 MiB


@dataclass(frozen=True)
class _View:
    """What R rows see in one kind of layer.

    Attributes:
        origin, end: the absolute columns [origin, end) that any row sees.
        low, high: the range that each row sees, counted from the origin.
        needle: the part of the needle that any row sees, counted from the origin.
        cut: number of the needle's first tokens that no row sees.
        visible, keys: n and N of each row, (R, 1).
    """

    origin: int
    end: int
    low: list[int]
    high: list[int]
    needle: tuple[int, int]
    cut: int
    visible: Tensor
    keys: Tensor

    @classmethod
    def of(cls, low: list[int], high: list[int], start: int, end: int) -> _View:
        """From absolute columns: each row's range and the needle's."""
        origin, last = min(low), max(high)
        kept = (max(start, origin), max(end, origin))
        pairs = list(zip(low, high, strict=True))
        inside = [max(0, min(above, end) - max(below, start)) for below, above in pairs]
        return cls(
            origin,
            last,
            [edge - origin for edge in low],
            [edge - origin for edge in high],
            (kept[0] - origin, kept[1] - origin),
            kept[0] - start,
            torch.tensor(inside)[:, None],
            torch.tensor([above - below for below, above in pairs])[:, None],
        )


@dataclass
class Reader:
    """Collects one trial's small tensors layer by layer, and scores them.

    Attributes:
        trial: the prompt.
        generation: what it generated.
        steps: its answer steps; without any only ``headkv`` can be scored.
        methods: what to score.
        row: its place in the batch.
        width: columns of the padded prompts.
    """

    trial: Trial
    generation: Generation
    steps: Sequence[int]
    methods: Sequence[str]
    row: int
    width: int
    _facts: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _counts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _views: dict[tuple[Kind, int | None], _View] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._padding = self.width - len(self.trial.ids)
        ids, wanted = self.generation.ids, set(self.methods)
        first = self.width - 1  # the column that produces token 0
        anchors = range(self.width - min(scores.ANCHOR_ROWS, len(self.trial.ids)), self.width)
        # The step that stopped the generation is a step too.
        content = range(self.generation.content, len(ids) + self.generation.stopped)
        columns = {first + step for step in self.steps}
        if "headkv" in wanted:
            columns.update(anchors)
        if self.steps and not wanted.isdisjoint(("wu", "contrastive", "contrastive_mean")):
            columns.update(first + step for step in content)
        self._columns = range(min(columns), max(columns) + 1)
        start = self._columns.start
        self._anchors = [column - start for column in anchors]
        self._answer = [first + step - start for step in self.steps]
        self._content = [first + step - start for step in content]
        # Attention weights are wanted in these rows only.
        weighed = {*self._answer, *(self._anchors if "headkv" in wanted else ())}
        if "contrastive_mean" in wanted:
            weighed.update(self._content)
        between = range(min(weighed), max(weighed) + 1)
        # A few rows more cost less than copying rows that are not neighbours.
        self._weighed = list(between) if len(between) <= 1.5 * len(weighed) else sorted(weighed)

    @property
    def needs_effect(self) -> bool:
        """Whether `read` needs the unembedding rows' effect through the output projection."""
        return not {"locos", "dla"}.isdisjoint(self.methods)

    @property
    def _needs_top(self) -> bool:
        return not {"wu", "contrastive"}.isdisjoint(self.methods)

    def read(
        self,
        kept: LayerCapture,
        queries: Tensor,
        outputs: Tensor,
        gates: Tensor | None,
        keys_values: tuple[Tensor, Tensor, int],
        effect: Tensor | None,
    ) -> None:
        """Adds one layer.

        Args:
            kept: the layer.
            queries: ``kept.queries()``.
            outputs: ``kept.outputs()``.
            gates: ``kept.gates()``.
            keys_values: ``kept.keys_values()``.
            effect: W_O^T u of the answer steps' tokens, (T, H * d), where `needs_effect`.
        """
        view = self._view(kept.kind, kept.window)
        keys, values, first = keys_values
        keys, values = (
            whole[self.row, :, view.origin - first : view.end - first] for whole in (keys, values)
        )
        shift = self._columns.start - kept.columns.start
        query = queries[self.row, :, shift : shift + len(self._columns)]

        weights, totals, tops = [], [], []
        size = max(1, _CHUNK // (query.shape[0] * keys.shape[1]))
        for i in range(0, len(self._columns), size):
            part = slice(i, i + size)
            logits = scores.attention_logits(
                query[:, part],
                keys,
                view.low[part],
                view.high[part],
                scaling=kept.scaling,
                softcap=kept.softcap,
            )
            weighed = logits[:, _places([row - i for row in self._weighed if i <= row < i + size])]
            found = scores.needle_weights(weighed, view.needle, kept.sinks)
            weights.append(found[0])
            totals.append(found[1])
            if self._needs_top:
                # Rows before the first step of content are not wanted.
                tops.append(
                    scores.most_attended(logits[:, max(0, self._content[0] - i) :], view.needle)
                )
        on_needle = torch.cat(weights, 1)
        self._keep(mass=on_needle.sum(-1).T, total=torch.cat(totals, 1).T)
        self._counts.append((view.visible, view.keys))
        if tops:
            best, overlap = (torch.cat(part, 1).T for part in zip(*tops, strict=True))
            self._keep(best=torch.where(best >= 0, best + view.cut, -1), overlap=overlap)
        if effect is not None:
            rows = _places([shift + row for row in self._answer])
            z = outputs[self.row, :, rows]
            answer = on_needle[:, _places(self._among(self._answer))]
            written = scores.weighted_values(answer, values[:, slice(*view.needle)])
            if gates is not None:
                written = written * gates[self.row, :, rows]
            self._keep(
                all=scores.logit_contribution(z.transpose(0, 1), effect),
                needle=scores.logit_contribution(written.transpose(0, 1), effect),
            )

    def _among(self, rows: Sequence[int]) -> list[int]:
        """Where ``rows`` are among those that have attention weights."""
        return [self._weighed.index(row) for row in rows]

    def _view(self, kind: Kind, window: int | None) -> _View:
        """What this trial's rows see in layers of one kind."""
        if (kind, window) not in self._views:
            low, high = scores.visible_columns(self._columns, self._padding, kind, window)
            start, end = (edge + self._padding for edge in self.trial.needle)
            self._views[kind, window] = _View.of(low, high, start, end)
        return self._views[kind, window]

    def _keep(self, **facts: Tensor) -> None:
        for name, value in facts.items():
            self._facts[name].append(value.cpu())

    def scores(self) -> dict[str, Tensor]:
        """Per method the (layers read, heads) tensor, after all layers were read."""
        layers = len(self._facts["mass"])
        facts = {name: torch.cat(parts, 1) for name, parts in self._facts.items()}
        heads = facts["mass"].shape[1] // layers
        for name, parts in zip(("visible", "keys"), zip(*self._counts, strict=True), strict=True):
            facts[name] = torch.cat(parts, 1)[self._weighed].repeat_interleave(heads, 1)
        return {name: self._score(name, facts).view(layers, -1) for name in self.methods}

    def _score(self, method: str, facts: dict[str, Tensor]) -> Tensor:
        mass = facts["mass"]
        if method == "headkv":
            return scores.headkv(mass[self._among(self._anchors)])
        answer = self._among(self._answer)
        counts = (facts["visible"][answer], facts["keys"][answer])
        if method == "locos":
            return scores.locos(facts["needle"], facts["all"], *counts)
        if method == "dla":
            return scores.dla(facts["all"])
        if method == "attention_spatial":
            return scores.attention_spatial(mass[answer], facts["total"][answer], *counts)
        if method == "wu":
            # The step that stopped the generation copies nothing.
            generated = torch.tensor(self.generation.ids[self.generation.content :])
            needle = torch.tensor(self.trial.ids[slice(*self.trial.needle)])
            return scores.wu(facts["best"][: len(generated)], generated, needle)
        is_answer = torch.tensor([row in self._answer for row in self._content])
        if method == "contrastive":
            return scores.contrastive(facts["overlap"], is_answer)
        rows = self._among(self._content)
        mean = mass[rows] / facts["visible"][rows].clamp(min=1)
        return scores.contrastive(mean, is_answer)


def _places(rows: Sequence[int]) -> slice | list[int]:
    """An index of these rows: a slice, which copies nothing, where they are neighbours."""
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return list(rows)
