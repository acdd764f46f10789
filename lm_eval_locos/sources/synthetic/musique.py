"""MuSiQue's rows: chains of facts over twenty passages."""

from __future__ import annotations

import random
from collections.abc import Iterator

from lm_eval_locos.sources.synthetic.text import SEED, Part, Row, belongs, filler
from lm_eval_locos.sources.world import WORLD, World

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

    There are six chains (five with four hops), so six (five) cities could be meant. The sentence
    with the answer is the first of the last supporting passage, and the only one of that person.
    """
    rng = random.Random(f"{seed}-musique-{hops}-{part}")
    made = 0
    while made < count:
        chains = 6 if hops < 4 else 5
        asked = rng.randrange(chains)
        people = rng.sample(world.people, chains * hops)
        cities = [c.name for c in rng.sample(world.cities, chains)]
        passages: list[tuple[str, str, bool]] = []
        for i, city in enumerate(cities):
            *chain, last = people[i * hops : (i + 1) * hops]
            for person, relation, other in zip(
                chain, _RELATIONS[hops], (*chain[1:], last), strict=True
            ):
                passages.append((person, f"{person} {relation} {other}.", i == asked))
            passages.append((last, f"{last} lives in {city}.", i == asked))
        chain, answer = people[asked * hops : (asked + 1) * hops], cities[asked]
        if not belongs(part, chain[-1], answer):
            continue
        rng.shuffle(passages)
        # The city named last is right in one question of six, as often as any other.
        named = [text.split()[-1].strip(".") for _, text, _ in passages if " lives in " in text]
        if (named[-1] == answer) != (made % 6 == 0):
            continue
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
        where = {title: i for i, (title, _, _) in enumerate(passages)}
        steps = zip(chain, (*_RELATIONS[hops], "lives in"), (*chain[1:], answer), strict=True)
        yield {
            "id": f"{hops}hop__{part}{made}_0",
            "paragraphs": paragraphs,
            "question": _ASKED[hops].format(chain[0]),
            "question_decomposition": [
                {
                    "id": i,
                    "question": f"{person} {relation}",
                    "answer": other,
                    "paragraph_support_idx": where[person],
                }
                for i, (person, relation, other) in enumerate(steps)
            ],
            "answer": answer,
            "answer_aliases": [],
            "answerable": True,
        }
        made += 1
