"""Makes the bundled sample: our own text in the shapes of the benchmarks' data.

    python -m lm_eval_locos.sources.generate --output lm_eval_locos/data/sample

Everything follows from the word lists of a `World` and a seed, so the files are the same byte for
byte on every run. Each family's function yields as many examples as are asked for.

Parts: ``evaluation``, ``detection``, ``calibration``, ``training``. What is asked in one part (a
person in a place) and its filler sentences never occur in another: both are assigned by hash. In
NoLiMa's layout needles, characters and books are divided by `lm_eval_locos.sources.needles`, and no
filler sentence stands in two books.

So that guessing scores little, every context names at least five candidates, and neither a uniform
guess nor the candidate named last is right in more than one document in five.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from lm_eval_locos.sources.world import WORLD, World

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


# -- sentences --------------------------------------------------------------------------------


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


# -- NoLiMa's layout --------------------------------------------------------------------------

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
        direct = city.replace(" in {2}", " next to {1}").replace(" been to {2}", " seen {1}")
        onehop = {"world": city, "hard": country, "direct": direct}[kind]
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
            if assigned("book", text, parts=books) == number - 1:
                paragraph.append(text)
        lines.append(" ".join(paragraph))
        size += len(lines[-1])
    return "\n".join(lines) + "\n"


# -- MuSiQue ----------------------------------------------------------------------------------

_RELATIONS = {
    2: ("works for",),
    3: ("works for", "is a friend of"),
    4: ("works for", "is a friend of", "is a neighbor of"),
}
_ASKED = {
    2: "In which city does the employer of {} live?",
    3: "In which city does the friend of the employer of {} live?",
    4: "In which city does the neighbor of the friend of the employer of {} live?",
}


def musique(
    count: int, hops: int, part: Part, *, world: World = WORLD, seed: int = SEED
) -> Iterator[Row]:
    """Rows with the hub's columns: ``hops`` facts in as many of 20 passages lead to a city.

    There are six chains (five with four hops), so six (five) cities could be meant.
    """
    rng = random.Random(f"{seed}-musique-{hops}-{part}")
    made = 0
    while made < count:
        chains, asked = 6 if hops < 4 else 5, rng.randrange(5)
        people = rng.sample(world.people, chains * hops)
        cities = [c.name for c in rng.sample(world.cities, chains)]
        passages: list[tuple[str, str, bool]] = []
        for i, city in enumerate(cities):
            chain = people[i * hops : (i + 1) * hops]
            for person, relation, other in zip(chain, _RELATIONS[hops], chain[1:], strict=False):
                passages.append((person, f"{person} {relation} {other}.", i == asked))
            passages.append((chain[-1], f"{chain[-1]} lives in {city}.", i == asked))
        first, last, answer = people[asked * hops], people[asked * hops + hops - 1], cities[asked]
        if not belongs(part, last, answer):
            continue
        rng.shuffle(passages)
        while len(passages) < 20:
            noun = rng.choice(world.nouns)
            title = f"The {rng.choice(world.adjectives)} {noun}"
            passages.insert(rng.randint(0, len(passages)), (title, "", False))
        paragraphs = [
            {
                "idx": i,
                "title": title,
                "paragraph_text": f"{text} {filler(rng, world, part)}".strip(),
                "is_supporting": supporting,
            }
            for i, (title, text, supporting) in enumerate(passages)
        ]
        yield {
            "id": f"{hops}hop__{part}{made}_0",
            "paragraphs": paragraphs,
            "question": _ASKED[hops].format(first),
            "question_decomposition": [],
            "answer": answer,
            "answer_aliases": [],
            "answerable": True,
        }
        made += 1


# -- BABILong ---------------------------------------------------------------------------------

_MOVES = ("went to", "moved to", "travelled to")


def babilong(
    count: int,
    task: str,
    part: Part,
    *,
    fillers: int = 12,
    world: World = WORLD,
    seed: int = SEED,
) -> Iterator[Row]:
    """Rows with the hub's columns (input, question, target) for qa1 to qa5."""
    story = {"qa1": _qa1, "qa2": _qa2, "qa3": _qa3, "qa4": _qa4, "qa5": _qa5}[task]
    rng = random.Random(f"{seed}-babilong-{task}-{part}-{fillers}")
    made = 0
    while made < count:
        facts, question, target, key, last = story(rng, world)
        # The candidate named last is right in one story of six, as often as any other.
        if not belongs(part, *key) or (last == target) != (made % 6 == 0):
            continue
        text = scattered(rng, facts, (filler(rng, world, part) for _ in range(fillers)))
        yield {"input": text, "question": question, "target": target}
        made += 1


