"""Places a needle in a book: pure functions in token space.

    >>> ruler = tokenizer_ruler(tokenizer)
    >>> book = Haystack.of(text, ruler)                    # tokenises once
    >>> placed = after_sentence(book, "Yuki lives next to the Louvre.", tokens=1000, depth=50)
    >>> placed.text[placed.start : placed.end]
    'Yuki lives next to the Louvre.'

Two ways, which differ in more than a detail:

`after_sentence` (the LOCOS paper's): the context *with* the needle has the asked number of tokens.
    The haystack is the book from its beginning, cut at a sentence end; the needle comes after the
    last sentence end at or before the asked depth.
`on_line` (NoLiMa's own): the context *without* the needle has the asked number of tokens. Valid
    places are line breaks; the window of the book slides so that the first line break far enough
    into the book stands exactly at the asked depth.

Token counts are sums over the pieces of a context (haystack before, needle, haystack after), each
tokenised by itself: at a seam they can differ from the tokens of the whole by a token or two.
"""

from __future__ import annotations

import functools
import logging
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lm_eval_locos.errors import DataError
from lm_eval_locos.sources.rulers import Positions, Ruler

logger = logging.getLogger(__name__)

# A terminator with its closing quotes, before a blank; a full-width one, which needs no blank; and
# the end of a line, since a heading has no full stop.
_SENTENCE_END = re.compile(
    r"""[.!?\u2026]+["'\u201d\u2019\u00bb)\]]*(?=\s|\Z)"""
    r"""|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\u2019\uff09]*"""
    r"""|\S(?=[ \t]*(?:\n|\Z))"""
)
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Col|Gen|Capt|Messrs|vs)|\b[A-Z])\.\Z")


