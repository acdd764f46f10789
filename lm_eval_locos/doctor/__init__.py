"""A self-check: whether what this package believes of a loaded model is true of it.

    >>> for check in diagnose(model, tokenizer):
    ...     print(check.name, check.passed, check.detail)
    k = 0 True logits bit-equal with no head ablated, and again after an ablation; no hook is left
    query site True 18 heads of layers 0, 14, 29: only the head's own query and output change
    ...

It is meant for a family described with `lm_eval_locos.architecture.register_family`: a wrong
layout, module, window or scaling fails a check that says what it saw. `facts` is the description
that the checks test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from lm_eval_locos.architecture import Architecture, describe
from lm_eval_locos.doctor import ablating, scoring
from lm_eval_locos.doctor.facts import facts
from lm_eval_locos.doctor.subject import Finding, Subject
from lm_eval_locos.errors import ModelError

__all__ = ["CHECKS", "Check", "diagnose", "facts"]


@dataclass(frozen=True)
class Check:
    """What a check found.

    Attributes:
        name: a key of `CHECKS`.
        passed: None where the check does not apply to the model; ``detail`` has the reason.
        detail: the numbers seen and the tolerance, or the first line of an error.
    """

    name: str
    passed: bool | None
    detail: str


_ABLATING: dict[str, Callable[[Subject], Finding]] = {
    "k = 0": ablating.no_head,
    "query site": ablating.query_site,
    "output site": ablating.output_site,
    "left padding": ablating.left_padding,
    "unembedding": ablating.unembedding,
}
_SCORING: dict[str, Callable[[Subject], Finding]] = {
    "pieces": scoring.pieces,
    "visible keys": scoring.visible_keys,
    "scaling": scoring.scaling,
    "attention": scoring.attention,
    "queries": scoring.queries,
    "scores": scoring.scores,
}
CHECKS = (*_ABLATING, *_SCORING)
"""The names of the checks, in the order in which they run."""


def diagnose(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    *,
    architecture: Architecture | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Iterator[Check]:
    """Checks the description of a model, one check after another, on its own weights.

    An error inside a check fails that check and no other. A model that can be ablated but not
    scored (ALiBi, a packed output projection) passes: what is about scores does not apply to it.

    Args:
        model: a transformers causal language model, or a PEFT wrapper of one; put in eval mode.
        tokenizer: its tokenizer.
        architecture: the description to check; default: ``describe(model)``.
        progress: called with the name of each check before it runs.

    Raises:
        ModelError: the family is not known, before any check has run.
    """
    subject = Subject(model.eval(), tokenizer, architecture or describe(model))
    for name, check in (_ABLATING | _SCORING).items():
        progress(name)
        yield _run(name, check, subject)


@torch.inference_mode()
def _run(name: str, check: Callable[[Subject], Finding], subject: Subject) -> Check:
    try:
        return Check(name, *check(subject))
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        if isinstance(error, ModelError):
            return Check(name, None if name in _SCORING else False, lines[0])
        return Check(name, False, f"{type(error).__name__}: {lines[0]}")
