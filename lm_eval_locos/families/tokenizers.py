"""The tokenizer that contexts are measured with: the evaluated model's own.

    >>> ruler = ruler_for({"pretrained": "gpt2", "batch_size": 4})
    >>> ruler.count("three short words")
    3

A harness loader receives the model's arguments, so the tokenizer is known before the model is
loaded. Where it is not (an API model), words are counted instead, with one warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

from lm_eval_locos.bundled import resolve, running_unnamed
from lm_eval_locos.errors import DataError
from lm_eval_locos.sources.rulers import WORDS, Ruler, tokenizer_ruler

_log = logging.getLogger(__name__)


def ruler_for(arguments: Mapping[str, Any]) -> Ruler:
    """The ruler for model arguments (``tokenizer`` or ``pretrained``, ``gguf_file`` ...).

    Raises:
        DataError: an explicit ``tokenizer`` that cannot be loaded.
    """
    tokenizer = arguments.get("tokenizer")
    if tokenizer is not None and not isinstance(tokenizer, str):
        return tokenizer_ruler(tokenizer)
    model = arguments.get("pretrained")
    name = model if isinstance(model, str) else getattr(model, "name_or_path", None)
    name = tokenizer or (resolve(name) if name else running_unnamed())
    options = tuple(
        (key, arguments[key])
        for key in ("revision", "subfolder", "trust_remote_code", "gguf_file")
        if arguments.get(key) and not (key == "gguf_file" and tokenizer)
    )
    return _loaded(name, options, explicit=tokenizer is not None)


_SMALLEST = 32  # tokens; bytes alone are 256


@functools.cache
def _loaded(name: str | None, options: tuple[tuple[str, Any], ...], *, explicit: bool) -> Ruler:
    reason = "no tokenizer or pretrained in the model arguments"
    if name:
        from transformers import AutoTokenizer

        try:
            found = AutoTokenizer.from_pretrained(name, **dict(options))
            # Early releases of transformers make one of nothing but special tokens of a config.
            if len(found) < _SMALLEST:
                raise ValueError(f"its tokenizer has {len(found)} tokens")
            return tokenizer_ruler(found)
        except Exception as error:  # whatever it is, the model itself will fail or is no HF model
            reason = f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
            if explicit:
                raise DataError(
                    f"tokenizer={name} cannot be loaded ({reason}). Give a folder or a hub name "
                    "with a tokenizer."
                ) from error
    _log.warning(
        "context lengths are counted in words, not in the model's tokens (%s). Name a tokenizer "
        "with --metadata tokenizer=NAME.",
        reason,
    )
    return WORDS