def sentence_ends(text: str) -> Positions:
    """The character positions right after each sentence, ascending, 0 first.

    A full stop after a title (Mr., Dr.) or an initial (J.) inside a line ends no sentence.
    """
    ends = [0]
    for match in _SENTENCE_END.finditer(text):
        end = match.end()
        inside_line = end < len(text) and text[end] == " "
        if inside_line and _ABBREVIATION.search(text, max(0, end - 8), end):
            continue
        ends.append(end)
    return np.array(ends, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Haystack:
    """A book with the start of each token and the end of each sentence (character positions)."""

    text: str
    ruler: Ruler
    starts: Positions
    ends: Positions

    @classmethod
    def of(cls, text: str, ruler: Ruler) -> Haystack:
        """Tokenises `text`; raises `DataError` when there is nothing in it."""
        starts = ruler.starts(text)
        if len(starts) == 0:
            raise DataError("the haystack is empty. Give a book with text.")
        return cls(text, ruler, starts, sentence_ends(text))

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.starts)

    def position(self, token: int) -> int:
        """The character at which token number `token` starts; the text's end past the last."""
        return int(self.starts[token]) if token < len(self.starts) else len(self.text)

    def tokens_before(self, position: int) -> int:
        """The number of tokens that start before a character position."""
        return int(np.searchsorted(self.starts, position, side="left"))

    def last_end(self, position: int) -> int:
        """The last sentence end at or before a character position."""
        return int(self.ends[np.searchsorted(self.ends, position, side="right") - 1])

    @functools.cached_property
    def line_breaks(self) -> tuple[Positions, Positions]:
        """Tokens with a line break in them, and the character of each one's last line break."""
        characters = np.array(
            [match.start() for match in re.finditer("\n", self.text)], dtype=np.int64
        )
        tokens = np.maximum(np.searchsorted(self.starts, characters, side="right") - 1, 0)
        last = np.append(tokens[1:] != tokens[:-1], True) if len(tokens) else np.array([], bool)
        return tokens[last], characters[last]

    def covering(self, tokens: int) -> Haystack:
        """This haystack, repeated until it has `tokens` tokens; the repetition is logged once."""
        if len(self) >= tokens:
            return self
        _warn_repeated(self.text, len(self), self.ruler.unit)
        return self._repeated(-(-tokens // len(self)))

    @functools.lru_cache(maxsize=32)  # noqa: B019 (the cache lives as long as the books do)
    def _repeated(self, times: int) -> Haystack:
        unit = self.text.rstrip("\n") + "\n"
        starts = self.starts[self.starts < len(unit)]
        ends = self.ends[(self.ends > 0) & (self.ends <= len(unit))]
        shifts = np.arange(times, dtype=np.int64)[:, None] * len(unit)
        return Haystack(
            unit * times,
            self.ruler,
            (starts[None, :] + shifts).reshape(-1),
            np.append(0, (ends[None, :] + shifts).reshape(-1)),
        )


@functools.lru_cache(maxsize=256)
def _warn_repeated(text: str, tokens: int, unit: str) -> None:
    logger.warning(
        "the book that begins %r has %d %s, fewer than the context asks for: it is repeated.",
        text[:40],
        tokens,
        unit,
    )


@dataclass(frozen=True)
class Placement:
    """A context with its needle.

    text: the context; text[start:end] is the needle.
    tokens: tokens of the context with the needle.
    depth: tokens before the needle, in percent of the context's tokens without it.
    """

    text: str
    start: int
    end: int
    tokens: int
    depth: float


def after_sentence(
    haystack: Haystack,
    needle: str,
    *,
    tokens: int,
    depth: float,
    start: int = 0,
    distractors: Sequence[str] = (),
    seed: str = "",
) -> Placement:
    """The needle after the last sentence end at or before `depth` percent of the haystack.

    tokens: of the context with the needle, at most; less than a sentence is missing.
    start: token of the book from which on the haystack begins (at a sentence's beginning).
    distractors, seed: sentences to place as `weave` does; they count as part of the haystack.
    The haystack's text is unchanged, and a blank stands between it and the needle.
    """
    _check(tokens, depth)
    extra = sum(haystack.ruler.count(" " + sentence) for sentence in distractors)
    needle_tokens = haystack.ruler.count(" " + needle)
    budget = tokens - needle_tokens - extra
    if budget < 0:
        raise DataError(
            f"a context of {tokens} {haystack.ruler.unit} has no room for the needle "
            f"({needle_tokens}) and {len(distractors)} distractors ({extra}). Ask for a longer one."
        )
    haystack = haystack.covering(start + budget)
    first = haystack.last_end(haystack.position(start))
    text = haystack.text
    while first < len(text) and text[first].isspace():
        first += 1
    offset = haystack.tokens_before(first)
    # The token that starts at the blank before `first` is counted with the sentence before.
    cut = max(first, haystack.last_end(haystack.position(offset + budget)))
    size = haystack.tokens_before(cut) - offset
    target = haystack.position(offset + round(size * depth / 100))
    place = max(first, haystack.last_end(min(target, cut)))
    return _assemble(
        haystack,
        (first, place, haystack.tokens_before(place) - offset),
        (needle, needle_tokens),
        (place, cut, haystack.tokens_before(cut) - haystack.tokens_before(place)),
        tail="" if place == cut or text[place].isspace() else " ",
        depth=depth,
        distractors=distractors,
        seed=seed,
    )


def on_line(
    haystack: Haystack,
    needle: str,
    *,
    tokens: int,
    depth: float,
    distractors: Sequence[str] = (),
    seed: str = "",
) -> Placement:
    """The needle at the end of a line that stands at `depth` percent of a sliding window.

    tokens: of the context without the needle. Among the line breaks of the book the first, p
    (counted in tokens), with p / (tokens + 1) >= depth is taken, and the window is the `tokens`
    tokens that begin round(tokens * depth) before it. The context is the window up to that line
    break, a blank, the needle, a line break, and the rest of the window. The book's own beginning
    counts as a place too; there the needle has no blank before it.
    distractors, seed: as for `after_sentence`; they count as part of the haystack.
    """
    _check(tokens, depth)
    extra = sum(haystack.ruler.count(" " + sentence) for sentence in distractors)
    size = tokens - extra
    if size <= 0:
        raise DataError(
            f"a context of {tokens} {haystack.ruler.unit} has no room for {len(distractors)} "
            f"distractors ({extra}). Ask for a longer one."
        )
    before = round(size * depth / 100)
    place = _line(haystack, size, depth / 100)
    if place is None or place[0] - before + size > len(haystack):
        if len(haystack.line_breaks[0]) == 0:
            raise DataError(
                f"the book that begins {haystack.text[:40]!r} has no line break, and this "
                "benchmark places needles at line breaks. Write it with one paragraph a line."
            )
        # A window and one whole book more: some line break lies behind the first window.
        haystack = haystack.covering(2 * (size + 1) + len(haystack))
        place = _line(haystack, size, depth / 100)
        assert place is not None
    token, position = place
    first = haystack.position(token - before)
    last = haystack.position(token - before + size)
    after = min(position + 1, last) if position >= 0 else first
    return _assemble(
        haystack,
        (first, max(position, first), before),
        (needle, haystack.ruler.count(" " + needle)),
        (after, last, size - before),
        tail="\n",
        depth=depth,
        distractors=distractors,
        seed=seed,
    )


def _line(haystack: Haystack, size: int, depth: float) -> tuple[int, int] | None:
    """Token and character of the first place for `on_line`; character -1 is the beginning."""
    if depth <= 0:
        return 0, -1
    tokens, characters = haystack.line_breaks
    found = np.flatnonzero(tokens / (size + 1) >= depth)
    return (int(tokens[found[0]]), int(characters[found[0]])) if len(found) else None


def _check(tokens: int, depth: float) -> None:
    if tokens <= 0 or not 0 <= depth <= 100:
        raise DataError(
            f"length {tokens}, depth {depth}: expected a length above 0 and a depth in 0 .. 100."
        )


def _assemble(
    haystack: Haystack,
    before: tuple[int, int, int],
    needle: tuple[str, int],
    after: tuple[int, int, int],
    *,
    tail: str,
    depth: float,
    distractors: Sequence[str],
    seed: str,
) -> Placement:
    """Puts the pieces together: (start, end, tokens) of the book around (needle, tokens).

    Distractors are divided between both sides in proportion to the depth, so that they do not move
    the needle. ``tail`` stands between the needle and the rest.
    """
    ruler = haystack.ruler
    share = round(len(distractors) * depth / 100)
    if before[0] == before[1]:
        share = 0
    elif not haystack.text[after[0] : after[1]].strip():
        share = len(distractors)
    rng = random.Random(seed)
    head = weave(haystack, *before[:2], distractors[:share], rng)
    rest = weave(haystack, *after[:2], distractors[share:], rng)
    sizes = [ruler.count(" " + sentence) for sentence in distractors]
    head_tokens = before[2] + sum(sizes[:share])
    haystack_tokens = head_tokens + after[2] + sum(sizes[share:])
    if head:
        head += " "
    return Placement(
        text=head + needle[0] + tail + rest,
        start=len(head),
        end=len(head) + len(needle[0]),
        tokens=haystack_tokens + needle[1],
        depth=100 * head_tokens / haystack_tokens if haystack_tokens else 0.0,
    )


def weave(
    haystack: Haystack, start: int, end: int, sentences: Sequence[str], rng: random.Random
) -> str:
    """The book from ``start`` to ``end``, each sentence after a sentence end drawn at random."""
    if not sentences:
        return haystack.text[start:end]
    first, last = np.searchsorted(haystack.ends, (start, end), side="right")
    ends = haystack.ends[first:last].tolist()
    if not ends:
        raise DataError(
            f"no sentence end in {haystack.text[start:end][:40]!r} to place {len(sentences)} "
            "sentences at. Ask for a longer context."
        )
    pieces = []
    for place, sentence in sorted(zip(rng.choices(ends, k=len(sentences)), sentences, strict=True)):
        pieces += [haystack.text[start:place], " ", sentence]
        start = place
    return "".join(pieces) + haystack.text[start:end]
