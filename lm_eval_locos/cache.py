"""Calibrations on disk: measured once for a model, a set of prompts and a site.

>>> key = {"model": model_identity(model), "prompts": prompts_sha256, "site": "query"}
>>> calibration = cached(key, lambda: calibrate(model, token_ids, site="query"))
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lm_eval_locos.architecture import base_model
from lm_eval_locos.calibration import Calibration
from lm_eval_locos.files import replacing

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where calibrations are kept: ``LOCOS_CACHE_DIR``, or the user's cache directory."""
    given = os.environ.get("LOCOS_CACHE_DIR")
    return Path(given) if given else Path(platformdirs.user_cache_dir("lm-eval-locos"))


# Where a model came from and how it is run; neither changes what it computes.
_NOT_THE_MODEL = frozenset(
    "_name_or_path name_or_path _commit_hash transformers_version architectures use_cache dtype "
    "torch_dtype _attn_implementation attn_implementation _attn_implementation_internal "
    "_experts_implementation experts_implementation _experts_implementation_internal "
    "base_model_name_or_path inference_mode revision peft_version".split()
)


def _settings(value: Any) -> Any:
    """A config as JSON holds it, without what does not change the model."""
    if isinstance(value, Mapping):
        return {str(k): _settings(v) for k, v in value.items() if k not in _NOT_THE_MODEL}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_settings(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def model_identity(model: nn.Module) -> str:
    """A hash that tells models apart: their settings, and a sample of every weight.

    Up to 1,024 evenly spaced elements a tensor are read, so an adapter, another quantisation or a
    fine-tune changes it, however the model was loaded; and so do settings without weights (a RoPE
    scaling, a window, an adapter's alpha).
    """
    digest = hashlib.sha256(type(base_model(model)).__name__.encode())
    # What differs from the defaults: a later release has more settings than an earlier one.
    stated = [base_model(model).config.to_diff_dict()]
    adapters = getattr(model, "peft_config", {}).values()
    stated += [{key: value for key, value in one.to_dict().items() if value} for one in adapters]
    digest.update(json.dumps(_settings(stated), sort_keys=True).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):
            continue  # a quantiser's extra state
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.is_meta:
            continue  # offloaded to disk: name and shape must do
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()  # split over processes (tensor parallelism)
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // 1024)
        digest.update(flat[::step].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cached(key: dict[str, object], measure: Callable[[], Calibration]) -> Calibration:
    """The calibration kept under ``key``, or a new one from ``measure()``, which is then kept.

    A damaged file is noticed (its numbers are hashed), reported and measured again.
    """
    text = json.dumps(key, sort_keys=True)
    path = cache_folder() / f"means-{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"
    if path.exists():
        try:
            return _read(path, text)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            _log.warning("%s is damaged (%s); calibrating again", path, error)
    calibration = measure()
    try:
        _write(path, text, calibration)
    except OSError as error:
        _log.warning("the calibration cannot be kept in %s (%s)", path.parent, error)
    return calibration


def _read(path: Path, key: str) -> Calibration:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        means, samples = file.get_tensor("means"), file.get_tensor("samples")
    calibration = Calibration(means, samples, int(metadata.get("num_tokens", 0)))
    if metadata.get("key") != key or metadata.get("sha256") != calibration.sha256:
        raise ValueError("its contents are not what was written")
    return calibration


def _write(path: Path, key: str, calibration: Calibration) -> None:
    with replacing(path) as temporary:
        save_file(
            {"means": calibration.means, "samples": calibration.samples},
            temporary,
            metadata={
                "key": key,
                "sha256": calibration.sha256,
                "num_tokens": str(calibration.num_tokens),
            },
        )
