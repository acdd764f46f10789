"""What ships with the package: a small model made to be ablated, and rankings of known models.

>>> resolve(None)                                    # what runs when no model is named
'/.../lm_eval_locos/data/mini'
>>> bundled_ranking("HuggingFaceTB/SmolLM2-135M-Instruct").name
'locos.json'
"""

from __future__ import annotations

import re
from pathlib import Path

_DATA = Path(__file__).resolve().parent / "data"
MINI_NAME = "locos-mini"
MINI = _DATA / "mini"
"""The bundled model: checkpoint, tokenizer, ranking, card."""
RANKINGS = {"SmolLM2-135M-Instruct": _DATA / "rankings" / "smollm2-135m-instruct"}
"""Folder of each model's rankings, by the last part of the model's name."""


def resolve(pretrained: object) -> object:
    """``pretrained`` with the bundled model's folder in the place of its name, or of None."""
    return str(MINI) if pretrained is None or pretrained == MINI_NAME else pretrained


_unnamed: str | None = None


def run_unnamed(path: str | None) -> None:
    """Notes the model that runs although the arguments name none; None: there is no such model.

    A task's loader sees the arguments only. The model type says here, before the harness loads any
    task, what they do not say.
    """
    global _unnamed
    _unnamed = path


def running_unnamed() -> str | None:
    """What `run_unnamed` has noted."""
    return _unnamed


def bundled_ranking(pretrained: object, gguf_file: str | None = None) -> Path | None:
    """The bundled LOCOS ranking of a model, or None.

    The model is known by its name alone: a hub id, a folder or a GGUF file that is called as the
    hub calls it (a quantisation may follow). Whether it fits is checked against the loaded model.

    Args:
        pretrained: as for the model type: an id, a folder, or a loaded model.
        gguf_file: its GGUF file.
    """
    path = pretrained if isinstance(pretrained, str) else getattr(pretrained, "name_or_path", "")
    if not gguf_file and path and Path(str(resolve(path))) == MINI:
        return MINI / "locos.json"
    for name, folder in RANKINGS.items():
        if gguf_file:
            found = re.fullmatch(rf"{re.escape(name)}([.-][\w.-]*)?\.gguf", Path(gguf_file).name)
        else:
            found = Path(str(path)).name == name
        if found:
            return folder / "locos.json"
    return None
