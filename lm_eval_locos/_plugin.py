"""What `lm_eval_locos._autoload` does to the harness once its modules are imported."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

MODELS = {"locos-ablated": "lm_eval_locos.model:LocosAblatedLM"}


def register_models(module: ModuleType) -> None:
    """Adds lazy names once the harness has registered its own models.

    Not earlier: the harness registers its own only while its registry is empty.
    """
    from lm_eval.api.registry import model_registry

    for name, target in MODELS.items():
        if name not in model_registry:  # later harnesses read our entry point
            model_registry.register(name, target=target)


def add_tasks(module: ModuleType) -> None:
    """Has every TaskManager search the built-in tasks, then ours, then the user's include_path."""
    from lm_eval_locos import tasks_dir

    ours = os.path.realpath(tasks_dir())
    original = module.TaskManager.__init__
    signature = inspect.signature(original)
    if "include_path" not in signature.parameters:
        raise TypeError("TaskManager() takes no include_path")

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        user = bound.arguments.get("include_path")
        paths = list(user) if isinstance(user, (list, tuple)) else [user] if user else []
        if ours not in map(os.path.realpath, paths):
            bound.arguments["include_path"] = [ours, *paths]
        original(*bound.args, **bound.kwargs)
        self.include_path = user

    module.TaskManager.__init__ = init


def guard_response_cache(module: ModuleType) -> None:
    """Keeps other models from serving answers that were cached under an ablation.

    ``--use_cache`` keys answers by request alone. `LocosAblatedLM` refuses foreign caches itself;
    this is the other direction.
    """
    original = module.CachingLM.__init__

    @functools.wraps(original)
    def init(self: Any, lm: Any, cache_db: str) -> None:
        original(self, lm, cache_db)
        if "locos_ablation" in self.dbdict and not hasattr(lm, "cache_identity"):
            from lm_eval_locos.errors import LocosError

            raise LocosError(
                f"--use_cache: {cache_db} holds answers of an ablated model (locos-ablated); they "
                "would be taken for this model's. Give another path, or delete the file."
            )

    module.CachingLM.__init__ = init


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "lm_eval.api.model": guard_response_cache,
    "lm_eval.models": register_models,
    "lm_eval.tasks.manager": add_tasks,
}
