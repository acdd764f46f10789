"""When a generation stops, which of its steps are answer steps, and whether the trial passes.

    >>> answer_steps(tokenizer.encode(" It was Yuki."), "Yuki", tokenizer)
    [2, 3]

Step t produces the t-th generated token, from 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from lm_eval_locos.rouge import rouge_1_recall

MAX_NEW_TOKENS = 50
PASS_RECALL = 0.5
_OPEN, _CLOSE = "<think>", "</think>"
_TAIL = 16  # tokens at a prompt's end in which a chat template may have opened the tag


class Stopping:
    """The rule that ends a generation: any EOS, a newline token, or ``max_new_tokens``.

    A newline inside thinking, or right after it, does not end anything.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos: Iterable[int],
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> None:
        self.eos = frozenset(eos)
        self.max_new_tokens = max_new_tokens
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}

    def piece(self, token: int) -> str:
        """The text of one token; exact for the ASCII that the rule looks for."""
        if token not in self._pieces:
            self._pieces[token] = self._tokenizer.decode([token])
        return self._pieces[token]

    def start(self, prompt: Sequence[int]) -> Generation:
        """Follows one sequence from the end of its prompt."""
        tail = "".join(self.piece(token) for token in prompt[-_TAIL:])
        return Generation(self, thinking=_is_open(tail))


class Generation:
    """One sequence while it grows.

    Attributes:
        ids: the generated tokens, without the one that stopped it.
        content: index of the first token that is no thinking; equal to ``len(ids)`` while thinking.
        ended: whether it is over.
        stopped: whether a stop token ended it, and not the limit.
    """

    def __init__(self, rule: Stopping, thinking: bool) -> None:
        self.ids: list[int] = []
        self.content = 0
        self.ended = self.stopped = False
        self._rule = rule
        self._thinking = thinking
        self._thought = thinking
        self._text = ""

    def add(self, token: int) -> None:
        """Takes the next token; after the end nothing is taken."""
        if self.ended:
            return
        piece = self._rule.piece(token)
        leading = self._thought and not self._text.strip()
        if token in self._rule.eos or ("\n" in piece and not self._thinking and not leading):
            self.ended = self.stopped = True
            return
        self.ids.append(token)
        self._text += piece
        if self._thinking:
            if _CLOSE in self._text:
                self._thinking, self._text = False, ""
            self.content = len(self.ids)
        elif _OPEN in self._text:
            self._thinking = self._thought = True
            self.content = len(self.ids)
        self.ended = len(self.ids) >= self._rule.max_new_tokens


def _is_open(text: str) -> bool:
    return text.rfind(_OPEN) > text.rfind(_CLOSE)


def eos_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end-of-sequence ids of the tokenizer and of the model's generation config."""
    found: list[Any] = [tokenizer.eos_token_id]
    config = getattr(model, "generation_config", None)
    ids = getattr(config, "eos_token_id", None)
    found += ids if isinstance(ids, list | tuple) else [ids]
    return frozenset(int(token) for token in found if token is not None)


def answer_steps(
    generated: Sequence[int], gold: str, tokenizer: PreTrainedTokenizerBase, start: int = 0
) -> list[int]:
    """The steps whose tokens belong to the gold answer, ascending; empty if it does not occur.

    The first place where the answer's tokens (with or without a blank before) occur contiguously;
    failing that the tokens that overlap the first case-insensitive occurrence of its text in the
    decoded generation. An occurrence that is part of a longer word ("Leon" in "Leonardo") counts
    only when there is none that stands alone.

    Args:
        generated: generated ids.
        gold: the answer's text.
        tokenizer: of the model.
        start: step of the first content token; what comes before is thinking.
    """
    gold = gold.strip()
    ids = list(generated[start:])
    if not gold or not ids:
        return []
    text, spans = token_spans(ids, tokenizer)
    variants = [_encoded(lead + gold, tokenizer) for lead in ("", " ")]
    by_ids = [
        list(range(i, i + len(variant)))
        for i in range(len(ids))
        for variant in variants
        if variant and ids[i : i + len(variant)] == variant
    ]
    by_text = [
        [t for t, (low, high) in enumerate(spans) if low < match.end() and high > match.start()]
        for match in re.finditer(re.escape(gold), text, re.IGNORECASE)
        if _alone(text, match.start(), match.end())
    ]
    whole = [steps for steps in by_ids if _alone(text, spans[steps[0]][0], spans[steps[-1]][1])]
    for candidates in (whole, by_text, by_ids, _anywhere(text, spans, gold)):
        if candidates:
            return [start + step for step in candidates[0]]
    return []


def _encoded(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of ``text`` without leading ones of blanks alone: those are no answer."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    blank = sum(1 for _ in takewhile(lambda token: not tokenizer.decode([token]).strip(), ids))
    return ids[blank:]


def _anywhere(text: str, spans: Sequence[tuple[int, int]], gold: str) -> list[list[int]]:
    match = re.search(re.escape(gold), text, re.IGNORECASE)
    if match is None:
        return []
    return [
        [t for t, (low, high) in enumerate(spans) if low < match.end() and high > match.start()]
    ]


def _alone(text: str, start: int, end: int) -> bool:
    """Whether text[start:end] is not part of a longer word."""
    before = start > 0 and _joined(text[start - 1], text[start])
    after = end < len(text) and _joined(text[end - 1], text[end])
    return not before and not after


def _joined(left: str, right: str) -> bool:
    """Whether two neighbours belong to one word. Scripts that write no blanks between words are
    of Unicode category Lo: there nobody can tell, and everything stands alone."""
    kinds = ("Lu", "Ll", "Lt", "Lm", "Mn", "Nd")
    return unicodedata.category(left) in kinds and unicodedata.category(right) in kinds


def token_spans(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[str, list[tuple[int, int]]]:
    """The decoded text and each token's [start, end) in it.

    Tokens that share a character (bytes of one) all overlap it.
    """
    spans, start, text = [], 0, ""
    for i in range(len(ids)):
        text = tokenizer.decode(ids[: i + 1], clean_up_tokenization_spaces=False)
        spans.append((start, max(start, len(text))))
        # An unfinished character decodes to U+FFFD and is finished by the next token.
        start = len(text.rstrip("\ufffd"))
    return text, spans


def generated_text(generated: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of the content tokens, special tokens and outer blanks left out."""
    return tokenizer.decode(
        list(generated), skip_special_tokens=True, clean_up_tokenization_spaces=False
    ).strip()


def passes(gold: str, text: str, steps: Sequence[int]) -> bool:
    """A trial passes when ROUGE-1 recall of its text is > 0.5 and it has an answer step.

    ROUGE counts words: of an answer of signs alone ("?!", an emoji) the answer step decides.
    """
    return bool(steps) and (
        not any(map(str.isalnum, gold)) or rouge_1_recall(gold, text) > PASS_RECALL
    )
