"""Text from files made safe to show, numbers as text, families by name.

>>> clean("a\\x1b[31mb")         # a file must not steer the terminal
'a\\ufffd[31mb'
>>> percent(-0.0312)
'−3.1%'
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from lm_eval_locos.families import FAMILIES
from lm_eval_locos.specificity_plan import MEMBERS

if TYPE_CHECKING:
    from lm_eval_locos.statistics.families import Side

BUNDLED_MARK = "[bundled sample]"
"""As `families.task` writes it behind a task's alias; importing that would load lm_eval."""

MISSING = "–"
MINUS = "−"

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
# Marks that reorder the text around them: a name must not change how its row reads.
_REORDERING = re.compile(r"[\u202a-\u202e\u2066-\u2069\u200e\u200f]")

SIDES: dict[str, Side] = {family: member.side for family, member in MEMBERS.items()}
"""Side of each family; other tasks are shown, but are part of no specificity."""

TITLES = {
    "nolima": "NoLiMa",
    "musique": "MuSiQue",
    "babilong": "BABILong",
    "parametric": "Parametric",
    "arithmetic": "Arithmetic",
}


def clean(value: Any) -> Any:
    """`value` with every control character, lone surrogate and reordering mark as U+FFFD.

    Lists and dicts are cleaned throughout, keys included; line ends and tabs stay.
    """
    if isinstance(value, str):
        return _REORDERING.sub("\ufffd", _CONTROL.sub("\ufffd", value))
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    return value


def family_of(task: str) -> str:
    """The family that a task's name says it is of; the task's own name for any other."""
    name = task.removeprefix("locos_")
    for family in FAMILIES:
        if name == family or name.startswith(f"{family}_"):
            return family
    return task


def title(family: str) -> str:
    """What a table calls a family."""
    return TITLES.get(family, family)


def number(value: object) -> float | None:
    """A finite number, or None for anything else (the harness writes "N/A")."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return found if math.isfinite(found) else None


def fixed(value: float | None, digits: int = 3) -> str:
    """A number to so many decimals, with a minus sign; never a negative zero."""
    if value is None:
        return MISSING
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text.replace("-", MINUS)


def percent(value: float | None) -> str:
    """A share in percent, to one decimal."""
    return MISSING if value is None else fixed(100 * value, 1) + "%"


def p_value(value: float | None) -> str:
    """A p-value to two significant digits."""
    if value is None:
        return MISSING
    return "<0.0001" if value < 1e-4 else f"{value:.2g}"
