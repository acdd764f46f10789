"""NoLiMa's files: needle sets and books, and how they are held out.

    >>> bench = load_benchmark("needle_set.json")
    >>> bench.part("calibration").entries          # needles that no evaluation document contains
    (Entry(id='0403', ...), ...)

Detection, calibration and evaluation must not share needles, characters or books. Each of the
three kinds is ordered by a hash of its name and cut at fixed shares: six tenths are evaluation's,
the next quarter is detection's, the rest calibration's, and each part gets at least one. So the
parts depend on the names alone, not on their order in the files. They hold for all needle sets of a
folder together: the hard set's needles are not evaluated by one task and calibrated on by another.
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
_SETS = ("needle_set.json", "needle_set_hard.json", "needle_set_ONLYDirect.json")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_ID_NUMBER = re.compile(r"\D*\d+|.*")


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
        golds: per test its gold answers, where the needle has no ``{CHAR}`` to ask for.
    """

    id: str
    needle: str
    questions: dict[str, str]
    characters: tuple[str, ...]
    tests: dict[str, tuple[str, ...]]
    template: str | None = None
    system_prompt: str = ""
    distractors: int = 0
    golds: dict[str, tuple[str, ...]] = field(default_factory=dict)

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
        places: the input args of every test in the set, from which distractors are made.
        held_out: the part, or None for everything.
        keys: per needle text what it is held out by, the number its id begins with (0401 for
            0401Inv): the same needle under two ids, or in two sets, is in one part.
        sets: for every needle set in the folder its keys and its characters.
    """

    entries: tuple[Entry, ...]
    books: dict[str, str] = field(repr=False)
    found: Found
    places: tuple[tuple[str, ...], ...] = field(repr=False, default=())
    held_out: Part | None = None
    keys: dict[str, str] = field(repr=False, default_factory=dict)
    sets: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = field(repr=False, default=())

    def part(self, part: Part) -> Benchmark:
        """The needles, characters and books of one part; the three parts share none."""
        keys = _over_sets([keys for keys, _ in self.sets], part, "needles")
        people = _over_sets([names for _, names in self.sets if names], part, "characters")
        entries = []
        for entry in self.entries:
            if self.keys[entry.needle] in keys:
                characters = tuple(name for name in entry.characters if name in people)
                if entry.characters and not characters:
                    raise DataError(
                        f"needle {entry.id}: none of its {len(entry.characters)} characters is in "
                        f"the {part} part. Give it more characters."
                    )
                entries.append(replace(entry, characters=characters))
        if not entries:
            raise DataError(
                f"none of the {len(self.entries)} needles of this set is in the {part} part, which "
                "all sets of the folder share. Add needles, or use nolima_full."
            )
        books = {name: self.books[name] for name in _share(sorted(self.books), part, "books")}
        return replace(self, entries=tuple(entries), books=books, held_out=part)


def _over_sets(lists: Sequence[Sequence[str]], part: Part, what: str) -> set[str]:
    """The names of one part over several lists.

    The first list is divided, then of each further list what is new in it; fewer than three new
    names are evaluation's.
    """
    found: set[str] = set()
    seen: set[str] = set()
    for number, names in enumerate(lists):
        new = sorted(set(names) - seen)
        if number == 0 or len(new) >= len(PARTS):
            found.update(_share(new, part, what))
        elif part == "evaluation":
            found.update(new)
        seen.update(new)
    return found


def _share(names: Sequence[str], part: Part, what: str) -> list[str]:
    """The names of one part, in hash order."""
    if len(names) < len(PARTS):
        raise DataError(
            f"{len(names)} {what} cannot be divided into {', '.join(PARTS)}. At least "
            f"{len(PARTS)} are needed: add some, or use nolima_full, which holds nothing out."
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
        raise DataError(
            f"no books in {folder}/haystack/rand_shuffle. Copy NoLiMa's there: rand_book_1.txt ..."
        )
    books = {text.name: _book(text) for text in texts}
    entries = read_entries(path)
    places = sorted({args for entry in entries for args in entry.tests.values()})
    siblings = [path.with_name(other) for other in dict.fromkeys((*_SETS, name))]
    keys: dict[str, str] = {}
    sets = []
    for others in (read_entries(sibling) for sibling in siblings if sibling.is_file()):
        for entry in others:
            keys.setdefault(entry.needle, _ID_NUMBER.match(entry.id)[0])
        people = dict.fromkeys(person for entry in others for person in entry.characters)
        sets.append((tuple(dict.fromkeys(keys[e.needle] for e in others)), tuple(people)))
    return Benchmark(entries, books, found, tuple(places), None, keys, tuple(sets))


def _book(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}). Save the book as UTF-8.") from error
    if not text.strip():
        raise DataError(f"{path}: the book is empty. Copy NoLiMa's file there again.")
    return text


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
        text = path.read_text(encoding="utf-8-sig")
        rows = json.loads(text)
        if "\\u" in text:  # half a character can be escaped in JSON, and no tokenizer takes it
            json.dumps(rows, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: cannot be read as JSON ({error}). Copy NoLiMa's file there again."
        ) from error
    if not isinstance(rows, list) or not rows:
        raise DataError(f"{path}: expected a list of needles, found {type(rows).__name__}.")
    entries = tuple(_entry(row, f"{path}, needle {number}") for number, row in enumerate(rows, 1))
    for number, entry in enumerate(entries):
        if entry.id in {other.id for other in entries[:number]}:
            raise DataError(f"{path}: two needles have the id {entry.id}. Give each its own.")
    return entries


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
    characters = _answers(row.get("character_set") or [], f"{where}: character_set")
    tests = {}
    golds = {}
    for name, test in row["tests"].items():
        test = test if isinstance(test, dict) else {}
        tests[name] = _strings(test.get("input_args"), f"{where}: input_args of test {name}")
        if "{CHAR}" not in row["needle"]:
            gold = test.get("gold_answers")
            gold = [gold] if isinstance(gold, str) and gold else gold
            golds[name] = _answers(gold, f"{where}: gold_answers of test {name}")
            if not golds[name]:
                raise DataError(
                    f"{where}: test {name} has no gold_answers, and the needle no {{CHAR}}. Add "
                    "one of them."
                )
    questions = {str(k): v for k, v in row["questions"].items() if isinstance(v, str) and v}
    if not tests or not questions:
        raise DataError(
            f"{where}: no {'questions' if tests else 'tests'}. Expected at least one, as in "
            "NoLiMa's own file."
        )
    entry = Entry(
        id=row["id"],
        needle=row["needle"],
        questions=questions,
        characters=characters,
        tests=tests,
        template=row.get("task_template") or None,
        system_prompt=row.get("system_prompt") or "",
        distractors=_distractors(row.get("distractors"), where),
        golds=golds,
    )
    for key, value in (("task_template", entry.template), ("system_prompt", entry.system_prompt)):
        if value is not None and not isinstance(value, str):
            raise DataError(f"{where}: {key} is {str(value)[:60]!r}, expected a string.")
    known = {"CHAR"} if characters else set()
    for text in (entry.needle, *questions.values()):
        for test, args in tests.items():
            missing = (
                set(_PLACEHOLDER.findall(text)) - known - {str(i) for i in range(1, len(args) + 1)}
            )
            if missing:
                raise DataError(
                    f"{where}: nothing for {{{sorted(missing)[0]}}} in test {test} "
                    f"({len(args)} input_args, {len(characters)} characters). Add it, or remove "
                    "the placeholder."
                )
    for mark in ("{haystack}", "{question}"):
        if entry.template and mark not in entry.template:
            raise DataError(f"{where}: task_template has no {mark}. Add it, or remove the key.")
    return entry


def _strings(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise DataError(f"{where} is {str(value)[:60]!r}, expected a list of strings.")
    return tuple(value)


def _answers(value: Any, where: str) -> tuple[str, ...]:
    found = _strings(value, where)
    if not all(text.strip() for text in found):
        raise DataError(
            f"{where} has an empty string, which would be found in any response. Remove it."
        )
    return found


def _distractors(value: Any, where: str) -> int:
    """The number asked for; the benchmark's own distractor sets are another experiment."""
    if not value:
        return 0
    count = value.get("count") if isinstance(value, dict) else None
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise DataError(
            f"{where}: distractors is {str(value)[:60]!r}, expected {{'count': NUMBER}}. NoLiMa's "
            "set with distractors of its own is not read; take needle_set.json."
        )
    return count
