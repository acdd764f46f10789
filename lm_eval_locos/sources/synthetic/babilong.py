"""BABILong's rows: stories of people, rooms and things, qa1 to qa5."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from lm_eval_locos.sources.synthetic.text import SEED, Part, Row, belongs, filler, scattered
from lm_eval_locos.sources.world import WORLD, World

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
    """Rows with the hub's columns (input, question, target) for qa1 to qa5, and ``needles``.

    These are the sentences that the answer follows from, in their order; where one occurs twice its
    last occurrence is meant.
    """
    story = {"qa1": _qa1, "qa2": _qa2, "qa3": _qa3, "qa4": _qa4, "qa5": _qa5}[task]
    rng = random.Random(f"{seed}-babilong-{task}-{part}-{fillers}")
    made = 0
    while made < count:
        facts, needles, question, target, key, last = story(rng, world)
        # The candidate named last is right in one story of six, as often as any other.
        if not belongs(part, *key) or (last == target) != (made % 6 == 0):
            continue
        text = scattered(rng, facts, (filler(rng, world, part) for _ in range(fillers)))
        yield {"input": text, "question": question, "target": target, "needles": needles}
        made += 1


_Story = tuple[list[str], list[str], str, str, tuple[str, str], str]
"""Facts, those the answer follows from, question, target, the asked combination, the candidate
that is named last."""


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
    needle = _last_move(facts, person)
    return facts, [needle], f"Where is {person}?", room, (person, room), tour[-1][1]


def _last_move(facts: Sequence[str], person: str, room: str = "") -> str:
    """The last sentence that takes the person somewhere (to ``room``)."""
    starts = tuple(f"{person} {move}" for move in _MOVES)
    return next(f for f in reversed(facts) if f.startswith(starts) and f.endswith(f"{room}."))


def _in_order(facts: Sequence[str], *needles: str) -> list[str]:
    """The needles in the order of their last occurrences."""
    return [fact for i, fact in enumerate(facts) if fact in needles and fact not in facts[i + 1 :]]


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
    needles = _in_order(facts, f"{person} picked up the {thing}.", _last_move(facts, person))
    return facts, needles, f"Where is the {thing}?", room, (person, room), tour[-1][1]


def _qa3(rng: random.Random, world: World) -> _Story:
    while True:
        facts, tour, holders = _carried(rng, world)
        thing = rng.choice(sorted(holders))
        person, since = holders[thing]
        rooms = [room for i, (who, room) in enumerate(tour) if who == person and i >= since]
        # "Before the X" must name one moment.
        if len(rooms) >= 2 and rooms.count(rooms[-1]) == 1:
            question = f"Where was the {thing} before the {rooms[-1]}?"
            pair = [_last_move(facts, person, room) for room in rooms[-2:]]
            needles = _in_order(facts, f"{person} picked up the {thing}.", *pair)
            return facts, needles, question, rooms[-2], (person, rooms[-2]), tour[-1][1]


def _qa4(rng: random.Random, world: World) -> _Story:
    rooms = rng.sample(world.rooms, len(world.rooms))
    opposite = {"north": "south", "east": "west"}
    facts, asked = [], []
    for a, b in itertools.pairwise(rooms):
        way = rng.choice(("north", "east"))
        facts.append(f"The {a} is {way} of the {b}.")
        asked += [
            (f"What is {way} of the {b}?", a, b, facts[-1]),
            (f"What is {opposite[way]} of the {a}?", b, a, facts[-1]),
        ]
    question, target, other, needle = rng.choice(asked)
    rng.shuffle(facts)
    return facts, [needle], question, target, (other, target), facts[-1].split()[-1].strip(".")


def _qa5(rng: random.Random, world: World) -> _Story:
    people = ["Bill", "Fred", "Jeff", "Mary"]
    while True:
        gifts = [(*rng.sample(people, 2), rng.choice(world.objects)) for _ in range(7)]
        giver, taker, thing = asked = rng.choice(gifts)
        question, target, known = rng.choice(
            (
                (f"Who gave the {thing} to {taker}?", giver, (1, 2)),
                (f"Who did {giver} give the {thing} to?", taker, (0, 2)),
                (f"What did {giver} give to {taker}?", thing, (0, 1)),
            )
        )
        if sum(all(gift[i] == asked[i] for i in known) for gift in gifts) == 1:
            sentences = [f"{g} gave the {o} to {t}." for g, t, o in gifts]
            needle = sentences[gifts.index(asked)]
            last = gifts[-1][2] if target == thing else gifts[-1][1]
            return sentences, [needle], question, target, (f"{giver} {taker}", thing), last
