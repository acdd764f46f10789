"""From what was captured of a batch to the scores of one of its trials.

This is the seam between `capture` (what is kept), `steps` (which rows matter) and `scores` (the
arithmetic). All rows of a trial are neighbours: the last prompt positions, of which the very last
produces token 0, then one row for each token that was fed back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lm_eval_locos.detection import scores
from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.capture import LayerCapture
from lm_eval_locos.detection.steps import Generation


@dataclass
class Reader:
    """Collects one trial's scores, layer by layer.

    Attributes:
        trial: the prompt.
        generation: what it generated.
        steps: its answer steps.
        methods: what to score; only ``headkv`` can do without answer steps.
        row: its place in the batch.
        width: columns of the padded prompts.
    """

    trial: Trial
    generation: Generation
    steps: Sequence[int]
    methods: Sequence[str]
    row: int
    width: int
    _layers: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._padding = self.width - len(self.trial.ids)
        self._anchors = min(scores.ANCHOR_ROWS, len(self.trial.ids))
        self._layers = {method: [] for method in self.methods}

    @property
    def needs_effect(self) -> bool:
        """Whether `read` needs the unembedding rows' effect through the output projection."""
        return not {"locos", "dla"}.isdisjoint(self.methods)

    def read(
        self, kept: LayerCapture, queries: Tensor, outputs: Tensor, effect: Tensor | None
    ) -> None:
        """Adds one layer.

        Args:
            kept: the layer.
            queries: ``kept.queries()``.
            outputs: ``kept.outputs()``.
            effect: W_O^T u of the answer steps' tokens, (T, H * d), where `needs_effect`.
        """
        generation = self.generation
        # Decoding steps, the one that stopped the generation included.
        decoded = len(generation.ids) + generation.stopped if self.steps else 1
        start = self.width - self._anchors - kept.columns[0]
        rows = slice(start, start + self._anchors + decoded - 1)
        keys, values, first = kept.keys_values()
        shift = self._padding - first  # from a token's position to its place among the keys
        place = (self.trial.needle[0] + shift, self.trial.needle[1] + shift)
        needle = scores.read_needle(
            queries[self.row, :, rows],
            keys[self.row],
            values[self.row],
            scores.visible_columns(
                kept.columns[rows], first, keys.shape[2], self._padding, kept.window
            ),
            place,
            scaling=kept.scaling,
            softcap=kept.softcap,
            sinks=kept.sinks,
            top=not {"wu", "contrastive"}.isdisjoint(self.methods),
        )
        answer = needle[[self._anchors - 1 + step for step in self.steps]]
        content = needle[range(self._anchors - 1 + generation.content, len(needle.mass))]
        visible, keys_seen = answer.visible, answer.keys
        if effect is not None:
            at = [rows.start + self._anchors - 1 + step for step in self.steps]
            total = scores.logit_contribution(outputs[self.row][:, at].transpose(0, 1), effect)
            on_needle = scores.logit_contribution(answer.output, effect)
        for method, found in self._layers.items():
            if method == "locos":
                score = scores.locos(on_needle, total, visible, keys_seen)
            elif method == "dla":
                score = scores.dla(total)
            elif method == "attention_spatial":
                score = scores.attention_spatial(answer.mass, answer.total, visible, keys_seen)
            elif method == "headkv":
                score = scores.headkv(needle.mass[: self._anchors])
            elif method == "wu":
                score = self._wu(content.top[..., 0] - shift)
            elif method == "contrastive":
                score = self._contrast(scores.top_overlap(content.top, place))
            else:
                score = self._contrast(content.mass / content.visible.clamp(min=1)[:, None])
            found.append(score.cpu())

    def _wu(self, argmax: Tensor) -> Tensor:
        """``argmax``: token positions; the step that stopped the generation copies nothing."""
        generated = self.generation.ids[self.generation.content :]
        return scores.wu(
            argmax[: len(generated)],
            torch.tensor(generated, device=argmax.device),
            torch.tensor(self.trial.ids, device=argmax.device),
            self.trial.needle,
        )

    def _contrast(self, signal: Tensor) -> Tensor:
        first = self.generation.content
        steps = range(first, first + len(signal))
        answer = torch.tensor([step in self.steps for step in steps], device=signal.device)
        return scores.contrastive(signal, answer)

    def scores(self) -> dict[str, Tensor]:
        """Per method the (layers, heads) tensor of what was read."""
        return {method: torch.stack(layers) for method, layers in self._layers.items()}
