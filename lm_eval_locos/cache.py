"""Calibrations on disk: measured once for a model, a set of prompts and a site.

>>> key = {"model": model_identity(model), "prompts": prompts_sha256, "site": "query"}
>>> calibration = cached(key, lambda: calibrate(model, token_ids, site="query"))
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

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


def model_identity(model: nn.Module) -> str:
    """A hash that tells models apart: structure, and a sample of every weight.

    Up to 1,024 evenly spaced elements a tensor are read, so an adapter, another quantisation or a
    fine-tune changes it, however the model was loaded.
    """
    digest = hashlib.sha256(type(base_model(model)).__name__.encode())
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
