"""Head scores the slow way: eager attention matrices, one trial at a time, one number at a time.

Written from the formulas, sharing no code with the package: its own greedy loop without a cache,
attention matrices of an eager model, values recomputed from hidden states, and a Python loop over
heads, rows and positions in float64. For tiny models only.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from tiny import FAMILIES, attention_of, submodule


def generate(model, prompt: list[int], stop: set[int], limit: int) -> tuple[list[int], bool]:
    """Greedy tokens and whether a stop token (not among them) ended it."""
    ids = list(prompt)
    while len(ids) - len(prompt) < limit:
        with torch.no_grad():
            token = int(
                model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()
            )
        if token in stop:
            return ids[len(prompt) :], True
        ids.append(token)
    return ids[len(prompt) :], False


def first_occurrence(generated: list[int], answer: list[int]) -> list[int]:
    for i in range(len(generated)):
        if generated[i : i + len(answer)] == answer:
            return list(range(i, i + len(answer)))
    return []


class SlowScores:
    """One forward pass over prompt and generation, then loops.

    Row r of an attention matrix is position r's; the token generated at step t comes from the row
    before its own position.
    """

    def __init__(self, model, prompt, needle, generated, stopped, steps, family="llama") -> None:
        case = FAMILIES[family]
        config = model.config.get_text_config()
        self.prompt, self.generated, self.steps = prompt, generated, steps
        self.start, self.end = needle
        self.heads = config.num_attention_heads
        self.decoding = range(len(generated) + (1 if stopped else 0))
        self.values, self.projections, self.kinds, self.windows = [], [], [], []
        self.queries = []
        hooks = []
        blocks = submodule(model, case.blocks)
        for i in (i for i, block in enumerate(blocks) if hasattr(block, case.attention)):
            attention = attention_of(model, family, i)
            hook = submodule(attention, case.value).register_forward_hook(
                lambda module, args, output: self.values.append(output[0])
            )
            hooks.append(hook)
            hook = getattr(attention, case.query).register_forward_hook(
                lambda module, args, output: self.queries.append(output[0].detach().double())
            )
            hooks.append(hook)
            projection = getattr(attention, case.output)
            weight = projection.weight.detach().double()
            self.projections.append((weight.T if hasattr(projection, "nf") else weight).numpy())
            kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (i + 1)
            window = getattr(config, "sliding_window", None) or math.inf
            self.kinds.append(kinds[i])
            self.windows.append(math.inf if kinds[i] == "full_attention" else window)
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([prompt + generated]),
                output_attentions=True,
                use_cache=False,
            )
        for hook in hooks:
            hook.remove()
        size = len(self.projections[0][0]) // self.heads  # of a value
        self.attention = [a[0].double().numpy() for a in out.attentions]
        self.values = [case.values(v, size).double().numpy() for v in self.values]
        # A gate's features come after those of its head's query.
        self.gates = [
            q.unflatten(-1, (self.heads, 2, -1))[:, :, 1] for q in self.queries if case.gated
        ]
        self.unembedding = model.get_output_embeddings().weight.detach().double().numpy()
        self.groups = self.heads // self.values[0].shape[1]
        self.chunk = getattr(config, "attention_chunk_size", None)
        self.layers = len(self.attention)

    def row(self, step: int) -> int:
        return len(self.prompt) - 1 + step

    def seen(self, layer: int, row: int) -> list[int]:
        if self.kinds[layer] == "chunked_attention":
            return [j for j in range(row + 1) if j // self.chunk == row // self.chunk]
        return [j for j in range(row + 1) if j > row - self.windows[layer]]

    def in_needle(self, j: int) -> bool:
        return self.start <= j < self.end

    def phi(self, layer: int, head: int, step: int, j: int) -> float:
        weight = self.attention[layer][head, self.row(step), j]
        value = self.values[layer][j, head // self.groups]
        size = len(value)
        if self.gates:
            value = value * self.gates[layer][self.row(step), head].sigmoid().numpy()
        written = self.projections[layer][:, head * size : (head + 1) * size] @ value
        return float(weight * (self.unembedding[self.generated[step]] @ written))

    def weight(self, layer: int, head: int, step: int, j: int) -> float:
        return float(self.attention[layer][head, self.row(step), j])

    def contrast(self, function, layer: int, head: int) -> float:
        total = 0.0
        for step in self.steps:
            seen = self.seen(layer, self.row(step))
            n = sum(self.in_needle(j) for j in seen)
            if n == 0:
                continue
            plus = sum(function(layer, head, step, j) for j in seen if self.in_needle(j))
            off = [function(layer, head, step, j) for j in seen if not self.in_needle(j)]
            total += plus - (n / len(off) * sum(off) if off else 0.0)
        return total / len(self.steps)

    def locos(self, layer, head):
        return self.contrast(self.phi, layer, head)

    def attention_spatial(self, layer, head):
        return self.contrast(self.weight, layer, head)

    def dla(self, layer, head):
        sums = [
            sum(self.phi(layer, head, step, j) for j in self.seen(layer, self.row(step)))
            for step in self.steps
        ]
        return sum(sums) / len(sums)

    def wu(self, layer, head):
        copied = set()
        tokens = self.prompt + self.generated
        for step in range(len(self.generated)):
            seen = self.seen(layer, self.row(step))
            best = max(seen, key=lambda j: self.weight(layer, head, step, j))
            if self.in_needle(best) and tokens[best] == self.generated[step]:
                copied.add(self.generated[step])
        return len(copied) / len(set(self.prompt[self.start : self.end]))

    def over_steps(self, signal):
        answer = [signal(step) for step in self.decoding if step in self.steps]
        other = [signal(step) for step in self.decoding if step not in self.steps]
        return sum(answer) / len(answer) - (sum(other) / len(other) if other else 0.0)

    def contrastive(self, layer, head):
        def overlap(step):
            seen = self.seen(layer, self.row(step))
            seen.sort(key=lambda j: -self.weight(layer, head, step, j))
            return sum(self.in_needle(j) for j in seen[:10]) / len(seen[:10])

        return self.over_steps(overlap)

    def contrastive_mean(self, layer, head):
        def mean(step):
            seen = [j for j in self.seen(layer, self.row(step)) if self.in_needle(j)]
            if not seen:
                return 0.0
            return sum(self.weight(layer, head, step, j) for j in seen) / len(seen)

        return self.over_steps(mean)

    def headkv(self, layer, head):
        rows = range(max(0, len(self.prompt) - 8), len(self.prompt))
        return max(
            sum(self.attention[layer][head, row, j] for j in range(row + 1) if self.in_needle(j))
            for row in rows
        )

    def all_heads(self, method: str) -> np.ndarray:
        function = getattr(self, method)
        return np.array([[function(i, h) for h in range(self.heads)] for i in range(self.layers)])
