"""What ships with the package: rankings of models that people try first."""

from __future__ import annotations

import re
from pathlib import Path

_DATA = Path(__file__).resolve().parent / "data"
RANKINGS = {"SmolLM2-135M-Instruct": _DATA / "rankings" / "smollm2-135m-instruct"}
"""Folder of each model's rankings, by the last part of the model's name."""


def bundled_ranking(pretrained: object, gguf_file: str | None = None) -> Path | None:
    """The bundled LOCOS ranking of a model, or None.

    The model is known by its name alone: a hub id, a folder or a GGUF file that is called as the
    hub calls it (a quantisation may follow). Whether it fits is checked against the loaded model.

    Args:
        pretrained: as for the model type: an id, a folder, or a loaded model.
        gguf_file: its GGUF file.
    """
    path = pretrained if isinstance(pretrained, str) else getattr(pretrained, "name_or_path", "")
    for name, folder in RANKINGS.items():
        if gguf_file:
            found = re.fullmatch(rf"{re.escape(name)}([.-][\w.-]*)?\.gguf", Path(gguf_file).name)
        else:
            found = Path(str(path)).name == name
        if found:
            return folder / "locos.json"
    return None
