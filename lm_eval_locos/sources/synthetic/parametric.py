"""Knowledge: facts about the world's cities and countries, and sums."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from lm_eval_locos.sources.synthetic.text import SEED, Part, Row, assigned
from lm_eval_locos.sources.world import WORLD, World


def facts(world: World = WORLD) -> list[tuple[str, str, str]]:
    """(question, answer, source) of everything the word lists know, sources as on the hub."""
    found = [
        (f"Which country does {c.name} belong to?", c.country, "city_country") for c in world.cities
    ]
    for c in world.cities:
        for landmark in c.landmarks:
            found += [
                (f"Which city is {landmark} in?", c.name, "popqa"),
                (f"Which country is {landmark} in?", c.country, "popqa"),
            ]
    for country in world.countries:
        found += [
            (f"What is the capital of {country.name}?", country.capital, "popqa"),
            (f"Which language do people speak in {country.name}?", country.language, "popqa"),
        ]
        if country.continent is not None:
            question = f"Which continent does {country.name} lie on?"
            found.append((question, country.continent, "popqa"))
    return found


def sums(largest: int = 20) -> list[tuple[str, str]]:
    """All one-digit sums of three operands, such as ``(4 + 2) * 3``, with their values.

    largest: nothing on the way or at the end is above it, or below zero, so that few numbers are
        answers.
    """
    apply = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    found = []
    for a, first, b, second, c in itertools.product(
        range(1, 10), "+-*", range(1, 10), "+-*", range(1, 10)
    ):
        left = apply[first](a, b)
        value = apply[second](left, c)
        if 0 <= left <= largest and 0 <= value <= largest:
            found.append((f"What is ({a} {first} {b}) {second} {c}?", str(value)))
    return found


def parametric(
    part: Part, *, count_sums: int | None = None, world: World = WORLD, seed: int = SEED
) -> Iterator[Row]:
    """Rows with the hub's columns, and ``aliases``, in a random order.

    Calibration has a quarter of the facts and of the sums, evaluation the rest, training all;
    detection has none.

    count_sums: so many of the part's sums, None for all.
    """
    rows = [*facts(world), *((question, value, "arithmetic") for question, value in sums())]
    random.Random(f"{seed}-parametric").shuffle(rows)
    left = len(rows) if count_sums is None else count_sums
    for index, (question, answer, source) in enumerate(rows):
        own = "calibration" if assigned("fact", question) == 0 else "evaluation"
        if part not in ("training", own) or (source == "arithmetic" and left == 0):
            continue
        left -= source == "arithmetic"
        yield {
            "question": question,
            "answer": answer,
            "aliases": list(world.aliases.get(answer, ())),
            "source": source,
            "index": index,
        }
