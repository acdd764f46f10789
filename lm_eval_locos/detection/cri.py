"""Causal patching (CRI): how much of the answer one head brings back on its own.

    >>> result.steps
    (0, 1)
    >>> cri(model, trial, result.ids, result.steps).shape
    torch.Size([30, 9])

The needle is replaced by as many filler tokens, and the answer that the clean prompt generated is
teacher-forced. Then, head by head, the head's clean output z is put back at every position
(DESIGN: the `output` site) and the gain in the answer's log-probability is its score. That is one
pass a head and two more (clean and corrupted), against one for all other methods together.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn

from lm_eval_locos.ablation import on_site, refuse_compiled
from lm_eval_locos.architecture import (
    Architecture,
    attention_implementation,
    describe,
    input_device,
)
from lm_eval_locos.detection import prefix
from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.errors import DataError

logger = logging.getLogger(__name__)


def haystack_filler(trial: Trial) -> tuple[int, ...]:
    """As many tokens as the needle has: those before it, or those after it where it comes early."""
    start, end = trial.needle
    count = end - start
    if start >= count:
        return trial.ids[start - count : start]
    rest = trial.ids[end:] or trial.ids[:start]
    if not rest:
        raise DataError("the prompt is nothing but the needle. Give filler tokens.")
    return tuple(rest[i % len(rest)] for i in range(count))


def cri(
    model: nn.Module,
    trial: Trial,
    generated: Sequence[int],
    steps: Sequence[int],
    *,
    filler: Sequence[int] | None = None,
    batch_size: int = 8,
    architecture: Architecture | None = None,
) -> Tensor:
    """Mean over answer steps of log p(token | head restored) - log p(token | needle replaced).

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one, in eval mode.
        trial: the clean prompt.
        generated: the tokens that it generated.
        steps: its answer steps, at least one.
        filler: token ids in the needle's place, as many as it has; default `haystack_filler`.
        batch_size: heads patched at a time; halved when memory runs out.
        architecture: ``describe(model)`` where it is known already.

    Returns:
        (layers with attention, heads), float64 on the CPU, in nats.

    Raises:
        DataError: no answer step, or filler of another length than the needle's.
        ModelError: unsupported or compiled model.
    """
    architecture = architecture or describe(model)
    refuse_compiled(model)
    if not steps:
        raise DataError("no answer step. Causal patching needs a trial that passes.")
    start, end = trial.needle
    filler = tuple(haystack_filler(trial) if filler is None else filler)
    if len(filler) != end - start:
        raise DataError(f"{len(filler)} filler tokens for a needle of {end - start}. Give as many.")
    answer = tuple(generated[: max(steps) + 1])
    clean = trial.ids + answer[:-1]
    corrupted = trial.ids[:start] + filler + trial.ids[end:] + answer[:-1]
    return _Patching(model, architecture, clean, corrupted, answer, steps, start).gains(batch_size)


class _Patching:
    """The passes of one trial; what stands before the needle is computed once for all of them."""

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        clean: tuple[int, ...],
        corrupted: tuple[int, ...],
        answer: tuple[int, ...],
        steps: Sequence[int],
        start: int,
    ) -> None:
        self.model, self.architecture = model, architecture
        self.clean, self.corrupted = clean, corrupted
        self.answer, self.steps = answer, list(steps)
        # The first pass over a cache cannot be empty, and without a cut everything is recomputed.
        self.past = 0 if prefix.why_not(architecture, len(clean)) else start

    @torch.inference_mode()
    def gains(self, batch_size: int) -> Tensor:
        with attention_implementation(self.architecture, self.architecture.kernel):
            return self._gains(batch_size)

    def _gains(self, batch_size: int) -> Tensor:
        self._prefix = None
        if self.past:
            before = self.clean[: self.past]
            self._prefix = prefix.prefill(self.model, self.architecture, before)
        outputs: list[Tensor] = []
        with ExitStack() as stack:
            for index in self.architecture.layers:
                # append gives None: the activations are left alone.
                stack.callback(on_site(self.architecture, index, "output", outputs.append).remove)
            self._log_probability(self.clean, 1)
        floor = self._log_probability(self.corrupted, 1)
        rows = []
        for layer, output in zip(self.architecture.layers, outputs, strict=True):
            heads = list(range(self.architecture.num_heads))
            found: list[Tensor] = []
            while heads:
                part = heads[:batch_size]
                try:
                    found.append(self._restored(layer, part, output))
                except RuntimeError as error:
                    if len(part) == 1 or not should_reduce_batch_size(error):
                        raise
                    batch_size = len(part) // 2
                    logger.warning("out of memory with %d heads at a time: halved", len(part))
                    clear_device_cache(garbage_collection=True)
                    continue
                heads = heads[len(part) :]
            rows.append(torch.cat(found) - floor)
        return torch.stack(rows)

    def _restored(self, layer: int, heads: Sequence[int], clean: Tensor) -> Tensor:
        """Log-probability of the answer with each head's clean output, (heads,)."""
        slices = self.architecture.slices("output").here

        def restore(activations: Tensor) -> Tensor:
            patched = activations.clone()
            for row, head in enumerate(heads):
                patched[row, :, slices[head]] = clean[0, :, slices[head]]
            return patched

        handle = on_site(self.architecture, layer, "output", restore)
        try:
            return self._log_probability(self.corrupted, len(heads))
        finally:
            handle.remove()

    def _log_probability(self, ids: tuple[int, ...], copies: int) -> Tensor:
        """Mean log-probability of the answer steps' tokens, (copies,), float64 on the CPU."""
        if self._prefix is None:
            cache = prefix.empty(self.model, self.architecture)
        else:
            lengths = [len(ids)] * copies
            cache = prefix.continued(
                self.model, self.architecture, self._prefix, lengths, self.past
            )
        device = input_device(self.model)
        fed = torch.tensor([ids[self.past :]], device=device).expand(copies, -1)
        # Early releases of some families need a mask to know how much is in the cache.
        mask = torch.ones(copies, len(ids), dtype=torch.long, device=device)
        logits = prefix.forward(
            self.model,
            cache,
            input_ids=fed,
            attention_mask=mask,
            logits_to_keep=len(self.answer),
        ).logits
        tokens = torch.tensor(self.answer, device=logits.device)
        chosen = logits.float().log_softmax(-1).gather(-1, tokens.expand(copies, -1)[..., None])
        return chosen[:, self.steps, 0].mean(1).double().cpu()
