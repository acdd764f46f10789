"""Loads the model that a command names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
        ModelError: one of them cannot be loaded; the message names the argument and has the
            loader's own first line.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if arguments.device and arguments.device_map:
        raise ModelError("--device and --device-map exclude each other. Give one of them.")
    source = resolve(arguments.model)
    if arguments.revision and Path(str(source)).exists():
        raise ModelError(
            f"--revision {arguments.revision}: --model {arguments.model} is on this machine, where "
            "there are no revisions. Leave out --revision, or give a name on the hub."
        )
    if arguments.device:
        _check_device(torch, arguments.device)
    options: dict[str, Any] = {
        "revision": arguments.revision,
        "gguf_file": arguments.gguf_file,
        "trust_remote_code": arguments.trust_remote_code,
    }
    options = {key: value for key, value in options.items() if value}
    adapter = (
        f"--peft {arguments.peft}",
        "Expected a folder or a hub name of an adapter of this model (adapter_config.json and "
        "weights), and the package peft.",
    )
    if arguments.peft:
        with _loading(*adapter):  # a wrong name shows before the model is loaded
            from peft import PeftConfig, PeftModel

            PeftConfig.from_pretrained(arguments.peft)
    tokenizer = _tokenizer(arguments, source, options)
    with _loading(*_named(arguments, source)):
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=arguments.dtype, device_map=arguments.device_map, **options
        )
    if arguments.peft:
        with _loading(*adapter):
            model = PeftModel.from_pretrained(model, arguments.peft)
    if not arguments.device_map:
        device = arguments.device or _device(torch)
        with _loading(f"--device {device}: the model", "Use --device cpu, or --device-map auto."):
            model.to(device)
    return model.eval(), tokenizer


def _tokenizer(arguments: argparse.Namespace, source: Any, options: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig, AutoTokenizer

    if arguments.tokenizer:
        expected = "Expected a folder or a hub name of a model whose tokenizer is to be used."
        with _loading(f"--tokenizer {arguments.tokenizer}", expected):
            return AutoTokenizer.from_pretrained(arguments.tokenizer)
    with _loading(
        f"--model {arguments.model}: its tokenizer", "Name another one with --tokenizer ID."
    ):
        try:
            return AutoTokenizer.from_pretrained(source, **options)
        except Exception:
            with _loading(*_named(arguments, source)):  # what is wrong may be the model's name
                AutoConfig.from_pretrained(source, **options)
            raise


def _named(arguments: argparse.Namespace, source: Any) -> tuple[str, str]:
    """What messages call the model, and what they say was expected."""
    name, expected = (
        f"--model {arguments.model}",
        "a folder or a hub name of a causal language model",
    )
    if arguments.device_map:
        name += f" --device-map {arguments.device_map}"
    if arguments.gguf_file:
        return f"{name} --gguf-file {arguments.gguf_file}", f"Expected {expected} with that file."
    folder = Path(str(source))
    hint = ""
    if "gguf" in str(source).lower() or (folder.is_dir() and any(folder.glob("*.gguf"))):
        hint = "; for a GGUF file add --gguf-file"
    return name, f"Expected {expected}{hint}."


@contextmanager
def _loading(what: str, expected: str) -> Iterator[None]:
    """Turns whatever a loader raises into one line about ``what``.

    Loaders of transformers, PEFT, safetensors and torch raise what they like (AssertionError,
    KeyError, a SafetensorError that is a plain Exception), hence the breadth.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        from safetensors import SafetensorError

        if isinstance(error, SafetensorError):
            expected = "A file of weights is damaged or cut short: download or copy it again."
        lines = str(error).strip().splitlines() or [type(error).__name__]
        first = lines[0].strip()
        first = first if first.endswith((".", "!", "?")) else f"{first}."
        raise ModelError(f"{what} cannot be loaded: {first} {expected}") from error


def _check_device(torch: Any, name: str) -> None:
    """Raises ModelError for a device that is not there, before anything is loaded."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type == "meta":
        raise ModelError(f"--device {name}: no such device. Use cpu, cuda, cuda:1 or mps.")
    there = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
    }
    if device.type in there and (device.index or 0) >= there[device.type]:
        raise ModelError(
            f"--device {name}: PyTorch {torch.__version__} sees {there[device.type]} devices of "
            "this kind. Use --device cpu, or a build of PyTorch and a driver that see it."
        )


def _device(torch: Any) -> str:
    """The GPU of this process, or the CPU."""
    import os

    if torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if torch.backends.mps.is_available():
        return "mps"
    return "cpu"
