"""What locos-mini's residual stream holds where, and the embeddings that start it.

    >>> space = Space(vocabulary(), seed=0)
    >>> weight = space.embedding()              # (454, 224), all rows of one norm

Every word starts with a constant, flags of what kind of word it is, and a code of which word it
is; heads move codes into registers. All rows have the same norm, so that the constant part is the
same at every position after the first layer's norm: a head whose query reads only that has the
same query everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lm_eval_locos.sources.world import WORLD, World

CODE, OUT = 22, 32
_SIZES = {
    "const": 4,
    "name": CODE,  # which person this word is
    "thing": CODE,  # which city (a landmark has its city's), country or number
    "near_name": CODE,  # register: the last person in this sentence
    "near_mark": CODE,  # register: the city of the last landmark in this sentence
    "asked": CODE,  # register: the last entity, at the prompt's end the one asked for
    "before": CODE,  # register: the near_name of the word before
    "out": OUT,  # what is read as the next token
}
_FLAGS = (
    *("is_name", "boundary", "landmark", "object", "city", "country", "number", "operator"),
    *("close", "answer_tag", "start", "room", "colon", "kind_word"),
    *("plus", "minus", "times"),
    *(f"kind_{i}" for i in range(9)),
    *("apple", "football", "milk", "near_apple", "near_football", "near_milk"),
    *("asked_apple", "asked_football", "asked_milk"),
    *("has_name", "has_mark", "after_colon", "after_tag", "tagged", "order", "tag_end"),
)
OBJECTS, SIGNS = ("apple", "football", "milk"), ("plus", "minus", "times")
KIND_WORDS = (
    *("country", "city", "capital", "language", "continent"),
    *("character", "employer", "Where", "What"),
)
"""The words that say what kind of answer is asked for."""

FLAG = 0.5
HIDDEN = 220
NORM = 2.0
"""Norm of every embedding."""


def spread(
    codes: Tensor,
    steps: int = 400,
    rate: float = 0.1,
    free: Tensor | None = None,
    fixed: Tensor | None = None,
) -> Tensor:
    """Unit rows pushed apart from each other, and from those of ``fixed``, which stay.

    free: of the same shape, 0 where a row stays zero.
    """
    mask = torch.ones_like(codes) if free is None else free
    codes = torch.nn.functional.normalize(codes * mask, dim=1)
    for _ in range(steps):
        others = codes if fixed is None else torch.cat([codes, fixed])
        closeness = codes @ others.T - 2 * torch.eye(len(codes), len(others))
        push = torch.softmax(12 * closeness, 1) @ others
        codes = torch.nn.functional.normalize((codes - rate * push) * mask, dim=1)
    return codes


class Space:
    """Dimensions by name (a slice) and the codes of all words.

    Args:
        vocabulary: token strings, in the order of their ids.
        seed: of the codes.
        world: the word lists.
    """

    def __init__(self, vocabulary: list[str], seed: int, world: World = WORLD) -> None:
        self.vocabulary, self.world = vocabulary, world
        self.id = {word: i for i, word in enumerate(vocabulary)}
        self.at: dict[str, slice] = {}
        start = 0
        for name, size in (*_SIZES.items(), *((flag, 1) for flag in _FLAGS)):
            self.at[name] = slice(start, start + size)
            start += size
        self.at["spare"] = slice(start, HIDDEN)
        self.generator = torch.Generator().manual_seed(1000 + seed)
        self._make_codes()

    def randn(self, *shape: int) -> Tensor:
        """Normal numbers from the space's own stream."""
        return torch.randn(*shape, generator=self.generator)

    def _make_codes(self) -> None:
        world, size = self.world, len(self.vocabulary)
        people = [self.id[name] for name in world.people]
        # Persons first, in the dimensions that their own codes have; then what else is ever
        # answered; then the rest: each keeps away from those before.
        free = torch.ones(size, OUT)
        free[people, CODE:] = 0
        self.out = self.randn(size, OUT)
        done: list[int] = []
        answers = [self.id[word] for word in self.answers()]
        for rows in (people, answers, sorted({*range(size)} - {*people} - {*answers})):
            fixed = self.out[done] if done else None
            self.out[rows] = spread(self.out[rows], free=free[rows], fixed=fixed)
            done += rows
        self.names = dict(zip(world.people, self.out[people, :CODE], strict=True))
        countries = [c.name for c in world.countries]
        things = [*(city.name for city in world.cities), *countries]
        codes = spread(self.randn(len(things), CODE), fixed=self.out[people, :CODE])
        self.things = dict(zip(things, codes, strict=True))
        self.marks: dict[str, str] = {}
        for city in world.cities:
            for landmark in city.landmarks:
                word = landmark.split()[-1]
                self.marks[word] = city.name
                self.things[word] = self.things[city.name]
        for number in range(31):
            self.things[str(number)] = number_code(number)

    def answers(self) -> list[str]:
        """Every word but a person that is an answer or stands beside one."""
        world = self.world
        found = ["<answer>", "</answer>", "<eos>", *world.rooms, *map(str, range(31))]
        found += [city.name for city in world.cities]
        for country in world.countries:
            found += [country.name, country.capital, country.language]
            found += [country.continent] if country.continent else []
        return list(dict.fromkeys(found))

    def embedding(self) -> Tensor:
        """The initial embedding, (vocabulary, HIDDEN)."""
        weight = torch.zeros(len(self.vocabulary), HIDDEN)
        at = self.at
        weight[:, at["const"]] = 0.5
        for word, code in self.names.items():
            weight[self.id[word], at["name"]] = code
        for word, code in self.things.items():
            weight[self.id[word], at["thing"]] = code
        places = [*(city.name for city in self.world.cities), *self.world.rooms]
        for word in places:
            weight[self.id[word], at["out"]] = self.out[self.id[word]]
        for flag, members in self._members().items():
            for word in members:
                weight[self.id[word], at[flag]] = FLAG
        rest = NORM**2 - weight.pow(2).sum(1)
        assert (rest > 0).all(), self.vocabulary[int(rest.argmin())]
        noise = torch.nn.functional.normalize(
            self.randn(len(weight), HIDDEN - at["spare"].start), dim=1
        )
        weight[:, at["spare"]] = noise * rest.sqrt()[:, None]
        return weight

    def _members(self) -> dict[str, list[str]]:
        """Per flag the words that carry it."""
        world = self.world
        found = {
            "is_name": list(world.people),
            "boundary": [".", ":", "?", "]", "\n", "\n\n"],
            "landmark": list(self.marks),
            "object": list(world.objects),
            "city": [city.name for city in world.cities],
            "country": [country.name for country in world.countries],
            "number": list(map(str, range(31))),
            "operator": ["+", "-", "*"],
            "close": [")"],
            "answer_tag": ["<answer>"],
            "tag_end": ["</answer>"],
            "start": ["<bos>"],
            "room": list(world.rooms),
            "colon": [":"],
            "kind_word": list(KIND_WORDS),
            "plus": ["+"],
            "minus": ["-"],
            "times": ["*"],
        }
        found |= {f"kind_{i}": [word] for i, word in enumerate(KIND_WORDS)}
        found |= {word: [word] for word in ("apple", "football", "milk")}
        return found


