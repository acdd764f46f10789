"""NoLiMa's files: needle sets and books, and how they are held out.

    >>> bench = load_benchmark("needle_set.json")
    >>> bench.part("calibration").entries          # needles that no evaluation document contains
    (Entry(id='0403', ...), ...)

Detection, calibration and evaluation must not share needles, characters or books. Each of the
three kinds is ordered by a hash of its name and cut at fixed shares: six tenths are evaluation's,
the next quarter is detection's, the rest calibration's, and each part gets at least one. So the
parts depend on the names alone, not on their order in the files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lm_eval_locos.errors import DataError
from lm_eval_locos.sources.lookup import Found, locate

Part = Literal["evaluation", "detection", "calibration"]
PARTS: tuple[Part, ...] = get_args(Part)
_SHARES = (0.6, 0.85)
_SALT = "lm-eval-locos held-out split 1"
_FILES = ("needlesets/*.json", "haystack/rand_shuffle/*.txt")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Entry:
    """One needle with its questions.

    Attributes:
        id: such as ``0401``.
        needle: with ``{CHAR}``, ``{1}``, ``{2}`` ...
        questions: ``onehop`` and perhaps ``twohop``, with the same placeholders.
        characters: who may stand in ``{CHAR}``; empty where the needle has none.
        tests: per test its input args; ``{n}`` is the n-th of them.
        template: the prompt with ``{haystack}`` and ``{question}``, or None.
        system_prompt: may be empty.
        distractors: how many other candidates' sentences every context carries (bundled sample).
    """

    id: str
    needle: str
    questions: dict[str, str]
    characters: tuple[str, ...]
    tests: dict[str, tuple[str, ...]]
    template: str | None = None
    system_prompt: str = ""
    distractors: int = 0

    def fill(self, text: str, test: str, character: str) -> str:
        """``text`` with its placeholders replaced."""
        values = {str(i): arg for i, arg in enumerate(self.tests[test], 1)} | {"CHAR": character}
        return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


@dataclass(frozen=True)
class Benchmark:
    """Entries and books of one needle set, whole or a held-out part.

    Attributes:
        books: per file name its text.
        found: where the files lie.
        held_out: the part, or None for everything.
    """

    entries: tuple[Entry, ...]
    books: dict[str, str] = field(repr=False)
    found: Found
    held_out: Part | None = None

    def part(self, part: Part) -> Benchmark:
        """The needles, characters and books of one part; the three parts share none."""
        ids = _share([entry.id for entry in self.entries], part, "needles")
        everybody = sorted({name for entry in self.entries for name in entry.characters})
        people = set(_share(everybody, part, "characters")) if everybody else set()
        entries = []
        for entry in self.entries:
            if entry.id in ids:
                characters = tuple(name for name in entry.characters if name in people)
                if entry.characters and not characters:
                    raise DataError(
                        f"needle {entry.id}: none of its {len(entry.characters)} characters is in "
                        f"the {part} part. Give it more characters."
                    )
                entries.append(replace(entry, characters=characters))
        books = {name: self.books[name] for name in _share(sorted(self.books), part, "books")}
        return replace(self, entries=tuple(entries), books=books, held_out=part)


def _share(names: Sequence[str], part: Part, what: str) -> list[str]:
    """The names of one part, in hash order."""
    if len(names) < len(PARTS):
        raise DataError(
            f"{len(names)} {what} cannot be divided into {', '.join(PARTS)}. At least "
            f"{len(PARTS)} are needed; a task that holds nothing out is nolima_full."
        )
    ordered = sorted(names, key=lambda n: hashlib.sha256(f"{_SALT} {n}".encode()).hexdigest())
    size = len(names)
    first = min(round(size * _SHARES[0]), size - 2)
    second = min(max(round(size * _SHARES[1]), first + 1), size - 1)
    bounds = (0, max(first, 1), second, size)
    index = PARTS.index(part)
    return ordered[bounds[index] : bounds[index + 1]]


@functools.cache
def _load(name: str, found: Found) -> Benchmark:
    folder = found.path
    assert folder is not None  # raw files always lie in a folder
    candidates = [folder / "needlesets" / name, folder / name]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise DataError(f"no {name} in {folder} or its needlesets/. Copy NoLiMa's files there.")
    texts = sorted((folder / "haystack" / "rand_shuffle").glob("*.txt"))
    if not texts:
        raise DataError(f"no books in {folder}/haystack/rand_shuffle (rand_book_1.txt ...).")
    books = {text.name: text.read_text(encoding="utf-8") for text in texts}
    return Benchmark(read_entries(path), books, found)


def load_benchmark(name: str) -> Benchmark:
    """A needle set by its file name, with the books, from wherever NoLiMa's data is found."""
    return _load(name, locate("nolima", _FILES))


def read_entries(path: Path) -> tuple[Entry, ...]:
    """The entries of a needle-set file.

    Raises:
        DataError: not JSON, no list of entries, or an entry whose keys or placeholders are wrong;
            the message names file, entry and key.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}).") from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected a list of needles, found {type(rows).__name__}.")
    return tuple(_entry(row, f"{path}, needle {number}") for number, row in enumerate(rows, 1))


def _entry(row: Any, where: str) -> Entry:
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object, found {type(row).__name__}.")
    for key, kind in (("id", str), ("needle", str), ("questions", dict), ("tests", dict)):
        if not isinstance(row.get(key), kind):
            raise DataError(
                f"{where} ({row.get('id')}): {key} is {str(row.get(key))[:60]!r}, expected a "
                f"{'string' if kind is str else 'non-empty object'}."
            )
    where = f"{where} ({row['id']})"
    characters = tuple(row.get("character_set") or ())
    tests = {}
    for name, test in row["tests"].items():
        args = test.get("input_args") if isinstance(test, dict) else None
        if not isinstance(args, list) or not all(isinstance(arg, str) for arg in args):
            raise DataError(f"{where}: test {name} has no list of strings in input_args.")
        tests[name] = tuple(args)
    questions = {str(k): v for k, v in row["questions"].items() if isinstance(v, str) and v}
    if not tests or not questions:
        raise DataError(f"{where}: no {'questions' if tests else 'tests'}.")
    entry = Entry(
        id=row["id"],
        needle=row["needle"],
        questions=questions,
        characters=characters,
        tests=tests,
        template=row.get("task_template") or None,
        system_prompt=row.get("system_prompt") or "",
        distractors=int((row.get("distractors") or {}).get("count", 0)),
    )
    known = {"CHAR"} if characters else set()
    for text in (entry.needle, *questions.values()):
        for test, args in tests.items():
            missing = (
                set(_PLACEHOLDER.findall(text)) - known - {str(i) for i in range(1, len(args) + 1)}
            )
            if missing:
                raise DataError(
                    f"{where}: nothing for {{{sorted(missing)[0]}}} in test {test} "
                    f"({len(args)} input_args, {len(characters)} characters)."
                )
    for mark in ("{haystack}", "{question}"):
        if entry.template and mark not in entry.template:
            raise DataError(f"{where}: task_template has no {mark}.")
    return entry
