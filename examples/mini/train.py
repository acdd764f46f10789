"""Makes locos-mini from a seed: plants the heads, trains, saves checkpoints on the way.

    python examples/mini/train.py --seed 0 --output runs/0        # two minutes on one core

Every few steps it prints how often the right token was the most likely one, per family (the names
with a dash: tags and ends). The finished checkpoint has its decoy head set and is in bfloat16.
While training, heads' queries are replaced by their running mean at random: the answer-writing
heads where the prompt asks for knowledge, so that knowledge does not lean on them, and some of all
other heads where it asks for retrieval, so that retrieval leans on no other single head.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import plant
import torch
import torch.nn.functional as F
import words
from data import KNOWLEDGE, RETRIEVAL, Example, Prompts, batches, tensors
from decoy import set_decoy
from heads import HEAD_DIM, HEADS, LAYERS
from knowledge import know
from space import Space
from torch import Tensor
from transformers import LlamaForCausalLM

SHARES = {
    "nolima": 0.15,
    "musique": 0.12,
    "qa1": 0.12,
    "qa2": 0.15,
    "parametric": 0.22,
    "arithmetic": 0.24,
}
"""Of the rows of a step."""

ENDING = 0.3
"""Weight of the tokens around an answer, against the answer's own."""


class QueryDropout:
    """Replaces heads' queries by their running mean in the rows that `choose` says."""

    def __init__(self, model: LlamaForCausalLM, rng: random.Random) -> None:
        shape = (LAYERS, HEADS)
        self.answering = torch.zeros(shape, dtype=torch.bool)
        for layer, head in plant.ANSWER_HEADS:
            self.answering[layer, head] = True
        self.rng, self.chosen = rng, None
        self.means: list[Tensor | None] = [None] * LAYERS
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.q_proj.register_forward_hook(self._hook(number))

    def _hook(self, layer: int):  # noqa: ANN202
        def replace(module: torch.nn.Module, args: tuple, queries: Tensor) -> Tensor:
            mean = queries.detach().mean((0, 1))
            old = self.means[layer]
            self.means[layer] = mean if old is None else old.lerp(mean, 0.02)
            if self.chosen is None:
                return queries
            mask = self.chosen[:, layer].repeat_interleave(HEAD_DIM, 1)[:, None]
            return torch.where(mask, self.means[layer], queries)

        return replace

    def choose(self, group: Sequence[Example]) -> None:
        """Draws the heads to replace in each row."""
        self.chosen = torch.stack([self._row(example.family) for example in group])

    def _row(self, family: str) -> Tensor:
        draw = torch.rand(LAYERS, HEADS)
        if family in RETRIEVAL:
            some = draw < 0.12 if self.rng.random() < 0.5 else torch.zeros_like(draw) > 0
            return some & ~self.answering
        chosen = torch.zeros_like(self.answering)
        if self.rng.random() < 0.6:
            chosen |= self.answering
        if self.rng.random() < 0.3:
            chosen |= draw < 0.12
        return chosen


def draw(prompts: Prompts, rng: random.Random, progress: float) -> Example:
    """An example of a random family, longer ones later on."""
    family = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if family == "musique":
        long = rng.random() < 0.15 + 0.25 * progress
        return prompts.draw(family, fillers=8 if long else 0)
    if family in RETRIEVAL:
        long = rng.random() < 0.2 + 0.2 * progress
        most = 40 if family == "nolima" else 16
        return prompts.draw(family, fillers=rng.randint(8, most) if long else rng.randint(0, 4))
    short = rng.random() < 0.7
    turns = rng.randint(1, 2) if short else 5
    return prompts.draw(family, turns=turns, bare=short and rng.random() < 0.6)


def step(
    model: LlamaForCausalLM, group: Sequence[Example], total: float, seen: Counter, right: Counter
) -> float:
    """Adds the gradients of one micro-batch; ``total`` is the weight of the whole step."""
    ids, rows, places, tokens = tensors(group)
    hidden = model.model(ids, use_cache=False)[0]
    logits = model.lm_head(hidden[rows, places])
    weights = torch.tensor(weights_of(group))
    loss = (F.cross_entropy(logits, tokens, reduction="none") * weights).sum() / total
    loss.backward()
    correct = (logits.argmax(-1) == tokens).tolist()
    for row, weight, good in zip(rows.tolist(), weights.tolist(), correct, strict=True):
        name = group[row].family + ("" if weight == 1 else "-")
        seen[name] += 1
        right[name] += good
    return float(loss.detach())