_Story = tuple[list[str], str, str, tuple[str, str], str]
"""Facts, question, target, the asked combination, the candidate that is named last."""


def _tour(rng: random.Random, world: World, moves: int) -> tuple[list[tuple[str, str]], list[str]]:
    """(person, room) moves through all rooms, nobody to where they are, and their sentences."""
    people = rng.sample(world.people, 4)
    rooms = rng.sample(world.rooms, len(world.rooms))
    at: dict[str, str] = {}
    tour: list[tuple[str, str]] = []
    while len(tour) < moves:
        i = len(tour)
        room = rooms[i] if i < len(rooms) else rng.choice(world.rooms)
        elsewhere = [person for person in people if at.get(person) != room]
        if elsewhere:
            person = people[i] if i < len(people) else rng.choice(elsewhere)
            at[person] = room
            tour.append((person, room))
    return tour, [f"{person} {rng.choice(_MOVES)} the {room}." for person, room in tour]


def _qa1(rng: random.Random, world: World) -> _Story:
    tour, facts = _tour(rng, world, 8)
    person = rng.choice(tour)[0]
    room = dict(tour)[person]
    return facts, f"Where is {person}?", room, (person, room), tour[-1][1]


def _carried(
    rng: random.Random, world: World
) -> tuple[list[str], list[tuple[str, str]], dict[str, tuple[str, int]]]:
    """A tour in which three people pick an object up early on: facts, moves, (holder, since)."""
    tour, moves = _tour(rng, world, 10)
    facts: list[str] = []
    holders: dict[str, tuple[str, int]] = {}
    objects = rng.sample(world.objects, len(world.objects))
    for i, ((person, _), move) in enumerate(zip(tour, moves, strict=True)):
        facts.append(move)
        free = [o for o in objects if o not in holders]
        if free and i < 4 and person not in {holder for holder, _ in holders.values()}:
            facts.append(f"{person} picked up the {free[0]}.")
            holders[free[0]] = (person, i)
    return facts, tour, holders


def _qa2(rng: random.Random, world: World) -> _Story:
    facts, tour, holders = _carried(rng, world)
    thing = rng.choice(sorted(holders))
    person = holders[thing][0]
    room = dict(tour)[person]
    return facts, f"Where is the {thing}?", room, (person, room), tour[-1][1]


def _qa3(rng: random.Random, world: World) -> _Story:
    while True:
        facts, tour, holders = _carried(rng, world)
        thing = rng.choice(sorted(holders))
        person, since = holders[thing]
        rooms = [room for i, (who, room) in enumerate(tour) if who == person and i >= since]
        # "Before the X" must name one moment.
        if len(rooms) >= 2 and rooms.count(rooms[-1]) == 1:
            question = f"Where was the {thing} before the {rooms[-1]}?"
            return facts, question, rooms[-2], (person, rooms[-2]), tour[-1][1]


def _qa4(rng: random.Random, world: World) -> _Story:
    rooms = rng.sample(world.rooms, len(world.rooms))
    opposite = {"north": "south", "east": "west"}
    facts, asked = [], []
    for a, b in itertools.pairwise(rooms):
        way = rng.choice(("north", "east"))
        facts.append(f"The {a} is {way} of the {b}.")
        asked += [
            (f"What is {way} of the {b}?", a, b),
            (f"What is {opposite[way]} of the {a}?", b, a),
        ]
    question, target, other = rng.choice(asked)
    rng.shuffle(facts)
    return facts, question, target, (other, target), facts[-1].split()[-1].strip(".")


def _qa5(rng: random.Random, world: World) -> _Story:
    people = ["Bill", "Fred", "Jeff", "Mary"]
    while True:
        gifts = [(*rng.sample(people, 2), rng.choice(world.objects)) for _ in range(7)]
        once = [
            gift for gift in gifts if [(taker, o) for _, taker, o in gifts].count(gift[1:]) == 1
        ]
        if once:
            giver, taker, thing = rng.choice(once)
            sentences = [f"{g} gave the {o} to {t}." for g, t, o in gifts]
            question = f"Who gave the {thing} to {taker}?"
            return sentences, question, giver, (giver, f"{taker} {thing}"), gifts[-1][0]


