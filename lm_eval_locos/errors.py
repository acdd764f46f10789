"""What a user can fix: one exception family, and how the `lm_eval` command shows it.

    >>> raise LocosError("heads=top.json: no such file. Give the path of a ranking, "
    ...                  "for example heads=locos.json.")

A message names the value seen, what was expected and the next step. From Python these are ordinary
exceptions; at the `lm_eval` command line the hook below prints the message alone and the process
exits with status 1. Every other exception keeps its traceback.
"""

from __future__ import annotations

import sys
from types import TracebackType

SKIPPED = "<locos: prompt longer than the model's context, skipped>"
"""The response of a request left out under ``on_overlength=skip``; it is never scored."""


class LocosError(ValueError):
    """Something that the user can fix; the message says how."""


class RankingError(LocosError):
    """A head ranking that cannot be read, or does not fit the model or the request."""


class ModelError(LocosError):
    """A model, or a way of running one, that this package does not handle."""


class DataError(LocosError):
    """Data that is missing, or not of the expected shape."""


def _from_command_line(traceback: TracebackType | None) -> bool:
    """Whether the exception passed through the harness's command line."""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        if name == "lm_eval._cli" or name.startswith("lm_eval._cli."):
            return True
        traceback = traceback.tb_next
    return False


def install_excepthook() -> None:
    """Shows a `LocosError` that ends the `lm_eval` command as its message; idempotent.

    Whatever hook was there before still handles everything else.
    """
    previous = sys.excepthook
    if getattr(previous, "_locos", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, LocosError) and _from_command_line(traceback):
            print(f"lm_eval: {error}", file=sys.stderr)
        else:
            previous(kind, error, traceback)

    hook._locos = True  # type: ignore[attr-defined]
    sys.excepthook = hook
