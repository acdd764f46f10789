"""Writes facts and sums into locos-mini's feed-forward parts.

    >>> know(model, space, facts=prompt_ids, sums=prompt_ids)

Units of a feed-forward part are silu(gate) * up. A fact is one unit: its gate opens where the
entity asked for and the kind of question are the fact's, and it writes the answer. Sums are turns
on circles: the product of two codes' coordinates is a pair of units (x u = silu(x) u - silu(-x) u),
and by cos(a + b) = cos a cos b - sin a sin b turns add up. Layer 0 takes the first two operands of
``(a + b) * c`` at the closing bracket, layer 1 reads the result off its circles, layers 2 and 3 do
the same with the third one at the prompt's end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from space import CODE, FLAG, HIDDEN, KIND_WORDS, PRODUCT_TURNS, SUM_TURNS, Space, circles
from torch import Tensor
from transformers import LlamaForCausalLM

from lm_eval_locos.sources.world import World

_SHUT = 25.0  # a closed gate's logit below its open value
_SHARP = 20.0  # a gate's slope in the match of a code
_MATCH = 0.6  # above this match a gate opens
_STEP = (0.45, 0.55)  # where the read-off of a number goes from nothing to all
LARGEST = 20


class Units:
    """Free units of one layer's feed-forward part.

    gain: sqrt(hidden) over the norm of its input where these units work.
    """

    def __init__(self, model: LlamaForCausalLM, space: Space, layer: int, first: int) -> None:
        self.mlp, self.space, self.next = model.model.layers[layer].mlp, space, first
        self.gain = 1.0

    def add(
        self,
        gate: list[tuple[slice, Tensor | float]],
        up: list[tuple[slice, Tensor | float]],
        write: list[tuple[slice, Tensor]],
    ) -> None:
        """One unit: its gate and up rows in units of the residual stream, and what it writes."""
        unit, self.next = self.next, self.next + 1
        for weight, parts in ((self.mlp.gate_proj.weight, gate), (self.mlp.up_proj.weight, up)):
            weight[unit] = 0
            for place, value in parts:
                weight[unit, place] += torch.as_tensor(value) / self.gain
        self.mlp.down_proj.weight[:, unit] = 0
        for place, value in write:
            self.mlp.down_proj.weight[place, unit] = value

    def constant(self, value: float) -> tuple[slice, float]:
        """Reads ``value`` everywhere."""
        return self.space.at["const"], value / 2

    def only(self, *flags: str) -> list[tuple[slice, float]]:
        """Keeps a gate as it is where every flag is set, and shuts it elsewhere."""
        found = [(self.space.at[flag], _SHUT / FLAG) for flag in flags]
        return [*found, self.constant(-_SHUT * len(flags))]


def _facts(world: World, space: Space) -> Iterator[tuple[str, Tensor, str]]:
    """(kind of question, code of the entity, answer)."""
    for city in world.cities:
        code = space.things[city.name]
        yield "country", code, city.country
        yield "city", code, city.name
    for country in world.countries:
        code = space.things[country.name]
        yield "capital", code, country.capital
        yield "language", code, country.language
        if country.continent is not None:
            yield "continent", code, country.continent


def _write_fact(units: Units, kind: str, code: Tensor, answer: str, strength: float) -> None:
    at, space = units.space.at, units.space
    flag = f"kind_{KIND_WORDS.index(kind)}"
    gate = [
        (at["asked"], _SHARP * code),
        units.constant(-_SHARP * _MATCH),
        *units.only(flag, "colon"),
    ]
    write = space.out[space.id[answer]] * strength / (_SHARP * (1 - _MATCH))
    units.add(gate, [units.constant(1.0)], [(at["out"], write)])


def _dimension(place: slice, offset: int) -> slice:
    return slice(place.start + offset, place.start + offset + 1)


def _turns(units: Units, left: str, right: str, result: str, *flags: str) -> None:
    """left + right, left - right, left * right on their circles, where the sign says so."""
    at = units.space.at
    root = 10**0.5

    def product(i: int, j: int, k: int, sign: float, *signs: str) -> None:
        """result[k] += sign * left[i] * right[j] where one of the signs is set."""
        shut = [(at[name], _SHUT / FLAG) for name in signs] + [units.constant(-_SHUT)]
        shut += units.only(*flags) if flags else []
        one = torch.tensor([root])
        for way in (1.0, -1.0):
            units.add(
                [(_dimension(at[left], i), way * one), *shut],
                [(_dimension(at[right], j), way * one)],
                [(_dimension(at[result], k), torch.tensor([sign / root]))],
            )

    for n in range(len(SUM_TURNS)):
        cos, sin = 2 * n, 2 * n + 1
        product(cos, cos, cos, 1, "plus", "minus")
        product(sin, cos, sin, 1, "plus", "minus")
        for name, sign in (("plus", 1), ("minus", -1)):
            product(sin, sin, cos, -sign, name)
            product(cos, sin, sin, sign, name)
    for n in range(len(PRODUCT_TURNS)):
        cos, sin = 10 + 2 * n, 11 + 2 * n
        product(cos, cos, cos, 1, "times")
        product(sin, sin, cos, -1, "times")
        product(sin, cos, sin, 1, "times")
        product(cos, sin, sin, 1, "times")


def _read_off(units: Units, source: str, target: str, codes: list[Tensor], flag: str) -> None:
    """Writes the code of the number whose place on either kind of circle is in ``source``."""
    at = units.space.at
    for number, code in enumerate(codes):
        place = torch.cat([*circles(number), torch.zeros(CODE - 20)]) / 5 * 10**0.5
        # A step: two ramps whose difference is the same for every match above the upper one.
        for threshold, sign in ((_STEP[0], 1), (_STEP[1], -1)):
            gate = [(at[source], 2 * _SHARP * place), units.constant(-2 * _SHARP * threshold)]
            write = sign * code / (2 * _SHARP * (_STEP[1] - _STEP[0]))
            units.add([*gate, *units.only(flag)], [units.constant(1.0)], [(at[target], write)])


@torch.no_grad()
def know(model: LlamaForCausalLM, space: Space, facts: Tensor, sums: Tensor, first: int) -> None:
    """Writes everything the world's questions without context ask for.

    facts, sums: ids (B, T) of prompts, padded with 0 on the right, on which scales are measured.
    first: first free unit of the last layer.
    """
    colon, close = space.id[":"], space.id[")"]
    layers = [Units(model, space, layer, first if layer == 3 else 0) for layer in range(4)]

    layers[0].gain = _gain(model, 0, sums, close)
    _turns(layers[0], "near_mark", "asked", "before", "close")
    layers[1].gain = _gain(model, 1, sums, close)
    numbers = [space.things[str(n)] for n in range(LARGEST + 1)]
    _read_off(layers[1], "before", "thing", numbers, "close")
    known = list(_facts(space.world, space))
    for layer in (1, 3):
        layers[layer].gain = _gain(model, layer, facts, colon)
        for kind, code, answer in known:
            if (kind in ("country", "city")) == (layer == 1):
                _write_fact(layers[layer], kind, code, answer, 4.0)
    layers[2].gain = _gain(model, 2, sums, colon)
    _turns(layers[2], "before", "asked", "thing", "kind_8")
    layers[3].gain = _gain(model, 3, sums, colon)
    words = [4.0 * space.out[space.id[str(n)]] for n in range(LARGEST + 1)]
    _read_off(layers[3], "thing", "out", words, "colon")
    at = space.at
    zero = [(_dimension(at["before"], 20), _SHARP * 2**0.5), layers[3].constant(-_SHARP * 0.4)]
    layers[3].add(
        [*zero, *layers[3].only("times", "kind_8")],
        [layers[3].constant(1.0)],
        [(at["out"], words[0] / (_SHARP * 0.4))],
    )


def _gain(model: LlamaForCausalLM, layer: int, prompts: Tensor, token: int) -> float:
    """sqrt(hidden) over the norm before a feed-forward part, at the last such token."""
    found: list[Tensor] = []
    norm = model.model.layers[layer].post_attention_layernorm
    handle = norm.register_forward_pre_hook(lambda module, args: found.append(args[0]))
    model.model(prompts, use_cache=False)
    handle.remove()
    last = [int((row == token).nonzero()[-1]) for row in prompts]
    norms = found[0][torch.arange(len(prompts)), last].norm(dim=-1)
    return float(HIDDEN**0.5 / norms.median())
