"""NoLiMa: one needle in a book, asked for by what one has to know about it.

Two ways of building contexts (the YAML files choose): the LOCOS paper's grid (needle after a
sentence, context with the needle of the asked length) and the benchmark's own (needle on a line of
its own in a sliding window, context without the needle of the asked length). Differences from the
paper's code, all on purpose: characters and books take turns instead of always the first character,
and a context of 1,000 tokens has 1,000 tokens instead of 1,000 less a reserve of 200.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import scoring
from lm_eval_locos.families.documents import Documents, package, source_of
from lm_eval_locos.families.tokenizers import ruler_for
from lm_eval_locos.sources.haystack import (
    Haystack,
    Placement,
    Ruler,
    after_sentence,
    on_line,
)
from lm_eval_locos.sources.needles import Benchmark, Entry, load_benchmark

TEMPLATE = (
    "Read the text.\n\n{haystack}\n\n"
    "Answer the question about the text with a name or a few words, nothing else.\n\n"
    "Question: {question}\nAnswer:"
)
"""The prompt of an entry without a template of its own."""

PAPER_LENGTHS = (1000, 4750, 8500, 12250, 16000)
BUNDLED_LENGTHS = (200, 250, 300, 350, 400)
"""The grid of the bundled sample where a task has no length in its name: small models read it."""

PAPER_DEPTHS = (0.0, 25.0, 50.0, 75.0, 100.0)
BENCHMARK_DEPTHS = 26
_CALIBRATION_LENGTHS = (1000, 2000, 3000, 4000)


@dataclass(frozen=True)
class Case:
    """What one document asks: an entry's test with a question type, at a length and a depth."""

    entry: Entry
    test: str
    question: str
    length: int
    depth: float
    book: str
    character: str

    @property
    def id(self) -> str:
        """Unique within a task."""
        parts = (self.entry.id, self.test, self.question, self.character, self.book)
        return "_".join((*parts, str(self.length), f"{self.depth:g}"))


def load(
    needle_set: str = "needle_set.json",
    questions: Sequence[str] = ("onehop",),
    placement: str = "sentence",
    tokens: int | None = None,
    held_out: bool = True,
    lengths: Any = None,
    depths: Any = None,
    **kwargs: Any,
) -> Documents:
    """The documents of a NoLiMa task.

    Args:
        needle_set: file name of the needle set.
        questions: question types, onehop and twohop; entries without one are passed over.
        placement: ``sentence`` (paper) or ``line`` (benchmark).
        tokens: the context length in the task's name, or None for the paper's grid.
        held_out: only the evaluation part of needles, characters and books.
        lengths, depths: override the grid (``--metadata``): a number, a list or ``START:STOP:N``.
        **kwargs: the model's arguments, for its tokenizer.

    Raises:
        DataError: missing or wrong data, or a wrong grid.
    """
    whole = load_benchmark(needle_set)
    bench = whole.part("evaluation") if held_out else whole
    bundled = bench.found.kind == "bundled"
    grid_lengths = numbers("lengths", lengths, least=1) or (
        (tokens,) if tokens else BUNDLED_LENGTHS if bundled else PAPER_LENGTHS
    )
    default_depths = np.linspace(0, 100, BENCHMARK_DEPTHS) if placement == "line" else PAPER_DEPTHS
    grid_depths = numbers("depths", depths, most=100) or tuple(map(float, default_depths))
    cases = (benchmark_cases if placement == "line" else paper_cases)(
        bench, questions, [int(n) for n in grid_lengths], grid_depths
    )
    ruler = ruler_for(kwargs)
    return package(
        documents(bench, cases, ruler, placement),
        source_of("nolima", bench.found) | {"needle_set": needle_set},
        split=bench.held_out or "everything (not held out)",
        lengths=[int(n) for n in grid_lengths],
        depths=list(grid_depths),
        placement=placement,
        unit=ruler.unit,
    )


def numbers(
    name: str, value: Any, *, least: float = 0, most: float = float("inf")
) -> tuple[float, ...] | None:
    """A grid given as a number, a list of numbers or ``START:STOP:N``; None for None.

    Raises:
        DataError: anything else, nothing, a number twice or outside ``least`` .. ``most``.
    """
    if value is None:
        return None
    try:
        if isinstance(value, str) and value.count(":") == 2:
            start, stop, count = value.split(":")
            found = [float(x) for x in np.linspace(float(start), float(stop), int(count))]
        elif isinstance(value, str):
            found = [float(part) for part in value.replace(",", " ").split()]
        else:
            found = [float(x) for x in (value if isinstance(value, list | tuple) else [value])]
    except (TypeError, ValueError):
        found = []
    fits = all(math.isfinite(x) and least <= x <= most for x in found)
    if not found or len(set(found)) < len(found) or not fits:
        limit = f" to {most:g}" if most != float("inf") else ""
        raise DataError(
            f"{name}={value!r}: expected different numbers from {least:g}{limit}, as a list such "
            "as [500, 1000] or as START:STOP:COUNT."
        )
    return tuple(found)


