"""ROUGE for any script: what detection passes trials by, and what NoLiMa is scored with.

>>> rouge_l("Yuki", "Yuki lives there.")
0.5
"""

from __future__ import annotations

import functools
import re
import unicodedata

from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer, Tokenizer

_WORD = re.compile(r"\w+")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")


class _UnicodeTokenizer(Tokenizer):
    """rouge_score's own tokens, plus those it drops: it keeps ASCII letters and digits only.

    Text in ASCII gives exactly rouge_score's tokens (stemmed). Otherwise words are runs of Unicode
    letters and digits, and scripts without blanks between words count by the character.
    """

    def __init__(self) -> None:
        self._ascii = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        tokens: list[str] = []
        for word in _WORD.findall(unicodedata.normalize("NFC", text).lower().replace("_", " ")):
            if word.isascii():
                tokens += self._ascii.tokenize(word)
            elif _CJK.search(word):
                tokens += list(word)
            else:
                tokens.append(word)
        # Emoji and other signs are no words; text of nothing else counts by the character.
        return tokens or [c for c in text if not c.isspace() and not c.isascii()]


@functools.cache
def _scorer() -> RougeScorer:
    return RougeScorer(["rouge1", "rougeL"], tokenizer=_UnicodeTokenizer())


def rouge_l(gold: str, text: str) -> float:
    """ROUGE-L F of ``text`` against ``gold``, stemmed, 0 to 1 (the LOCOS paper's NoLiMa score)."""
    return float(_scorer().score(gold, text)["rougeL"].fmeasure)


def rouge_1_recall(gold: str, text: str) -> float:
    """Share of ``gold``'s words in ``text``, stemmed, 0 to 1."""
    return float(_scorer().score(gold, text)["rouge1"].recall)
