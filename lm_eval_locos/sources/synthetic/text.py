"""Parts of the examples, filler sentences, and facts among them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

from lm_eval_locos.sources.world import World

Part = Literal["evaluation", "detection", "calibration", "training"]
PARTS: tuple[Part, ...] = get_args(Part)
SEED = 20261130
Row = dict[str, Any]


def assigned(*words: str, parts: int = len(PARTS)) -> int:
    """A number below ``parts`` that depends on the words alone."""
    digest = hashlib.sha256(" ".join(words).encode()).digest()
    return int.from_bytes(digest[:4], "big") % parts


def belongs(part: Part, *words: str) -> bool:
    """Whether this combination of words is asked in ``part``."""
    return PARTS[assigned(*words)] == part


def sentence(rng: random.Random, world: World) -> str:
    """A filler sentence: it names no person, place or thing that is ever asked for."""
    noun, other = rng.sample(world.nouns, 2)
    adjective, verb = rng.choice(world.adjectives), rng.choice(world.verbs)
    adverb = rng.choice(world.adverbs)
    return rng.choice(
        (
            f"The {adjective} {noun} {verb} the {other}.",
            f"{_a(noun).capitalize()} {adverb} {verb} the {adjective} {other}.",
            f"Then the {noun} {adverb} {verb} {_a(adjective)} {other}.",
        )
    )


def _a(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def filler(rng: random.Random, world: World, part: Part) -> str:
    """A filler sentence of ``part``."""
    while True:
        text = sentence(rng, world)
        if belongs(part, text):
            return text


def scattered(rng: random.Random, facts: Sequence[str], fillers: Iterable[str]) -> str:
    """The facts in their order among the fillers."""
    pieces = list(fillers)
    places = sorted(rng.randint(0, len(pieces)) for _ in facts)
    for fact, place in reversed(list(zip(facts, places, strict=True))):
        pieces.insert(place, fact)
    return " ".join(pieces)