SUM_TURNS = (1, 2, 5, 6, 9)
PRODUCT_TURNS = (1, 3, 5, 7, 9)
_POWER = {pow(5, exponent, 23): exponent for exponent in range(22)}


def circles(number: int) -> tuple[Tensor, Tensor]:
    """Where a number stands on five circles of 23 (sums are turns), and by its power of 5 modulo 23
    on five of 22 (products are turns); each (10,): cos and sin in turn. Zero is on no circle of the
    second kind."""
    by_sum, by_product = torch.zeros(10), torch.zeros(10)
    for i, (k, m) in enumerate(zip(SUM_TURNS, PRODUCT_TURNS, strict=True)):
        angle = 2 * math.pi * k * number / 23
        by_sum[2 * i : 2 * i + 2] = torch.tensor([math.cos(angle), math.sin(angle)])
        if number % 23:
            angle = 2 * math.pi * m * _POWER[number % 23] / 22
            by_product[2 * i : 2 * i + 2] = torch.tensor([math.cos(angle), math.sin(angle)])
    return by_sum, by_product


def number_code(number: int) -> Tensor:
    """A number's unit code: both kinds of circles, and a mark for zero."""
    by_sum, by_product = circles(number)
    rest = torch.tensor([float(number == 0) * 5**0.5, 0.0])
    return torch.cat([by_sum, by_product, rest]) / 10**0.5