def _items(bench: Benchmark, questions: Sequence[str]) -> list[tuple[Entry, str, str]]:
    """(entry, test, question type) in a fixed order that does not follow the files."""
    found = [
        (entry, test, question)
        for entry in bench.entries
        for test in entry.tests
        for question in questions
        if question in entry.questions
    ]
    if not found:
        raise DataError(f"no needle has a question of type {', '.join(questions)}.")
    return sorted(
        found,
        key=lambda item: hashlib.sha256(f"{item[0].id} {item[1]} {item[2]}".encode()).hexdigest(),
    )


def _coprime(least: int, size: int) -> int:
    """The first number from ``least`` on that shares no factor with ``size``.

    A needle whose turns are so many cells apart meets every cell once. With the number of needles
    for ``least``, the cells of successive documents follow each other, turn after turn.
    """
    return next(n for n in itertools.count(max(least, 1)) if math.gcd(n, size) == 1)


def _cells(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of the axes' values, in an order whose beginnings are balanced.

    The values of each axis are visited in steps of the golden section, so that few of them spread
    over all; the longest axis moves at every cell, the others too, each with a shift of its own.
    """
    spread = []
    for axis in axes:
        step = _coprime(round(len(axis) * 0.618), len(axis))
        spread.append([axis[n * step % len(axis)] for n in range(len(axis))])
    order = sorted(range(len(axes)), key=lambda n: -len(axes[n]))
    cells = []
    for number in range(math.prod(map(len, axes))):
        cell: list[Any] = [None] * len(axes)
        rest, first = divmod(number, len(axes[order[0]]))
        cell[order[0]] = spread[order[0]][first]
        for n in order[1:]:
            rest, shift = divmod(rest, len(axes[n]))
            cell[n] = spread[n][(first + shift) % len(axes[n])]
        cells.append(tuple(cell))
    return cells


def paper_cases(
    bench: Benchmark, questions: Sequence[str], lengths: Sequence[int], depths: Sequence[float]
) -> Iterator[Case]:
    """Every test at every length and depth, ordered so that any beginning is balanced.

    Each test goes through its characters in an order of its own: with one common order every cell
    would always meet the same character.
    """
    items, books = _items(bench, questions), sorted(bench.books)
    cells = _cells(lengths, depths)
    step = _coprime(len(items), len(cells))
    characters = [
        random.Random(" ".join((entry.id, test, question))).sample(people, len(people))
        for entry, test, question in items
        for people in [entry.characters or ("",)]
    ]
    for turn in range(len(cells)):
        for i, (entry, test, question) in enumerate(items):
            length, depth = cells[(i + turn * step) % len(cells)]
            book = books[(i + turn) % len(books)]
            character = characters[i][turn % len(characters[i])]
            yield Case(entry, test, question, length, depth, book, character)


def benchmark_cases(
    bench: Benchmark, questions: Sequence[str], lengths: Sequence[int], depths: Sequence[float]
) -> Iterator[Case]:
    """Every book, test, question type, length and depth; characters drawn as the benchmark does.

    Per entry and book one stream of draws over the depths (numpy's `RandomState.choice`), seeded
    with 42 + the number in the first four characters of the id + the book's index.
    """
    items, books = _items(bench, questions), sorted(bench.books)
    cells = _cells(range(len(books)), lengths, range(len(depths)))
    step = _coprime(len(items), len(cells))
    for turn in range(len(cells)):
        for i, (entry, test, question) in enumerate(items):
            book, length, depth = cells[(i + turn * step) % len(cells)]
            character = _drawn(entry.id, entry.characters or ("",), book, len(depths))[depth]
            yield Case(entry, test, question, length, depths[depth], books[book], character)


@functools.lru_cache(maxsize=1024)
def _drawn(entry: str, characters: tuple[str, ...], book: int, depths: int) -> list[str]:
    """One character a depth."""
    digits = entry[:4]
    stream = np.random.RandomState(42 + (int(digits) if digits.isdecimal() else 0) + book)
    return [characters[stream.choice(len(characters))] for _ in range(depths)]


@functools.lru_cache(maxsize=16)
def _haystack(text: str, ruler: Ruler) -> Haystack:
    """A book is tokenised once for all tasks of a run."""
    return Haystack.of(text, ruler)


def documents(
    bench: Benchmark, cases: Iterator[Case], ruler: Ruler, placement: str
) -> list[dict[str, Any]]:
    """The documents of ``cases``, their contexts measured with ``ruler``."""
    books = {name: _haystack(text, ruler) for name, text in bench.books.items()}
    return [_document(case, books[case.book], bench.places, placement) for case in cases]


def _document(
    case: Case, book: Haystack, places: Sequence[tuple[str, ...]], placement: str
) -> dict[str, Any]:
    entry = case.entry
    needle = entry.fill(entry.needle, case.test, case.character)
    question = entry.fill(entry.questions[case.question], case.test, case.character)
    place = on_line if placement == "line" else after_sentence
    placed: Placement = place(
        book,
        needle,
        tokens=case.length,
        depth=case.depth,
        distractors=_distractors(case, places),
        seed=case.id,
    )
    prompt = (entry.template or TEMPLATE).replace("{question}", question)
    prompt = prompt.replace("{haystack}", placed.text)
    if entry.system_prompt:
        prompt = f"{entry.system_prompt}\n\n{prompt}"
    answers = [case.character] if "{CHAR}" in entry.needle else list(entry.golds[case.test])
    return {
        "id": case.id,
        "family": "nolima",
        "cluster": entry.id,
        "prompt": prompt,
        "answers": answers,
        "question": question,
        "question_type": case.question,
        "needle": needle,
        "character": case.character,
        "book": case.book,
        "length": case.length,
        "depth": case.depth,
        "context_tokens": placed.tokens,
        "needle_depth": placed.depth,
    }


def _distractors(case: Case, places: Sequence[tuple[str, ...]]) -> list[str]:
    """Sentences like the needle, of other people in other countries: none answers the question."""
    entry = case.entry
    if not entry.distractors:
        return []
    rng = random.Random(case.id)
    gold = entry.tests[case.test]
    others = [args for args in places if not set(args) & set(gold)]
    people = [name for name in entry.characters if name != case.character]
    if len(others) < entry.distractors or len(people) < entry.distractors:
        raise DataError(
            f"needle {entry.id} asks for {entry.distractors} distractors; there are {len(others)} "
            f"other places and {len(people)} other characters. Ask for fewer, or add some."
        )
    tests = {str(i): args for i, args in enumerate(rng.sample(others, entry.distractors))}
    filled = Entry(entry.id, entry.needle, entry.questions, entry.characters, tests)
    chosen = rng.sample(people, entry.distractors)
    return [filled.fill(entry.needle, t, name) for t, name in zip(tests, chosen, strict=True)]


def score(doc: dict[str, Any], response: str) -> dict[str, float]:
    """``rouge_l`` (F, stemmed), ``rouge_1_recall`` and the benchmark's own ``contains``."""
    golds = doc["answers"]
    return {
        "rouge_l": max(scoring.rouge_l(gold, response) for gold in golds),
        "rouge_1_recall": max(scoring.rouge_1_recall(gold, response) for gold in golds),
        "contains": scoring.contains(doc["answers"], response),
    }


def _contents(bench: Benchmark) -> set[str]:
    """The hashes of a part's needles, characters and books."""
    texts = {entry.needle for entry in bench.entries} | set(bench.books.values())
    texts |= {name for entry in bench.entries for name in entry.characters}
    return {hashlib.sha256(text.encode("utf-8")).hexdigest() for text in texts}


def calibration(tokenizer: Any, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of needles, characters and books that no evaluation document has."""
    whole = load_benchmark("needle_set.json")
    bench, evaluation = whole.part("calibration"), whole.part("evaluation")
    shared = _contents(bench) & _contents(evaluation)
    if shared:
        raise DataError(
            "calibration and evaluation share a needle, a character or a book (sha256 "
            f"{sorted(shared)[0]}). Look for the same text under two names."
        )
    lengths = BUNDLED_LENGTHS if bench.found.kind == "bundled" else _CALIBRATION_LENGTHS
    cases = list(paper_cases(bench, ("onehop",), lengths, PAPER_DEPTHS))
    random.Random(seed).shuffle(cases)
    found = documents(bench, iter(cases[:count]), ruler_for({"tokenizer": tokenizer}), "sentence")
    return [doc["prompt"] for doc in found], source_of("nolima", bench.found)
