"""Finds and ablates the attention heads that retrieve from context, inside lm-evaluation-harness.

This module runs at every interpreter start (the start-up file imports `_autoload`), so
nothing but ``os`` may be imported here.
"""

import os as _os

__version__ = "0.1.0"

_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "tasks")):
    # A source tree or an editable install: the YAML files live in the top-level tasks/,
    # and this makes them importable as lm_eval_locos.tasks, as in a wheel.
    __path__.append(_os.path.dirname(_here))


def tasks_dir() -> str:
    """The folder of the task YAML files, in a wheel or in a source tree."""
    for base in __path__:
        path = _os.path.join(base, "tasks")
        if _os.path.isfile(_os.path.join(path, "locos.yaml")):
            return path
    raise FileNotFoundError(f"lm_eval_locos: no tasks folder with locos.yaml in {list(__path__)}")
