"""Scores of a generated answer: pure functions of strings.

>>> last_answer_tag("I think <answer>Paris</answer>")
('Paris', True)
>>> rouge_l("Yuki", "Yuki lives there.")
0.5
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence

from lm_eval_locos.rouge import rouge_1_recall, rouge_l

__all__ = [
    "contains",
    "exact_match",
    "label_match",
    "last_answer_tag",
    "normalize",
    "rouge_1_recall",
    "rouge_l",
    "strip_thinking",
    "sub_span",
    "token_f1",
]

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_OPEN_THINK = re.compile(r"<think>.*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|(?=<answer>)|\Z)", re.DOTALL | re.IGNORECASE)


def strip_thinking(text: str) -> str:
    """``text`` without ``<think>...</think>``; thinking that never ends leaves no answer.

    A chat template may open the tag in the prompt: then all up to a lone ``</think>`` is thinking.
    """
    text = _THINK.sub("", text)
    text = text.rpartition("</think>")[2]
    return _OPEN_THINK.sub("", text).strip()


def last_answer_tag(text: str) -> tuple[str, bool]:
    """The inside of the last ``<answer>`` tag and True; without one the whole text and False.

    A stop string may have cut the closing tag off, so a tag that never closes counts.
    """
    found = _ANSWER.findall(text)
    return (found[-1].strip(), True) if found else (text.strip(), False)


# -- answers as bags of words (SQuAD, MuSiQue) ------------------------------------------------


def normalize(text: str) -> str:
    """Lower case, no punctuation, no a/an/the, single blanks (the official MuSiQue rule).

    Punctuation is everything of Unicode category P and the ASCII symbols.
    """
    ascii_symbols = "$+<=>^`|~"
    kept = "".join(
        c
        for c in unicodedata.normalize("NFC", text).lower()
        if not unicodedata.category(c).startswith("P") and c not in ascii_symbols
    )
    return " ".join(word for word in kept.split() if word not in ("a", "an", "the"))


def exact_match(golds: Iterable[str], text: str) -> float:
    """1 where the normalised text is one of the normalised answers."""
    return float(normalize(text) in {normalize(gold) for gold in golds})


def sub_span(golds: Iterable[str], text: str) -> float:
    """1 where a normalised answer is a sub-string of the normalised text (the paper's accuracy).

    Not a match of whole tokens: ``art`` is found in ``party``. An answer of punctuation alone
    normalises to nothing and is compared as it is; an empty one is never found.
    """
    target = normalize(text)
    return float(
        any(
            norm in target if (norm := normalize(gold)) else gold in text
            for gold in golds
            if gold.strip()
        )
    )


def token_f1(golds: Iterable[str], text: str) -> float:
    """The best F1 over answers between multisets of normalised tokens; two empty ones match."""
    return max((_f1(normalize(gold).split(), normalize(text).split()) for gold in golds), default=0)


def _f1(gold: list[str], found: list[str]) -> float:
    if not gold or not found:
        return float(gold == found)
    common = sum((Counter(gold) & Counter(found)).values())
    return 2 * common / (len(gold) + len(found))


def contains(golds: Iterable[str], text: str) -> float:
    """1 where an answer occurs in the text, case-sensitive (NoLiMa's own score)."""
    return float(any(gold in text for gold in golds))


# -- labels (BABILong) ------------------------------------------------------------------------


def label_match(target: str, text: str, question: str, labels: Sequence[str]) -> float:
    """1 where ``text`` names the target label(s) and no other label of the task.

    BABILong's rule on whole words: labels that stand in the question do not count against the
    answer unless they are the target. Several targets are separated by commas and must all be
    named; their order matters only for directions (``s,e``). The whole text counts, where the
    benchmark takes its first sentence: our prompt asks for a tag, so `text` is the answer alone.

    Args:
        target: the gold label, or several, comma-separated.
        text: the answer.
        question: as asked.
        labels: every label of the task.
    """
    wanted = [part.strip().lower() for part in target.split(",")]
    if set(labels) == set(_DIRECTIONS):
        return float(_directions(text) == wanted)
    named = {label.lower() for label in labels if _names(label, text)}
    asked = {label.lower() for label in labels if _names(label, question)}
    return float(set(wanted) <= named and named - asked <= set(wanted))


def _names(label: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(label)}\b", text, re.IGNORECASE) is not None


_DIRECTIONS = {"n": "north", "e": "east", "s": "south", "w": "west"}


def _directions(text: str) -> list[str]:
    """The directions that a text names, in order: ``s,e``, ``south, then east``."""
    # A letter after an apostrophe is no direction: "it's north".
    words = re.findall(r"(?<![\w'’])(north|east|south|west|[nesw])\b", text.lower())
    return [word[0] for word in words]
