"""NoLiMa: one needle in a book, asked for by what one has to know about it.

Two ways of building contexts (the YAML files choose): the LOCOS paper's grid (needle after a
sentence, context with the needle of the asked length) and the benchmark's own (needle on a line of
its own in a sliding window, context without the needle of the asked length). Differences from the
paper's code, all on purpose: characters and books take turns instead of always the first character,
and a context of 1,000 tokens has 1,000 tokens instead of 1,000 less a reserve of 200.
"""

from __future__ import annotations

import hashlib
import itertools
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
    tokenizer_ruler,
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
    if not found or len(set(found)) < len(found) or not all(least <= x <= most for x in found):
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


def paper_cases(
    bench: Benchmark, questions: Sequence[str], lengths: Sequence[int], depths: Sequence[float]
) -> Iterator[Case]:
    """Every test at every length and depth, ordered so that any beginning is balanced."""
    items, books = _items(bench, questions), sorted(bench.books)
    cells = list(itertools.product(lengths, depths))
    random.Random("cells").shuffle(cells)
    for turn in range(len(cells)):
        for i, (entry, test, question) in enumerate(items):
            length, depth = cells[(i + turn) % len(cells)]
            characters = entry.characters or ("",)
            yield Case(
                entry,
                test,
                question,
                length,
                depth,
                books[(i + turn) % len(books)],
                characters[(i + turn) % len(characters)],
            )


def benchmark_cases(
    bench: Benchmark, questions: Sequence[str], lengths: Sequence[int], depths: Sequence[float]
) -> Iterator[Case]:
    """Every book, test, question type, length and depth; characters drawn as the benchmark does.

    Per entry and book one stream of draws over the depths, seeded with 42 + the number in the first
    four characters of the id + the book's index.
    """
    items, books = _items(bench, questions), sorted(bench.books)
    columns = list(itertools.product(range(len(books)), lengths, range(len(depths))))
    random.Random("cells").shuffle(columns)
    for turn in range(len(columns)):
        for i, (entry, test, question) in enumerate(items):
            book, length, depth = columns[(i + turn) % len(columns)]
            digits = entry.id[:4]
            seed = 42 + (int(digits) if digits.isdecimal() else 0) + book
            stream = random.Random(seed)
            characters = entry.characters or ("",)
            character = [stream.choice(characters) for _ in range(depth + 1)][-1]
            yield Case(entry, test, question, length, depths[depth], books[book], character)


def documents(
    bench: Benchmark, cases: Iterator[Case], ruler: Ruler, placement: str
) -> list[dict[str, Any]]:
    """The documents of ``cases``, their contexts measured with ``ruler``."""
    books = {name: Haystack.of(text, ruler) for name, text in bench.books.items()}
    places = sorted({args for entry in bench.entries for args in entry.tests.values()})
    return [_document(case, books[case.book], places, placement) for case in cases]


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
    answer = case.character if "{CHAR}" in entry.needle else entry.tests[case.test][0]
    return {
        "id": case.id,
        "family": "nolima",
        "cluster": entry.id,
        "prompt": prompt,
        "answers": [answer],
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
    gold = doc["answers"][0]
    return {
        "rouge_l": scoring.rouge_l(gold, response),
        "rouge_1_recall": scoring.rouge_1_recall(gold, response),
        "contains": scoring.contains(doc["answers"], response),
    }


def calibration(tokenizer: Any, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of needles, characters and books that no evaluation document has."""
    whole = load_benchmark("needle_set.json")
    bench, evaluation = whole.part("calibration"), whole.part("evaluation")
    shared = {e.id for e in bench.entries} & {e.id for e in evaluation.entries} or (
        set(bench.books.values()) & set(evaluation.books.values())
    )
    if shared:
        raise DataError(f"calibration and evaluation share needles or books: {sorted(shared)[:3]}")
    lengths = BUNDLED_LENGTHS if bench.found.kind == "bundled" else _CALIBRATION_LENGTHS
    cases = list(paper_cases(bench, ("onehop",), lengths, PAPER_DEPTHS))
    random.Random(seed).shuffle(cases)
    found = documents(bench, iter(cases[:count]), tokenizer_ruler(tokenizer), "sentence")
    return [doc["prompt"] for doc in found], source_of("nolima", bench.found)
