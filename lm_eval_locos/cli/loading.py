"""Loads the model that a command names."""

from __future__ import annotations

import argparse
from typing import Any

from lm_eval_locos.bundled import resolve
from lm_eval_locos.errors import ModelError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model, and how to load it."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, metavar="ID", help="hub id or folder, or locos-mini"
    )
    group.add_argument("--gguf-file", metavar="FILE", help="the GGUF file in it to load")
    group.add_argument("--peft", metavar="P", help="hub id or folder of an adapter")
    group.add_argument("--revision", metavar="R", help="branch, tag or commit on the hub")
    group.add_argument("--tokenizer", metavar="ID", help="another tokenizer than the model's")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights (default: %(default)s, as they were saved)",
    )
    group.add_argument(
        "--device", help="cpu, cuda, cuda:1, mps (default: a GPU where there is one)"
    )
    group.add_argument("--device-map", metavar="M", help="auto: spread the model over all devices")
    group.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model"
    )


def load(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model, in eval mode, and its tokenizer.

    Raises:
        ModelError: it cannot be loaded; the message has the loader's own first line.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if arguments.device and arguments.device_map:
        raise ModelError("--device and --device-map exclude each other. Give one of them.")
    options: dict[str, Any] = {
        "revision": arguments.revision,
        "gguf_file": arguments.gguf_file,
        "trust_remote_code": arguments.trust_remote_code,
    }
    options = {key: value for key, value in options.items() if value}
    source = resolve(arguments.model)
    try:
        if arguments.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=arguments.dtype, device_map=arguments.device_map, **options
        )
        if arguments.peft:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, arguments.peft)
        if not arguments.device_map:
            model.to(arguments.device or _device(torch))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"--model {arguments.model} cannot be loaded: {first[0]} Expected a folder or a hub "
            "name of a causal language model; for a GGUF file add --gguf-file."
        ) from error
    return model.eval(), tokenizer


def _device(torch: Any) -> str:
    """The GPU of this process, or the CPU."""
    import os

    if torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"
