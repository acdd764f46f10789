"""Makes a released lm-eval know this package's model type and tasks.

The harness (0.4.13) has no plugin discovery. The start-up file ``lm_eval_locos_autoload.pth`` calls
`install` when Python starts; that only puts a finder on ``sys.meta_path``, and the work is done
when (and if) lm_eval imports one of the modules in `HOOKS`. Nothing here raises into the
interpreter or into an import. ``LM_EVAL_LOCOS_AUTOLOAD=0`` switches it off, and
``python -m lm_eval_locos`` works without it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not imported at interpreter start
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

SWITCH = "LM_EVAL_LOCOS_AUTOLOAD"
MODELS = {"locos-ablated": "lm_eval_locos.model:LocosAblatedLM"}


def switched_off() -> bool:
    """Whether the environment says no."""
    return os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off", "no")


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
    import functools
    import inspect

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
    import functools

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


def _run(name: str, module: ModuleType) -> None:
    try:
        HOOKS[name](module)
    except Exception as error:
        import logging

        logging.getLogger("lm_eval_locos").warning(
            "lm_eval_locos: no hook into %s (%s: %s)", name, type(error).__name__, error
        )


class _Finder:
    """Finds nothing itself; has the loaders of the modules in HOOKS call their hook."""

    def __init__(self) -> None:
        self.pending = set(HOOKS)

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.pending:
            return None
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                self._wrap(name, spec.loader)
                return spec
        return None

    def _wrap(self, name: str, loader: Any) -> None:
        original = getattr(loader, "exec_module", None)
        if original is None:
            return

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != name:  # a loader that serves many modules
                return original(module)
            loader.__dict__.pop("exec_module", None)
            original(module)
            self.done(name, module)
            return None

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader with slots: that module stays as it is
            return

    def done(self, name: str, module: ModuleType) -> None:
        self.pending.discard(name)
        if not self.pending and self in sys.meta_path:
            sys.meta_path.remove(self)
        _run(name, module)


_finder: _Finder | None = None


def install(force: bool = False) -> None:
    """Puts the finder in place, once; ``force`` ignores the off switch."""
    global _finder
    if _finder is not None or (switched_off() and not force):
        return
    _finder = _Finder()
    sys.meta_path.insert(0, _finder)
    for name in HOOKS:
        if name in sys.modules:  # imported before us
            _finder.done(name, sys.modules[name])