# -- parametric recall and arithmetic ---------------------------------------------------------


def facts(world: World = WORLD) -> list[tuple[str, str, str]]:
    """(question, answer, source) of everything the word lists know, sources as on the hub."""
    found = [
        (f"Which country does {c.name} belong to?", c.country, "city_country") for c in world.cities
    ]
    found += [
        (f"Which city is {landmark} in?", c.name, "popqa")
        for c in world.cities
        for landmark in c.landmarks
    ]
    for country in world.countries:
        found += [
            (f"What is the capital of {country.name}?", country.capital, "popqa"),
            (f"Which language do people speak in {country.name}?", country.language, "popqa"),
            (f"Which continent does {country.name} lie on?", country.continent, "popqa"),
        ]
    return found


def sums(count: int, seed: int = SEED) -> list[tuple[str, str]]:
    """Different one-digit sums of three operands, such as ``(4 + 2) * 3``, with their values."""
    rng = random.Random(f"{seed}-sums")
    found: dict[str, str] = {}
    while len(found) < count:
        a, b, c = (rng.randint(1, 9) for _ in range(3))
        first, second = rng.choice("+-*"), rng.choice("+-*")
        left = {"+": a + b, "-": a - b, "*": a * b}[first]
        value = {"+": left + c, "-": left - c, "*": left * c}[second]
        found[f"What is ({a} {first} {b}) {second} {c}?"] = str(value)
    return list(found.items())


def parametric(part: Part, *, world: World = WORLD, seed: int = SEED) -> Iterator[Row]:
    """Rows with the hub's columns; calibration has a third of the facts, evaluation the rest."""
    rows = [*facts(world), *((q, a, "arithmetic") for q, a in sums(180, seed))]
    rng = random.Random(f"{seed}-parametric")
    rng.shuffle(rows)
    for index, (question, answer, source) in enumerate(rows):
        if (part == "calibration") == (assigned("fact", question, parts=3) == 0):
            yield {"question": question, "answer": answer, "source": source, "index": index}


# -- files ------------------------------------------------------------------------------------


def write_sample(folder: Path, world: World = WORLD) -> list[Path]:
    """Writes the whole sample under ``folder``; the paths, sorted."""
    files: dict[str, str] = {}
    for name, kind in (("", "world"), ("_hard", "hard"), ("_ONLYDirect", "direct")):
        entries = json.dumps(nolima_entries(world, kind), indent=1, ensure_ascii=False)
        files[f"nolima/needlesets/needle_set{name}.json"] = entries + "\n"
    for number in range(1, 6):
        files[f"nolima/haystack/rand_shuffle/rand_book_{number}.txt"] = book(world, number)
    rows = {
        "musique/answerable/validation": [
            *musique(120, 2, "evaluation", world=world),
            *musique(40, 3, "evaluation", world=world),
            *musique(40, 4, "evaluation", world=world),
        ],
        "musique/answerable/train": musique(60, 2, "calibration", world=world),
        "parametric/train": parametric("evaluation", world=world),
        "parametric/calibration": parametric("calibration", world=world),
    }
    for length, fillers in (("0k", 12), ("1k", 80)):
        for task in ("qa1", "qa2", "qa3", "qa4", "qa5"):
            count = 20 if length == "1k" else 120 if task in ("qa1", "qa2") else 40
            rows[f"babilong/{length}/{task}"] = babilong(
                count, task, "evaluation", fillers=fillers, world=world
            )
    for task in ("qa1", "qa2", "qa3", "qa4", "qa5"):
        rows[f"babilong/calibration/{task}"] = babilong(50, task, "calibration", world=world)
    for name, found in rows.items():
        lines = (json.dumps(row, ensure_ascii=False) for row in found)
        files[f"{name}.jsonl"] = "\n".join(lines) + "\n"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return sorted(folder / name for name in files)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Writes the bundled sample of lm-eval-locos.")
    default = Path(__file__).resolve().parent.parent / "data" / "sample"
    parser.add_argument(
        "--output", type=Path, default=default, help="folder (default: %(default)s)"
    )
    for path in write_sample(parser.parse_args().output):
        print(path)


if __name__ == "__main__":
    main()
