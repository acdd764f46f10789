"""NoLiMa's layout: needle sets and books, and contexts made of them."""

from __future__ import annotations

import random
from collections.abc import Container, Iterator
from typing import Literal

from lm_eval_locos.sources.synthetic.text import (
    SEED,
    Part,
    Row,
    assigned,
    belongs,
    filler,
    scattered,
    sentence,
)
from lm_eval_locos.sources.world import WORLD, World

_LIVES = ("Which character lives in {2}?", "Which character lives in {3}?")
_BEEN = ("Which character has been to {2}?", "Which character has been to {3}?")
_WORKS = ("Which character works in {2}?", "Which character works in {3}?")
NEEDLES = (
    ("Actually, {CHAR} lives next to {1}.", _LIVES),
    ("Then {CHAR} painted {1} from the window.", _BEEN),
    ("Every morning {CHAR} works next to {1}.", _WORKS),
    ("{CHAR} lives in an old building close to {1}.", _LIVES),
    ("Last winter {CHAR} studied in front of {1}.", _BEEN),
    ("Actually, {1} is next to where {CHAR} lives.", _LIVES),
    ("In the morning {CHAR} carried a ladder to {1}.", _BEEN),
    ("{CHAR} works in the market behind {1}.", _WORKS),
    ("Later {CHAR} described {1} to the teacher.", _BEEN),
    ("The window of {CHAR} looks out on {1}.", _LIVES),
    ("Last winter {CHAR} repaired the bridge next to {1}.", _BEEN),
    ("Actually, {1} stands next to where {CHAR} works.", _WORKS),
)
"""Needle and its one-hop and two-hop question; {1} landmark, {2} city, {3} country."""


def nolima_entries(
    world: World, kind: Literal["world", "hard", "direct"], tests: int = 3
) -> list[Row]:
    """Needle-set entries. world: ask for the city; hard: for the country; direct: literally."""
    rows = []
    for number, (needle, (city, country)) in enumerate(NEEDLES, 1):
        rng = random.Random(f"{SEED}-{kind}-{number}")
        onehop = {"world": city, "hard": country, "direct": _literal(city)}[kind]
        questions = {"onehop": onehop} | ({"twohop": country} if kind == "world" else {})
        places = [
            (landmark, c.name, c.country)
            for c in rng.sample(world.cities, tests)
            for landmark in [rng.choice(c.landmarks)]
        ]
        rows.append(
            {
                "id": f"{number:04d}",
                "reasoning_type": {"direct": "literal"}.get(kind, "world_knowledge"),
                "system_prompt": "",
                "needle": needle,
                "questions": questions,
                "character_set": list(world.people),
                "tests": {
                    f"T{i:02d}": {"input_args": list(place)} for i, place in enumerate(places, 1)
                },
                "distractors": {"count": 6},
            }
        )
    return rows


def _literal(question: str) -> str:
    """A one-hop question that names the landmark itself."""
    return question.replace(" in {2}", " next to {1}").replace(" been to {2}", " seen {1}")


def book(world: World, number: int, characters: int = 40_000, books: int = 5) -> str:
    """A book of filler paragraphs, one a line; no sentence stands in two books."""
    rng = random.Random(f"{SEED}-book-{number}")
    lines: list[str] = []
    size = 0
    while size < characters:
        paragraph: list[str] = []
        length = rng.randint(2, 6)
        while len(paragraph) < length:
            text = sentence(rng, world)
            in_this_book = assigned("book", text, parts=books) == number - 1
            if in_this_book and not belongs("training", text):
                paragraph.append(text)
        lines.append(" ".join(paragraph))
        size += len(lines[-1])
    return "\n".join(lines) + "\n"


def nolima(
    count: int,
    part: Part,
    *,
    kind: Literal["world", "hard", "direct"] = "world",
    distractors: int = 6,
    fillers: int = 12,
    excluded: Container[tuple[str, str]] = (),
    world: World = WORLD,
    seed: int = SEED,
) -> Iterator[Row]:
    """Contexts like those of NoLiMa's tasks, for training: every needle, person and landmark.

    The parts of `lm_eval_locos.sources.needles` divide needles and people, not combinations. To
    train on all words but on no combination that is asked elsewhere, pass those as ``excluded``:

        asked = {(who, args[0]) for e in bench.entries for args in e.tests.values()
                 for who in e.characters}

    Args:
        part: of the filler sentences.
        distractors: sentences like the needle, of other people in other countries.
        fillers: filler sentences.
        excluded: (person, landmark) pairs that are never asked.

    Yields:
        input (the context), question, target (the person), needles (the one sentence).
    """
    rng = random.Random(f"{seed}-nolima-{kind}-{part}-{fillers}")
    made = 0
    while made < count:
        needle, (city, country) = rng.choice(NEEDLES)
        question = {"world": city, "hard": country, "direct": _literal(city)}[kind]
        person, *others = rng.sample(world.people, distractors + 1)
        home = rng.choice(world.cities)
        landmark = rng.choice(home.landmarks)
        if (person, landmark) in excluded:
            continue
        abroad = [c for c in world.cities if c.country != home.country]
        facts = [
            needle.replace("{CHAR}", who).replace("{1}", rng.choice(c.landmarks))
            for who, c in zip(others, rng.sample(abroad, distractors), strict=True)
        ]
        asked = needle.replace("{CHAR}", person).replace("{1}", landmark)
        # The person named last is the answer as often as any other.
        facts.insert(made % (distractors + 1), asked)
        for mark, word in (("{1}", landmark), ("{2}", home.name), ("{3}", home.country)):
            question = question.replace(mark, word)
        yield {
            "input": scattered(rng, facts, (filler(rng, world, part) for _ in range(fillers))),
            "question": question,
            "target": person,
            "needles": [asked],
        }
        made += 1