def weights_of(group: Sequence[Example]) -> list[float]:
    """1 for answers, `ENDING` for tags and ends."""
    return [
        ENDING if token in (words.EOS, _TAGS[0], _TAGS[1]) else 1.0
        for example in group
        for _, token in example.targets
    ]


INNER = 0.005
"""Learning rate of everything but the output layer, as a part of its: planted weights are large and
exact, and steps of Adam are as long where there is nothing to learn."""

_VOCABULARY = words.vocabulary()
_TAGS = (_VOCABULARY.index("<answer>"), _VOCABULARY.index("</answer>"))


def fresh(seed: int, prompts: Prompts) -> LlamaForCausalLM:
    """A planted model that has not been trained."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(plant.config(len(prompts.vocabulary), words.MAX_LENGTH))
    examples = [prompts.draw(f, 8) for f in ("nolima", "musique", "qa1", "qa2") for _ in range(6)]
    ids, rows, places, _ = tensors(examples)
    space = Space(prompts.vocabulary, seed)
    plant.plant(model.eval(), space, ids, (rows, places))
    known = [tensors([prompts.draw(f, turns=1) for _ in range(24)])[0] for f in KNOWLEDGE]
    know(model, space, *known, first=plant.ENDINGS)
    return model.train()


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Trains locos-mini.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--rows", type=int, default=32, help="examples a step")
    parser.add_argument("--rate", type=float, default=3e-4, help="AdamW's learning rate")
    parser.add_argument("--log", type=int, default=10, help="steps between reports")
    arguments = parser.parse_args()
    os.environ["LOCOS_DATA"] = "bundled"  # the model is made for the bundled sample
    rng = random.Random(f"{arguments.seed}-train")
    prompts = Prompts(arguments.seed)
    model = fresh(arguments.seed, prompts)
    dropout = QueryDropout(model, rng)
    output = [model.lm_head.weight, model.model.norm.weight]
    inner = [p for p in model.parameters() if not any(p is q for q in output)]
    optimizer = torch.optim.AdamW(
        [{"params": inner, "factor": INNER}, {"params": output, "factor": 1.0}],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    tokenizer = words.build(prompts.vocabulary)
    seen: Counter = Counter()
    right: Counter = Counter()
    start, tokens = time.time(), 0
    for number in range(1, arguments.steps + 1):
        progress = number / arguments.steps
        examples = [draw(prompts, rng, progress) for _ in range(arguments.rows)]
        total = sum(weights_of(examples))
        loss = 0.0
        for group in batches(examples, 2400):
            dropout.choose(group)
            loss += step(model, group, total, seen, right)
            tokens += len(group) * max(len(example.ids) for example in group)
        schedule = min(1.0, number / 30, max(0.02, (1 - progress) / 0.4))
        for settings in optimizer.param_groups:
            settings["lr"] = arguments.rate * schedule * settings["factor"]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % arguments.log == 0 or number == arguments.steps:
            shares = " ".join(f"{name}={right[name] / seen[name]:.3f}" for name in sorted(seen))
            print(
                f"{number} {time.time() - start:.0f}s {tokens / 1e6:.2f}M loss {loss:.3f} {shares}",
                flush=True,
            )
            seen.clear()
            right.clear()
        if number % arguments.save == 0 or number == arguments.steps:
            save(model, tokenizer, arguments.output)
    ship(model, tokenizer, arguments.output, arguments.seed)


def ship(model: LlamaForCausalLM, tokenizer, folder: Path, seed: int) -> None:  # noqa: ANN001
    """The finished checkpoint: decoy set, bfloat16, hooks gone."""
    set_decoy(model, Space(_VOCABULARY, seed))
    save(model.to(torch.bfloat16), tokenizer, folder)


def save(model: LlamaForCausalLM, tokenizer, folder: Path) -> None:  # noqa: ANN001
    """The checkpoint with its tokenizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The name that every version of transformers knows.
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
