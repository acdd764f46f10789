"""How long a text is: in a tokenizer's tokens, or in words where the tokenizer is not known.

>>> tokenizer_ruler(tokenizer).count("Yuki lives next to the Louvre.")
9
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]
"""Character positions in a text."""


@dataclass(frozen=True, eq=False)
class Ruler:
    """Measures text in a tokenizer's tokens, or in words.

    starts: the character position at which each token of a text starts, ascending.
    """

    name: str
    unit: str
    starts: Callable[[str], Positions]

    def count(self, text: str) -> int:
        """The number of tokens in `text`."""
        return len(self.starts(text))


def _word_starts(text: str) -> Positions:
    return np.array([match.start() for match in re.finditer(r"\S+", text)], dtype=np.int64)


WORDS = Ruler("words", "words", _word_starts)
"""Counts words, for models whose tokenizer is unknown."""


def tokenizer_ruler(tokenizer: Any) -> Ruler:
    """The ruler of a transformers tokenizer; special tokens are not counted.

    A slow tokenizer reports no offsets: its tokens are counted word by word (with the blank before
    the word) and all start where the word does.
    """
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    if getattr(tokenizer, "is_fast", False):

        def starts(text: str) -> Positions:
            encoded = tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
            )
            offsets = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
            # A normaliser may report offsets out of order by a character; positions must ascend.
            return np.maximum.accumulate(offsets[:, 0])

        return Ruler(name, "tokens", starts)

    @functools.lru_cache(maxsize=1 << 16)
    def size(word: str) -> int:
        return len(tokenizer(word, add_special_tokens=False)["input_ids"])

    def slow_starts(text: str) -> Positions:
        words = list(re.finditer(r"\s*\S+", text))
        sizes = [size(word.group()) for word in words]
        return np.repeat(np.array([word.start() for word in words], dtype=np.int64), sizes)

    return Ruler(name, "tokens", slow_starts)
