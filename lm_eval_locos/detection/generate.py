"""Batched greedy generation with capture: what a trial generates, and every head's scores in it.

    >>> engine = Engine(model, tokenizer)
    >>> for index, result in engine.run_all(trials):
    ...     print(index, result.passed, result.text, result.scores["locos"].shape)
    0 True Yuki. torch.Size([30, 9])

The decoding loop is our own and not `generate`: to stop at a newline but not while thinking, to go
on from a cache that holds a prompt's beginning, and to let go of the cache before it grows are
awkward there, while greedy decoding itself is one argmax. It applies no logits processor (a
repetition penalty in a generation config would change the tokens).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from transformers import Cache, PreTrainedTokenizerBase

from lm_eval_locos.architecture import (
    Architecture,
    base_model,
    describe,
    input_device,
    plain_weight,
)
from lm_eval_locos.detection import prefix, scores
from lm_eval_locos.detection.batches import Batch, Trial, plan, reusable
from lm_eval_locos.detection.capture import capturing
from lm_eval_locos.detection.captured import Capture
from lm_eval_locos.detection.reader import Reader
from lm_eval_locos.detection.steps import (
    MAX_NEW_TOKENS,
    Generation,
    Stopping,
    answer_steps,
    eos_tokens,
    generated_text,
    passes,
)
from lm_eval_locos.errors import LocosError, ModelError

logger = logging.getLogger(__name__)

_PIECE_CPU = 256  # tokens prefilled at a time where the kernel cannot skip what is masked
_PIECE = 2048


@dataclass(frozen=True)
class TrialResult:
    """What a trial gave.

    Attributes:
        ids: generated tokens, without the one that stopped the generation.
        text: their text, thinking left out.
        steps: the answer steps; their number weighs the trial in equation 4.
        passed: whether the trial counts.
        scores: per method a (layers with attention, heads) float64 tensor on the CPU. A trial that
            does not pass has ``headkv`` only, which needs no generation.
    """

    ids: tuple[int, ...]
    text: str
    steps: tuple[int, ...]
    passed: bool
    scores: dict[str, Tensor]


class Engine:
    """Runs trials on one model.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one; put in eval mode.
        tokenizer: its tokenizer.
        methods: of `scores.METHODS` and `scores.VARIANTS`.
        max_new_tokens: limit of the generation.
        make_cache: makes the key/value cache of a batch; default: a dynamic cache.

    Raises:
        LocosError: unknown method, unsupported model.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        methods: Sequence[str] = scores.METHODS,
        max_new_tokens: int = MAX_NEW_TOKENS,
        make_cache: Callable[[], Cache] | None = None,
    ) -> None:
        known = scores.METHODS + scores.VARIANTS
        for method in methods:
            if method not in known:
                raise LocosError(f"method {method!r} is not known. Use some of {', '.join(known)}.")
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.methods = tuple(methods)
        self.architecture: Architecture = describe(model)
        self.stopping = Stopping(tokenizer, eos_tokens(model, tokenizer), max_new_tokens)
        self._make_cache = make_cache
        self._shared: tuple[tuple[int, ...], Cache] | None = None
        if not {"locos", "dla"}.isdisjoint(self.methods):
            self._unembedding()  # refused before anything is generated

    # -- planning --------------------------------------------------------------------------

    def plan(
        self,
        trials: Sequence[Trial],
        *,
        batch_size: int | Literal["auto"] = "auto",
        share: bool = True,
    ) -> list[Batch]:
        """The batches that cover the trials; see `lm_eval_locos.detection.batches.plan`.

        Where the cache cannot be cut at the needle nothing is shared, and the log says why.
        """
        if share and (reason := self.cannot_share(trials)) is not None:
            logger.warning("every prompt is prefilled in full: %s", reason)
            share = False
        if batch_size == "auto":
            batch_size = self.batch_size(max((len(trial.ids) for trial in trials), default=1))
        return plan(trials, batch_size=batch_size, share=share)

    def cannot_share(self, trials: Sequence[Trial]) -> str | None:
        """Why the text before the needle cannot be prefilled once, or None where it can."""
        if self._make_cache is not None:
            return (
                f"a {type(self._make_cache()).__name__} was asked for, and only a dynamic cache "
                "in full precision can be cut at the needle"
            )
        longest = max((len(trial.ids) for trial in trials), default=0)
        return prefix.why_not(self.architecture, longest)

    def batch_size(self, longest: int) -> int:
        """A batch size that fits the free memory, for prompts of up to ``longest`` tokens."""
        config = base_model(self.model).config.get_text_config(decoder=True)
        layout, weight = self.architecture, self._unembedding()
        width = layout.query_slices.size + layout.output_slices.size
        kv = len(layout.layers) * layout.num_kv_heads * width
        state = 6 * layout.hidden_size + 3 * int(getattr(config, "intermediate_size", 0))
        tokens = longest + self.stopping.max_new_tokens
        # Keys and values, the activations of one layer, the mask of a padded batch.
        need = tokens * (kv + state) * weight.element_size() + 5 * tokens * min(tokens, _PIECE)
        device = weight.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            most = 32
        else:
            # Without an accelerator prefill gains nothing from a batch, decoding a little.
            free = psutil.virtual_memory().available
            most = 8
        return max(1, min(most, int(0.5 * free / need)))

    # -- running ---------------------------------------------------------------------------

    def run_all(
        self,
        trials: Sequence[Trial],
        *,
        batch_size: int | Literal["auto"] = "auto",
        share: bool = True,
    ) -> Iterator[tuple[int, TrialResult]]:
        """Every trial's index and result, in the order in which they finish."""
        for batch in self.plan(trials, batch_size=batch_size, share=share):
            yield from zip(batch.members, self.run(trials, batch), strict=True)

    def run(self, trials: Sequence[Trial], batch: Batch) -> list[TrialResult]:
        """The results of one batch, in the order of its members.

        Out of memory, the batch runs as two halves.
        """
        members = batch.members
        try:
            return self._run([trials[i] for i in members], batch.shared)
        except RuntimeError as error:
            if len(members) == 1 or not should_reduce_batch_size(error):
                raise
        half = len(members) // 2
        logger.warning("out of memory with %d trials in a batch: halved", len(members))
        clear_device_cache(garbage_collection=True)
        halves = [Batch(part, batch.shared) for part in (members[:half], members[half:])]
        return [result for part in halves for result in self.run(trials, part)]

    @torch.no_grad()  # inference mode breaks some 4 bit weights
    def _run(self, trials: Sequence[Trial], shared: tuple[int, ...]) -> list[TrialResult]:
        width = max(len(trial.ids) for trial in trials)
        fed = max(len(trial.ids) - reusable(trial.ids, shared) for trial in trials)
        past = width - fed
        cache = self._cache([len(trial.ids) for trial in trials], shared, past)
        first_row = max(past, width - scores.ANCHOR_ROWS)
        with capturing(self.model, self.architecture, first_row=first_row, seen=past) as capture:
            generations = self._generate(trials, cache, past, capture)
        # The capture holds what scoring needs; a dynamic cache's tensors are the same ones.
        del cache
        return self._results(trials, generations, capture, width)

    def _generate(
        self, trials: Sequence[Trial], cache: Cache, past: int, capture: Capture
    ) -> list[Generation]:
        """Greedy decoding of a left-padded batch whose first ``past`` columns are in the cache."""
        lengths = [len(trial.ids) for trial in trials]
        width = max(lengths)
        device = input_device(self.model)
        ids = torch.zeros(len(trials), width, dtype=torch.long)
        padding = torch.tensor([width - length for length in lengths])
        for row, trial in enumerate(trials):
            ids[row, width - lengths[row] :] = torch.tensor(trial.ids)
        columns = torch.arange(width + self.stopping.max_new_tokens)
        mask = (columns >= padding[:, None]).long().to(device)
        positions = (columns - padding[:, None]).clamp(min=0).to(device)
        padded = bool(padding.any())
        generations = [self.stopping.start(trial.ids) for trial in trials]

        def step(fed: Tensor, end: int) -> Tensor:
            """The next token of each sequence, after ``fed``, which ends before column ``end``."""
            capture.release()
            logits = prefix.forward(
                self.model,
                cache,
                input_ids=fed.to(device),
                attention_mask=mask[:, :end] if padded else None,
                position_ids=positions[:, end - fed.shape[1] : end],
                logits_to_keep=1,
            ).logits
            return logits[:, -1].argmax(-1)

        # Kernels skip the upper triangle of a plain causal mask only. Where the mask is another
        # one, pieces leave out most of that triangle, and the mask stays small; so do attention
        # matrices where the family has no kernel without them.
        eager = self.architecture.kernel == "eager"
        size = self._piece if padded or past or eager else width
        for start in range(past, width, size):
            end = min(start + size, width)
            chosen = step(ids[:, start:end], end)
        while True:
            for generation, token in zip(generations, chosen.tolist(), strict=True):
                generation.add(token)
            if all(generation.ended for generation in generations):
                return generations
            end += 1
            chosen = step(chosen[:, None], end)

    @property
    def _piece(self) -> int:
        """Tokens that are fed at a time where a whole prompt would cost too much."""
        return _PIECE_CPU if input_device(self.model).type == "cpu" else _PIECE

    def _cache(self, lengths: Sequence[int], shared: tuple[int, ...], past: int) -> Cache:
        """A cache that holds the first ``past`` columns of a left-padded batch."""
        if self._make_cache is not None:
            return self._make_cache()
        if past == 0:
            return prefix.empty(self.model, self.architecture)
        if self._shared is None or self._shared[0] != shared:
            self._shared = None  # frees the former one first
            before = prefix.prefill(self.model, self.architecture, shared, piece=self._piece)
            self._shared = (shared, before)
        return prefix.continued(self.model, self.architecture, self._shared[1], lengths, past)

    def release(self) -> None:
        """Frees the keys and values of the last shared prefix."""
        self._shared = None

    # -- scoring ---------------------------------------------------------------------------

    @torch.inference_mode()
    def _results(
        self,
        trials: Sequence[Trial],
        generations: Sequence[Generation],
        capture: Capture,
        width: int,
    ) -> list[TrialResult]:
        readers, results = [], []
        for row, (trial, generation) in enumerate(zip(trials, generations, strict=True)):
            text = generated_text(generation.ids[generation.content :], self.tokenizer)
            steps = answer_steps(generation.ids, trial.gold, self.tokenizer, generation.content)
            passed = passes(trial.gold, text, steps)
            results.append(TrialResult(tuple(generation.ids), text, tuple(steps), passed, {}))
            methods = [m for m in self.methods if passed or m == "headkv"]
            if methods:
                scored = steps if passed else []
                readers.append(Reader(trial, generation, scored, methods, row, width))
        answers = [self._answer_rows(reader) for reader in readers]
        for index, layer in self.architecture.layers.items():
            kept = capture.layers[index]
            captured = kept.queries(), kept.outputs(), kept.gates(), kept.keys_values()
            for reader, u in zip(readers, answers, strict=True):
                effect = None if u is None else scores.direct_effect(layer.output, u)
                reader.read(kept, *captured, effect)
        for reader in readers:
            results[reader.row].scores.update(reader.scores())
        return results

    def _answer_rows(self, reader: Reader) -> Tensor | None:
        """The unembedding rows of a trial's answer tokens, (T, hidden), float32."""
        if not reader.needs_effect:
            return None
        return self._unembedding()[[reader.generation.ids[step] for step in reader.steps]].float()

    def _unembedding(self) -> Tensor:
        weight = plain_weight(self.architecture.unembedding)
        if weight is None:
            raise ModelError(
                f"the unembedding is a {type(self.architecture.unembedding).__name__} without "
                "plain weights. Load the model with an output layer that is neither quantised nor "
                "offloaded."
            )
        return weight
