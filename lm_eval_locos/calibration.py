"""What replaces an ablated head: constants measured on calibration prompts.

    >>> calibration = calibrate(model, token_ids, site="query", average="prompt")
    >>> constants(calibration, [Head(3, 1)], mode="mean", seed=0)
    {Head(layer=3, head=1): tensor([...])}

Everything is float64 while it is summed and padding never counts, so any batch size gives the same
means. The reference is section 4 of the design: mean per prompt and then over prompts (the paper's
code), or over all tokens alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lm_eval_locos.ablation import on_site
from lm_eval_locos.architecture import Architecture, Head, Site, describe, input_device
from lm_eval_locos.errors import DataError
from lm_eval_locos.files import expanded

Average = Literal["prompt", "token"]
Mode = Literal["mean", "zero", "resample"]
AVERAGES: tuple[Average, ...] = get_args(Average)
MODES: tuple[Mode, ...] = get_args(Mode)
MAX_TOKENS = 5000
"""Calibration prompts are cut to this many tokens (the paper's code)."""


@dataclass(frozen=True)
class Calibration:
    """Measured head activations.

    Attributes:
        means: shape (layers, heads, size of a head at the site), float32; zero in a layer without
            attention.
        samples: shape (prompts, layers, heads, size), float32: each prompt's value at one random
            position, what ``mode=resample`` draws from.
        num_tokens: real tokens measured.
    """

    means: Tensor
    samples: Tensor
    num_tokens: int

    @property
    def num_prompts(self) -> int:
        """Prompts measured."""
        return len(self.samples)

    @property
    def sha256(self) -> str:
        """Of the numbers; equal hashes mean equal ablations."""
        digest = hashlib.sha256()
        for tensor in (self.means, self.samples):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def calibrate(
    model: nn.Module,
    token_ids: Sequence[Sequence[int]],
    *,
    site: Site,
    average: Average = "prompt",
    batch_size: int = 1,
    seed: int = 42,
    architecture: Architecture | None = None,
    progress: bool = True,
) -> Calibration:
    """Measures every head's activation at ``site`` over calibration prompts.

    Args:
        model: as for `ablate`; no ablation may be in force.
        token_ids: the prompts, each at least one token, special tokens included.
        average: ``prompt``: mean over the tokens of each prompt, then over prompts; ``token``: over
            all tokens.
        batch_size: prompts a forward pass, grouped by length.
        seed: of the positions in ``samples``.

    Raises:
        DataError: no prompts, or an empty one.
    """
    if not token_ids or not all(token_ids):
        raise DataError(
            f"calibration has {len(token_ids)} prompts"
            f"{' and one of them is empty' if token_ids else ''}. Expected at least one prompt "
            "and one token in each; 50 prompts are usual."
        )
    architecture = architecture or describe(model, tensor_parallel=True)
    slices = architecture.slices(site)
    shape = (architecture.num_layers, architecture.num_heads, slices.size)
    prompt_means = torch.zeros(len(token_ids), *shape, dtype=torch.float64)
    samples = torch.zeros(len(token_ids), *shape)
    lengths = torch.tensor([len(ids) for ids in token_ids])
    positions = [
        random.Random(f"{seed}-{i}").randrange(len(ids)) for i, ids in enumerate(token_ids)
    ]

    by_length = sorted(range(len(token_ids)), key=lambda i: len(token_ids[i]))
    device = input_device(model)
    with tqdm(total=len(token_ids), desc="Calibrating", disable=not progress) as bar:
        for start in range(0, len(by_length), batch_size):
            rows = by_length[start : start + batch_size]
            ids, mask = _right_padded([token_ids[i] for i in rows])
            at = torch.tensor([positions[i] for i in rows])

            def measure(layer: int, x: Tensor, rows=rows, mask=mask, at=at) -> None:  # noqa: ANN001
                # float64 does not exist on some devices (mps), hence the move first.
                wide = x.detach().cpu().double()
                sums = torch.einsum("bsd,bs->bd", wide, mask.double())
                means = sums / mask.sum(1, keepdim=True)
                prompt_means[rows, layer] = slices.split(means)
                picked = wide[torch.arange(len(rows)), at]
                samples[rows, layer] = slices.split(picked).float()

            with ExitStack() as stack, torch.no_grad():  # inference mode breaks some 4 bit weights
                for layer in architecture.layers:
                    handle = on_site(architecture, layer, site, _reader(measure, layer))
                    stack.callback(handle.remove)
                model(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    use_cache=False,
                    logits_to_keep=1,
                )
            bar.update(len(rows))
    if not slices.complete:
        _sum_over_ranks((prompt_means, samples), device)
    weights = lengths.double() if average == "token" else torch.ones(len(lengths)).double()
    means = torch.einsum("p,plhd->lhd", weights / weights.sum(), prompt_means).float()
    return Calibration(means, samples, int(lengths.sum()))


def _sum_over_ranks(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Adds up, in place, what each rank measured of its own heads; the others' are zero."""
    for tensor in tensors:
        there = tensor.to(device)
        torch.distributed.all_reduce(there)
        tensor.copy_(there)


def _reader(measure: Callable[[int, Tensor], None], layer: int) -> Callable[[Tensor], None]:
    return lambda activations: measure(layer, activations)


def _right_padded(token_ids: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, token_ids))
    ids = torch.zeros(len(token_ids), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(token_ids):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        mask[row, : len(prompt)] = 1
    return ids, mask


def constants(
    calibration: Calibration, heads: Iterable[Head], *, mode: Mode, seed: int
) -> dict[Head, Tensor]:
    """What each head is replaced by: zero, its mean, or its value in a random calibration prompt.

    A resampled head keeps one value for the whole run (drawn with ``seed``), so that results do not
    depend on the batch a request is in.
    """
    if mode == "zero":
        return {head: torch.zeros(calibration.means.shape[-1]) for head in heads}
    if mode == "mean":
        return {head: calibration.means[head.layer, head.head] for head in heads}
    return {
        head: calibration.samples[_drawn(f"{seed}-{head}", calibration.num_prompts)][head]
        for head in heads
    }


def _drawn(seed: str, size: int) -> int:
    """A number below ``size``, the same for the same text on every platform."""
    return random.Random(seed).randrange(size)


# -- prompts from a file -----------------------------------------------------------------------


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """Calibration prompts from a file: ``.jsonl`` with ``text``, else text, one prompt a line.

    Raises:
        DataError: the file cannot be read, has no prompts, or a line without ``text``.
    """
    name = os.fspath(path)
    try:
        # Not splitlines: it would also take U+2028 and others, which text may hold, for line ends.
        lines = expanded(name).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:  # also bytes that are no UTF-8, a name with a NUL
        raise DataError(
            f"calibration={name}: cannot be read ({error}). Give a text file with one prompt a "
            "line, a JSONL file with a text field, or the name of a task family."
        ) from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompts.append(_text(line, name, number) if name.endswith(".jsonl") else line)
    if not prompts:
        raise DataError(f"calibration={name} has no prompts. Expected about 50, one a line.")
    return prompts


def _text(line: str, name: str, number: int) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"calibration={name}, line {number}: not JSON ({error}). Expected "
            '{"text": "..."} on every line.'
        ) from None
    text = row.get("text") if isinstance(row, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise DataError(
            f'calibration={name}, line {number}: no text in it. Expected {{"text": "..."}} on '
            "every line."
        )
    return text
