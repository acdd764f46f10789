"""Makes a released lm-eval know this package's model type and tasks.

The harness (0.4.13) has no plugin discovery. The start-up file ``lm_eval_locos_autoload.pth`` calls
`install` when Python starts; that only puts a finder on ``sys.meta_path``, and the work (`_plugin`)
is done when (and if) lm_eval imports one of `MODULES`. Nothing here raises into the interpreter or
into an import. ``LM_EVAL_LOCOS_AUTOLOAD=0`` switches it off, and ``python -m lm_eval_locos`` works
without it. This module runs at every interpreter start: it is short and imports only os and sys.
"""

import os
import sys

SWITCH = "LM_EVAL_LOCOS_AUTOLOAD"
MODULES = ("lm_eval.api.model", "lm_eval.models", "lm_eval.tasks.manager")


class _Finder:
    """Finds nothing itself; has the loaders of MODULES call their hook."""

    def __init__(self):
        self.pending = set(MODULES)

    def find_spec(self, name, path=None, target=None):
        if name not in self.pending:
            return None
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find and finder is not self else None
            if spec is not None:
                self._wrap(name, spec.loader)
                return spec
        return None

    def _wrap(self, name, loader):
        original = getattr(loader, "exec_module", None)

        def exec_module(module):
            if module.__name__ != name:  # a loader that serves many modules
                return original(module)
            loader.__dict__.pop("exec_module", None)
            original(module)
            self.done(name, module)

        if original is not None:
            try:
                loader.exec_module = exec_module
            except AttributeError:  # a loader with slots: that module stays as it is
                pass

    def done(self, name, module):
        self.pending.discard(name)
        if not self.pending and self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            from lm_eval_locos._plugin import HOOKS

            HOOKS[name](module)
        except Exception as error:
            import logging

            logging.getLogger("lm_eval_locos").warning(
                "lm_eval_locos: no hook into %s (%s: %s)", name, type(error).__name__, error
            )


_finder = None


def install(force=False):
    """Puts the finder in place, once; ``force`` ignores the off switch."""
    global _finder
    off = os.environ.get(SWITCH, "1").strip().lower() in ("0", "false", "off", "no")
    if _finder is not None or (off and not force):
        return
    _finder = _Finder()
    sys.meta_path.insert(0, _finder)
    for name in MODULES:
        if name in sys.modules:  # imported before us
            _finder.done(name, sys.modules[name])
