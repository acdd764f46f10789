"""Which documents a NoLiMa task has: grids of lengths and depths over needles, books, characters.

>>> numbers("lengths", "1000:16000:5")
(1000.0, 4750.0, 8500.0, 12250.0, 16000.0)
>>> next(paper_cases(bench, ("onehop",), (1000, 2000), (0.0, 50.0)))
Case(entry=..., length=1000, depth=0.0, book='rand_book_2.txt', character='Yuki')
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
from lm_eval_locos.sources.needles import Benchmark, Entry


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


def numbers(
    name: str,
    value: Any,
    *,
    least: float = 0,
    most: float = float("inf"),
    whole: bool = False,
) -> tuple[float, ...] | None:
    """A grid given as a number, a list of numbers or ``START:STOP:N``; None for None.

    Args:
        name: what messages call it.
        value: the grid.
        least, most: limits of its numbers.
        whole: whether they are rounded to whole numbers (lengths: there is no part of a token).

    Raises:
        DataError: anything else, nothing, a number twice (after rounding) or outside ``least`` ..
            ``most``.
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
            several = isinstance(value, list | tuple | range | np.ndarray)
            found = [float(x) for x in (value if several else [value])]
    except (TypeError, ValueError):
        found = []
    fits = all(math.isfinite(x) and least <= x <= most for x in found)
    if whole and fits:
        found = [float(round(x)) for x in found]
    if not found or len(set(found)) < len(found) or not fits:
        limit = f" to {most:g}" if most != float("inf") else ""
        raise DataError(
            f"{name}={value!r}: expected different numbers from {least:g}{limit}, as a list such "
            "as [500, 1000] or as START:STOP:COUNT"
            f"{'; they are rounded to whole tokens' if whole else ''}."
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
        seen = sorted({name for entry in bench.entries for name in entry.questions})
        raise DataError(
            f"no needle has a question of type {', '.join(questions)}. Expected one of: "
            f"{', '.join(seen) or 'none, in this needle set'}."
        )
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
