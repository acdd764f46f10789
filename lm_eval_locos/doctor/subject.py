"""The model under examination: its prompt, and the runs that the checks share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lm_eval_locos.ablation import ablate, on_site
from lm_eval_locos.architecture import SITES, Architecture, Head, Site, base_model, input_device
from lm_eval_locos.detection import prefix
from lm_eval_locos.detection.capture import capturing
from lm_eval_locos.detection.captured import Capture
from lm_eval_locos.detection.scores import ANCHOR_ROWS, visible_columns
from lm_eval_locos.doctor.reference import EagerLayer, eager_layers

Finding = tuple[bool | None, str]
"""Whether a check passed (None: it does not apply), and what it saw."""
STEPS = 3
"""Tokens after the prompt that are scored as if they had been generated."""
LENGTH = 100
LONGEST_WINDOW = 2048
"""The prompt is longer than the smallest window where that is not above this."""
_SHORT = 16  # what one head does to its layer shows in a few tokens
_MOST_HEADS = 6  # of a layer, where every one takes a run
_NEEDLE = 8
_TOLERANCES = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
_TOLERANCE = 1e-3  # in full precision
_TEXT = """\
The harbour was quiet before dawn. Two boats lay at the stone pier, and a boy counted the crates
that had come from the islands: oranges, dried fish, a clock wrapped in straw. His sister Marta
kept the list in a green notebook, because their uncle never trusted numbers that nobody had
written down. When the bell rang seven, the baker opened his window, bread went into baskets, and
somebody began to sing about a river in the north that freezes every winter and carries whole
forests to the sea each spring. What colour was the book? Nobody asked, yet everyone knew it.
"""


@dataclass(frozen=True)
class Trace:
    """One run over the short prompt of S tokens.

    Attributes:
        logits: (S, vocabulary).
        sites: per site and layer the activations there, after an ablation, (1, S, width).
    """

    logits: Tensor
    sites: dict[Site, dict[int, Tensor]]


@dataclass(frozen=True)
class Recording:
    """One captured run over the prompt and then token by token.

    Attributes:
        capture: what detection would keep.
        inputs: per layer the input of its output module in the same rows, (R, width), on the CPU.
    """

    capture: Capture
    inputs: dict[int, Tensor]


@dataclass
class Subject:
    """A model with its description, the one that is being checked."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    architecture: Architecture

    # -- the prompt ------------------------------------------------------------------------

    @cached_property
    def ids(self) -> list[int]:
        """The prompt's tokens, and after them `STEPS` more."""
        return _token_ids(self.tokenizer, base_model(self.model).config, self.length + STEPS)

    @property
    def length(self) -> int:
        """Tokens of the prompt, if the model takes so many."""
        config = base_model(self.model).config.get_text_config(decoder=True)
        room = (getattr(config, "max_position_embeddings", None) or LONGEST_WINDOW * 2) - STEPS
        window = self.window
        if window is None or window > LONGEST_WINDOW:
            return min(LENGTH, room)
        return min(max(LENGTH, window + LENGTH // 3), room)

    @property
    def window(self) -> int | None:
        """The smallest window of any layer."""
        windows = [layer.window for layer in self.architecture.layers.values()]
        return min((window for window in windows if window is not None), default=None)

    @property
    def needle(self) -> tuple[int, int]:
        """[start, end) in the prompt: across the edge of the smallest window, or in the middle."""
        middle = self.length // 2
        if self.window is not None and self.window < self.length:
            layers = self.architecture.layers.values()
            kind = next(layer.kind for layer in layers if layer.window == self.window)
            middle = visible_columns([self.length - 1], 0, kind, self.window)[0][0]
        start = min(middle - _NEEDLE // 2, self.length - _NEEDLE)
        return start, start + _NEEDLE

    # -- what is looked at -----------------------------------------------------------------

    @property
    def layers(self) -> list[int]:
        """First, middle and last layer with attention."""
        layers = list(self.architecture.layers)
        return [layers[i] for i in spread(len(layers), 3)]

    @property
    def heads(self) -> list[Head]:
        """Some heads of those layers, first and last among them."""
        some = spread(self.architecture.num_heads, _MOST_HEADS)
        return [Head(layer, head) for layer in self.layers for head in some]

    @property
    def tolerance(self) -> float:
        """Largest relative error of what went through the whole model in its dtype."""
        return _TOLERANCES.get(base_model(self.model).dtype, _TOLERANCE)

    @property
    def coarse(self) -> bool:
        """Whether the model runs in half precision."""
        return self.tolerance > _TOLERANCE

    @property
    def tight(self) -> float:
        """Largest relative error of what one layer's own numbers must give again."""
        return self.tolerance / 10

    def constant(self, head: Head, site: Site) -> Tensor:
        """Something to replace a head by: random, as large as what it replaces."""
        plain = self.plain.sites[site][head.layer]
        slices = self.architecture.slices(site)
        generator = torch.Generator().manual_seed(head.head)
        size = plain[..., slices.here[head.head]].float().std()
        return torch.randn(slices.size, generator=generator) * size

    # -- runs ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return input_device(self.model)

    def fed(self, ids: Sequence[int]) -> Tensor:
        """Token ids as the model takes them, (1, S)."""
        return torch.tensor([list(ids)], device=self.device)

    def padded(self, padding: int) -> tuple[list[list[int]], dict[str, Tensor]]:
        """The prompt, and the same without its first tokens, as a left-padded batch."""
        prompt = self.ids[: self.length]
        rows = [prompt, prompt[padding:]]
        ids = self.fed([*prompt, *[0] * padding, *rows[1]]).view(2, -1)
        mask = torch.ones_like(ids)
        mask[1, :padding] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return rows, {"input_ids": ids, "attention_mask": mask, "position_ids": positions}

    def alone(self, rows: Sequence[Sequence[int]]) -> list[Tensor]:
        """The last logits of each prompt by itself, without a cache."""
        options = {"use_cache": False, "logits_to_keep": 1}
        return [self.model(input_ids=self.fed(row), **options).logits[0, -1] for row in rows]

    def trace(self, values: Mapping[Head, Tensor] | None = None, site: Site = "query") -> Trace:
        """Runs the short prompt with heads replaced; sees `layers`."""
        sites: dict[Site, dict[int, Tensor]] = {name: {} for name in SITES}

        with ExitStack() as stack:
            stack.enter_context(
                ablate(self.model, values or {}, site=site, architecture=self.architecture)
            )
            for name in SITES:
                for layer in self.layers:
                    # Hooks run in the order in which they were added: this one sees the ablation.
                    keep = _keeper(sites[name], layer)
                    stack.callback(on_site(self.architecture, layer, name, keep).remove)
            ids = self.fed(self.ids[:_SHORT])
            logits = self.model(input_ids=ids, use_cache=False).logits[0]
        return Trace(logits.to("cpu", copy=True), sites)

    @cached_property
    def plain(self) -> Trace:
        """The short prompt with nothing ablated."""
        return self.trace()

    @cached_property
    def deterministic(self) -> bool:
        """Whether a second run gives the same bits; some kernels of accelerators do not."""
        return torch.equal(self.trace().logits, self.plain.logits)

    def same(self, left: Tensor, right: Tensor) -> bool:
        """Whether two runs agree: bit by bit, where runs of this model do so at all."""
        if self.deterministic:
            return torch.equal(left, right)
        return relative_error(left, right) <= self.tight

    def record(self, values: Mapping[Head, Tensor] | None = None) -> Recording:
        """Runs prompt and following tokens under capture, with queries replaced."""
        first = self.length - ANCHOR_ROWS
        inputs: dict[int, list[Tensor]] = {layer: [] for layer in self.architecture.layers}
        pieces = [self.ids[: self.length], *([token] for token in self.ids[self.length : -1])]
        with ExitStack() as stack:
            for layer, into in inputs.items():
                keep = _last_rows(into)
                stack.callback(on_site(self.architecture, layer, "output", keep).remove)
            stack.enter_context(ablate(self.model, values or {}, architecture=self.architecture))
            cache = prefix.empty(self.model, self.architecture)
            capture = stack.enter_context(capturing(self.model, self.architecture, first_row=first))
            for piece in pieces:
                ids = self.fed(piece)
                prefix.forward(self.model, cache, input_ids=ids, logits_to_keep=1)
        return Recording(capture, {layer: torch.cat(rows) for layer, rows in inputs.items()})

    @cached_property
    def recording(self) -> Recording:
        """The captured run with nothing ablated."""
        return self.record()

    @property
    def rows(self) -> range:
        """The positions that produce the scored tokens."""
        return range(self.length - 1, self.length - 1 + STEPS)

    @cached_property
    def eager(self) -> dict[int, EagerLayer]:
        """Attention matrices' `rows` and all values, of every layer with attention, from an eager
        run."""
        ids = self.fed(self.ids[:-1])
        return eager_layers(self.model, self.architecture, ids, self.rows)


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below ``count``, evenly, first and last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value expected; infinite for a nonzero for a zero."""
    difference = float((got.double() - expected.double()).abs().max())
    largest = float(expected.double().abs().max())
    return difference / largest if largest else (float("inf") if difference else 0.0)


def _keeper(into: dict[int, Tensor], layer: int):  # noqa: ANN202
    def keep(activations: Tensor) -> None:
        into[layer] = activations.detach().to("cpu", copy=True)

    return keep


def _last_rows(into: list[Tensor]):  # noqa: ANN202
    def keep(activations: Tensor) -> None:
        into.append(activations[0, -ANCHOR_ROWS:].detach().to("cpu", copy=True))

    return keep


def _token_ids(tokenizer: PreTrainedTokenizerBase, config: object, count: int) -> list[int]:
    """``count`` tokens of English text; of no text at all where the tokenizer knows no English."""
    ids = tokenizer(_TEXT)["input_ids"]
    if len(set(ids)) >= len(ids) / 3 and len(ids) >= LENGTH // 2:
        more = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
        while len(ids) < count:
            ids = ids + more
        return ids[:count]
    # Tokens that are all alike (<unk>) would have equal values: no ablation would show.
    reserved = {*tokenizer.all_special_ids, *_reserved(config)}
    ordinary = [token for token in range(len(tokenizer)) if token not in reserved]
    generator = random.Random(0)
    return [generator.choice(ordinary) for _ in range(count)]


def _reserved(config: object) -> set[int]:
    """Tokens with a meaning of their own, such as the place of an image."""
    return {
        value
        for key, value in vars(config).items()
        if key.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
