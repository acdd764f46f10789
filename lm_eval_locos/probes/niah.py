"""The literal needle in a haystack: a sentence that the question repeats almost word for word.

The haystacks are NoLiMa's books of the detection part, the names its characters of that part; the
numbers are drawn.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

from lm_eval_locos.families import nolima
from lm_eval_locos.families.documents import source_of
from lm_eval_locos.families.tokenizers import ruler_for
from lm_eval_locos.sources.haystack import after_sentence

NEEDLE = "The access code of {name} is {number}."
QUESTION = "What is the access code of {name}?"


def detection(
    tokenizer: Any,
    count: int,
    seed: int,
    *,
    lengths: Sequence[float] | None = None,
    depths: Sequence[float] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """``count`` documents, balanced over lengths, depths and books, and their provenance."""
    bench, grid = nolima.detection_part("needle_set.json", lengths, depths)
    books = nolima.haystacks(bench, ruler_for({"tokenizer": tokenizer}))
    names = sorted({name for entry in bench.entries for name in entry.characters})
    rng = random.Random(f"{seed}-niah")
    cells = [(*cell, book) for cell in itertools.product(*grid) for book in sorted(books)]
    rng.shuffle(cells)
    found = []
    for i in range(count):
        length, depth, book = cells[i % len(cells)]
        filling = {"name": rng.choice(names), "number": str(rng.randrange(10**5, 10**6))}
        needle, question = NEEDLE.format(**filling), QUESTION.format(**filling)
        placed = after_sentence(books[book], needle, tokens=length, depth=depth)
        prompt, start = nolima.prompt_of(nolima.TEMPLATE, "", placed, question)
        found.append(
            {
                "id": f"niah_{i}_{book}_{length}_{depth:g}",
                "prompt": prompt,
                "answers": [filling["number"]],
                "question": question,
                "needle": needle,
                "needle_start": start,
                "needle_end": start + len(needle),
                "book": book,
                "length": length,
                "depth": depth,
            }
        )
    source = source_of("nolima", bench.found) | {
        "split": "detection",
        "lengths": list(grid[0]),
        "depths": list(grid[1]),
    }
    return found, source
