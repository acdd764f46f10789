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
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import scoring
from lm_eval_locos.families.documents import Documents, package, source_of
from lm_eval_locos.families.grids import Case, benchmark_cases, numbers, paper_cases
from lm_eval_locos.families.tokenizers import ruler_for
from lm_eval_locos.sources.haystack import (
    Haystack,
    Placement,
    after_sentence,
    on_line,
)
from lm_eval_locos.sources.needles import PARTS, Benchmark, Entry, Part, load_benchmark
from lm_eval_locos.sources.rulers import Ruler

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
    bench = _held_out(whole, "evaluation") if held_out else whole
    grid_lengths = numbers("lengths", lengths, least=1, whole=True) or (
        (tokens,) if tokens else _paper_lengths(bench)
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


@functools.lru_cache(maxsize=16)
def _haystack(text: str, ruler: Ruler) -> Haystack:
    """A book is tokenised once for all tasks of a run."""
    return Haystack.of(text, ruler)


def haystacks(bench: Benchmark, ruler: Ruler) -> dict[str, Haystack]:
    """The books of a part by their names."""
    return {name: _haystack(text, ruler) for name, text in bench.books.items()}


def documents(
    bench: Benchmark, cases: Iterable[Case], ruler: Ruler, placement: str
) -> list[dict[str, Any]]:
    """The documents of ``cases``, their contexts measured with ``ruler``.

    ``prompt[needle_start:needle_end]`` is the needle.
    """
    books = haystacks(bench, ruler)
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
    prompt, start = prompt_of(entry.template or TEMPLATE, entry.system_prompt, placed, question)
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
        "needle_start": start,
        "needle_end": start + len(needle),
        "character": case.character,
        "book": case.book,
        "length": case.length,
        "depth": case.depth,
        "context_tokens": placed.tokens,
        "needle_depth": placed.depth,
    }


def prompt_of(template: str, system: str, placed: Placement, question: str) -> tuple[str, int]:
    """The filled template, and the character in it at which the needle starts."""
    parts = template.partition("{haystack}")  # first: the question may hold these marks
    before, after = (parts[i].replace("{question}", question) for i in (0, 2))
    if system:
        before = f"{system}\n\n{before}"
    return before + placed.text + after, len(before) + placed.start


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


def _held_out(whole: Benchmark, part: Part) -> Benchmark:
    """One part, after a check by hash that it shares nothing with the other two."""
    bench = whole.part(part)
    for other in PARTS:
        if other == part:
            continue
        try:
            shared = _contents(bench) & _contents(whole.part(other))
        except DataError:  # a small set: it has no needle in that part
            continue
        if shared:
            raise DataError(
                f"{part} and {other} share a needle, a character or a book (sha256 "
                f"{sorted(shared)[0]}). Look for the same text under two names."
            )
    return bench


def _contents(bench: Benchmark) -> set[str]:
    """The hashes of a part's needles, characters and books."""
    texts = {entry.needle for entry in bench.entries} | set(bench.books.values())
    texts |= {name for entry in bench.entries for name in entry.characters}
    return {hashlib.sha256(text.encode("utf-8")).hexdigest() for text in texts}


def _paper_lengths(bench: Benchmark) -> tuple[int, ...]:
    return BUNDLED_LENGTHS if bench.found.kind == "bundled" else PAPER_LENGTHS


def calibration(tokenizer: Any, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of needles, characters and books that no evaluation document has."""
    bench = _held_out(load_benchmark("needle_set.json"), "calibration")
    lengths = BUNDLED_LENGTHS if bench.found.kind == "bundled" else _CALIBRATION_LENGTHS
    cases = list(paper_cases(bench, ("onehop",), lengths, PAPER_DEPTHS))
    random.Random(seed).shuffle(cases)
    found = documents(bench, cases[:count], ruler_for({"tokenizer": tokenizer}), "sentence")
    return [doc["prompt"] for doc in found], source_of("nolima", bench.found)


def detection_part(
    needle_set: str, lengths: Sequence[float] | None, depths: Sequence[float] | None
) -> tuple[Benchmark, tuple[tuple[int, ...], tuple[float, ...]]]:
    """The detection part of a needle set; lengths and depths, the paper's where not given.

    Raises:
        DataError: wrong data, or a wrong grid.
    """
    bench = _held_out(load_benchmark(needle_set), "detection")
    tokens = numbers("lengths", lengths, least=1, whole=True) or _paper_lengths(bench)
    return bench, (
        tuple(int(n) for n in tokens),
        numbers("depths", depths, most=100) or PAPER_DEPTHS,
    )


def detection(
    tokenizer: Any,
    count: int,
    seed: int,
    *,
    needle_set: str = "needle_set.json",
    questions: Sequence[str] = ("onehop",),
    lengths: Sequence[float] | None = None,
    depths: Sequence[float] | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Documents of the detection part, which neither evaluation nor calibration has, and their
    provenance.

    They are neighbours in an order of which any stretch is balanced over lengths, depths, needles
    and books; the seed says where it begins.

    Raises:
        DataError: fewer documents than ``count``, or wrong data.
    """
    bench, grid = detection_part(needle_set, lengths, depths)
    cases = list(paper_cases(bench, questions, *grid))
    if count > len(cases):
        raise DataError(
            f"{count} trials were asked for, and the detection part of {needle_set} has "
            f"{len(cases)} on {len(grid[0])} lengths and {len(grid[1])} depths. Ask for at most "
            "so many, or for more lengths and depths."
        )
    first = random.Random(seed).randrange(len(cases))
    cases = (cases[first:] + cases[:first])[:count]
    found = documents(bench, cases, ruler_for({"tokenizer": tokenizer}), "sentence")
    # The needle's character and those of the distractors: whom a guess can name.
    candidates = {1 + c.entry.distractors * ("{CHAR}" in c.entry.needle) for c in cases}
    provenance = source_of("nolima", bench.found) | {
        "needle_set": needle_set,
        "questions": list(questions),
        "split": "detection",
        "lengths": list(grid[0]),
        "depths": list(grid[1]),
        **({"candidates": max(candidates)} if len(candidates) == 1 < max(candidates) else {}),
    }
    return found, provenance
