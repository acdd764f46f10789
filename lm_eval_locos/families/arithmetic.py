"""Arithmetic: sums that need no context; the benchmark's one-digit ones and harder ones of ours."""

from __future__ import annotations

import random
import re
from typing import Any

from lm_eval_locos.families import parametric
from lm_eval_locos.families.documents import Documents, package

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


SEED = 42
"""Of the additions. Not an argument of `load`, which would receive a model's ``seed=`` as its."""


def load(digits: int | None = None, **kwargs: Any) -> Documents:
    """One-digit three-operand sums of the hub's data, or 200 additions of ``digits`` digits.

    The additions are generated here, the same every time, so they need no data.
    """
    if digits is None:
        return parametric.load(sources=("arithmetic",))
    documents = [
        parametric.document(
            {"question": f"What is {a} + {b}?", "answer": str(a + b), "source": f"{digits}da"},
            "arithmetic",
            number,
        )
        for number, (a, b) in enumerate(additions(digits, 200))
    ]
    return package(documents, {"source": "generated"}, split="evaluation", digits=digits, seed=SEED)


def additions(digits: int, count: int, seed: int = SEED) -> list[tuple[int, int]]:
    """``count`` different pairs of ``digits``-digit numbers."""
    rng = random.Random(f"additions-{digits}-{seed}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    found: dict[tuple[int, int], None] = {}
    while len(found) < count:
        found[rng.randint(low, high), rng.randint(low, high)] = None
    return list(found)


def score(doc: dict[str, Any], response: str) -> dict[str, float]:
    """``exact_match`` on the whole answer, and tolerant: the last number in its last line."""
    scores = parametric.score(doc, response)
    lines = [line for line in response.strip().splitlines() if line.strip()]
    found = _NUMBER.findall(lines[-1].replace("−", "-")) if lines else []
    last = found[-1].replace(",", "") if found else ""
    return scores | {"exact_match_tolerant": float(last in doc["answers"])}


def calibration(tokenizer: Any, count: int, seed: int) -> tuple[list[str], dict[str, Any]]:
    """User turns of sums of our own."""
    return parametric.calibration_rows("arithmetic", count, seed)
