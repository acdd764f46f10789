"""Two kinds of attention head, written by hand: one looks for a kind of word, one matches codes.

    >>> planter.looks(0, 0, {"is_name": 60, "boundary": 60}, nearest())   # the last person so far
    >>> planter.carries(0, 0, [(["name"], ["near_name"], 0, 1)])          # and copies who it is

With rotary positions the logit of a query and a key at distance d is a sum of cos(rate * d) and
sin(rate * d), weighted by query and key: with a constant key the query alone chooses any such sum
as the head's preference for distances. The pairs that hardly turn compare codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linprog
from space import CODE, FLAG, HIDDEN, NORM, Space
from torch import Tensor
from transformers import LlamaForCausalLM

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 10, 5, 48
THETA = 1e8
FAST = 10  # rotary pairs that turn noticeably within a prompt
_HALF = HEAD_DIM // 2
SLOW = [d for pair in range(_HALF - 1, FAST - 1, -1) for d in (pair, pair + _HALF)]
_RATES = THETA ** (-np.arange(_HALF) / _HALF)
_KEY = 8.0  # the constant part of a key
_KINDS = ("is_name", "boundary", "landmark", "object", "city", "country", "number", "operator")
_KINDS += ("close", "answer_tag", "start", "room", "kind_word")


def kernel(better: list[tuple[int, int]], total: float, far: int = 700) -> np.ndarray:
    """Weights of cos and sin in the fast pairs, so that distances are preferred as asked.

    better: (nearer, farther): the first distance should win over the second; the smallest of these
        margins is made as large as ``total`` (the sum of absolute weights) allows.
    """
    rates = _RATES[:FAST]
    distances = np.arange(far)
    angles = np.outer(distances, rates)
    basis = np.concatenate([np.cos(angles), np.sin(angles)], 1)
    margins = np.array([basis[a] - basis[b] for a, b in better])
    size = basis.shape[1]
    rows = np.concatenate([-margins, margins, np.ones((len(margins), 1))], 1)
    rows = np.vstack([rows, np.append(np.ones(2 * size), 0.0)])
    limits = np.append(np.zeros(len(margins)), total)
    cost = np.append(np.zeros(2 * size), -1.0)
    found = linprog(cost, A_ub=rows, b_ub=limits, bounds=[(0, None)] * (2 * size + 1))
    return found.x[:size] - found.x[size : 2 * size]


def nearest() -> np.ndarray:
    """Nearer is better, by the same margin for each step up to eleven tokens."""
    steps = [(d, d + 1) for d in range(12)]
    return kernel(steps + [(12, d) for d in range(13, 700, 3)], 70)


def previous() -> np.ndarray:
    """The word before, better than any other."""
    return kernel([(1, d) for d in range(700) if d != 1], 80)


def three_back() -> np.ndarray:
    """Three words back, better than any other distance up to 15."""
    return kernel([(3, d) for d in range(16) if d not in (2, 3, 4)], 40)


class Planter:
    """Access to one model's heads; scales are in units of the residual stream."""

    def __init__(
        self, model: LlamaForCausalLM, space: Space, prompts: Tensor, asking: tuple[Tensor, Tensor]
    ) -> None:
        self.model, self.layers, self.space = model, model.model.layers, space
        self.prompts, self.asking = prompts, asking
        self.gain = [HIDDEN**0.5 / NORM] * LAYERS  # of the norm before attention, as measured
        self._empty: set[tuple] = set()

    def head(self, layer: int, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slices of q, k, v (each (48, hidden)) and o ((hidden, 48)), emptied at first sight."""
        attention, group = self.layers[layer].self_attn, head // (HEADS // KV_HEADS)
        mine = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        shared = slice(group * HEAD_DIM, (group + 1) * HEAD_DIM)
        q, o = attention.q_proj.weight[mine], attention.o_proj.weight[:, mine]
        k, v = attention.k_proj.weight[shared], attention.v_proj.weight[shared]
        for key, tensors in (((layer, head), (q, o)), ((layer, "kv", group), (k, v))):
            if key not in self._empty:
                self._empty.add(key)
                for tensor in tensors:
                    tensor.zero_()
        return q, k, v, o

    def constant(self, layer: int, value: float) -> Tensor:
        """The row that reads ``value`` from the constant part, (hidden,)."""
        row = torch.zeros(HIDDEN)
        row[self.space.at["const"]] = value / (4 * 0.5 * self.gain[layer])
        return row

    def looks(
        self,
        layer: int,
        head: int,
        gates: Mapping[str, float],
        weights: np.ndarray | None,
        offset: float = 0.0,
    ) -> None:
        """A head with one query everywhere: kinds of word by ``gates`` (in logits), and distance.

        Keys are the same in all such heads of a layer: a constant in the fast pairs and one slow
        dimension for each kind. ``offset`` is added everywhere: where norms differ, logits of
        what is not wanted should be negative.
        """
        q, k, _, _ = self.head(layer, head)
        root = HEAD_DIM**0.5
        for i in range(FAST):
            k[i] = self.constant(layer, _KEY)
            if weights is not None:
                # Query at distance d from the key: a cos(rate d) + b sin(rate d).
                q[i] = self.constant(layer, weights[i] * root / _KEY)
                q[i + _HALF] = self.constant(layer, -weights[i + FAST] * root / _KEY)
        k[SLOW[-1]] = self.constant(layer, _KEY)
        q[SLOW[-1]] = self.constant(layer, offset * root / _KEY)
        for place, kind in zip(SLOW, _KINDS, strict=False):
            k[place, self.space.at[kind]] = 6.0 / (FLAG * self.gain[layer])
            q[place] = self.constant(layer, gates.get(kind, 0.0) * root / 6.0)

    def carries(
        self, layer: int, head: int, moves: list[tuple[list[str], list[str], int, float]]
    ) -> None:
        """Copies (sources, destinations, first value dimension, gain) of the attended position."""
        _, _, v, o = self.head(layer, head)
        at = self.space.at
        for sources, destinations, first, gain in moves:
            width = at[sources[0]].stop - at[sources[0]].start
            scale = 0.4
            for i in range(width):
                for source in sources:
                    v[first + i, at[source].start + i] = scale
                for destination in destinations:
                    strength = gain / (scale * self.gain[layer])
                    o[at[destination].start + i, first + i] = strength

    def matches(
        self,
        layer: int,
        head: int,
        key: str,
        match: float,
        gates: Mapping[str, float],
        sink: float,
        kinds: tuple[int, ...],
        flags: Sequence[tuple[str, str]] = (),
    ) -> None:
        """A head that looks where register ``key`` holds the code asked for.

        match: logit of an exact match; gates: per kind of key position, in logits; sink: logit of
        ``<bos>``; kinds: of question in which the head looks at all (elsewhere ``<bos>`` gets
        60 logits more); flags: pairs (asked, near) that match as well.
        """
        q, k, _, _ = self.head(layer, head)
        at, root = self.space.at, HEAD_DIM**0.5
        asking, holding, start = self.gains(layer, key, tuple(gates))
        scale = (match * root / (asking * holding)) ** 0.5
        for i in range(CODE):
            q[SLOW[i + 6], at["asked"].start + i] = scale
            k[SLOW[i + 6], at[key].start + i] = scale
        # Kinds share one dimension: the query is constant, the key adds them up.
        q[SLOW[0], at["const"]] = root / (4 * 0.5 * asking)
        for kind, logits in gates.items():
            k[SLOW[0], at[kind]] = logits / (FLAG * holding)
        k[SLOW[0], at["start"]] = (sink - gates.get("order", 0)) / (FLAG * start)
        q[SLOW[4], at["const"]] = root / (4 * 0.5 * asking)
        for kind in kinds:
            q[SLOW[4], at[f"kind_{kind}"]] = -root / (FLAG * asking)
        k[SLOW[4], at["start"]] = 60 / (FLAG * start)
        for place, (asked, near) in enumerate(flags, 1):
            # A flag's match counts nine tenths of a code's.
            q[SLOW[place], at[asked]] = k[SLOW[place], at[near]] = scale / FLAG * 0.9**0.5

    def gains(self, layer: int, key: str, gates: tuple[str, ...]) -> tuple[float, float, float]:
        """sqrt(hidden) over the norm of the layer's input where the question is, at positions that
        hold something in register ``key`` and have two gates' flags, and at ``<bos>``."""
        states = self.states(layer)
        norms, at = states.norm(dim=-1), self.space.at
        held = states[..., at[key]].norm(dim=-1) > 0.5
        flags = [states[..., at[gate]].squeeze(-1) > 0.2 for gate in gates if gate != "order"]
        held &= torch.stack(flags).sum(0) >= 2
        root = HIDDEN**0.5
        return (
            float(root / norms[self.asking].median()),
            float(root / norms[held].median()),
            float(root / norms[:, 0].median()),
        )

    def typical(self, layer: int) -> float:
        """sqrt(hidden) over the median norm of the layer's input."""
        return float(HIDDEN**0.5 / self.states(layer).norm(dim=-1)[self.prompts != 0].median())

    def states(self, layer: int) -> Tensor:
        """The residual stream before a layer on the measured prompts, (B, T, hidden)."""
        out = self.model.model(self.prompts, output_hidden_states=True, use_cache=False)
        return out.hidden_states[layer]
