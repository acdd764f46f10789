"""The five task families: three that retrieve from the context given, two that do not need one."""

from __future__ import annotations

from typing import Any

FAMILIES = ("nolima", "musique", "babilong", "parametric", "arithmetic")


def calibration_prompts(
    family: str, *, tokenizer: Any, count: int = 50, seed: int = 42
) -> tuple[list[str], dict[str, Any]]:
    """User turns of a family's calibration split, disjoint from what its tasks evaluate.

    Args:
        family: one of `FAMILIES`.
        tokenizer: the model's, for context lengths.
        count: at most so many.
        seed: which ones.

    Returns:
        the turns, and their provenance.
    """
    from importlib import import_module

    module = import_module(f"lm_eval_locos.families.{family}")
    turns, source = module.calibration(tokenizer, count, seed)
    return turns, source | {"split": "calibration", "prompts": len(turns)}
