"""Gates as a user writes them, in TOML.

    allow_bundled = false         # for all gates, unless a gate says otherwise

    [[gate]]
    metric = "specificity"
    min = 0.3                     # the lower end of its 95% interval must be at least 0.3

    [[gate]]
    metric = "control_drop"
    max = 0.05
    condition = "top:20"

The same under ``[tool.locos.gates]`` in pyproject.toml, a gate under ``[[tool.locos.gates.gate]]``.
`KEYS` and `GENERAL` say what each key means. Nothing is guessed: a key that is not known, or of
another type, is an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm_eval_locos.errors import LocosError
from lm_eval_locos.files import expanded
from lm_eval_locos.gates.gate import JUDGES, KNOWN, PARTS, POINTS, WHOLE, Gate, GateFile
from lm_eval_locos.reporting.text import clean

Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


_SHARED: dict[str, tuple[str, Check]] = {
    "judge": (
        '"bound" (the interval\'s end) or "point" (the value itself)',
        lambda v: isinstance(v, str) and v in JUDGES,
    ),
    "level": ("a number from 0.5 to 1, such as 0.95", lambda v: _number(v) and 0.5 <= v < 1),
    "allow_bundled": ("true or false", _flag),
    "allow_undefined": ("true or false", _flag),
}
KEYS: dict[str, tuple[str, Check]] = {
    "metric": ("text: " + KNOWN, _text),
    "min": ("a number", _number),
    "max": ("a number", _number),
    "name": ("text", _text),
    "model": ("text, a name or a pattern such as *-1b", _text),
    "ranking": ("text, a method, path or file name, or a pattern", _text),
    "condition": ('text, such as "top:20" or "top"', _text),
    "k": (
        "a whole number from 1 up to a million",
        lambda v: isinstance(v, int) and not isinstance(v, bool) and 0 < v <= 10**6,
    ),
    "margin": ("a number between 0 and 1, such as 0.05", lambda v: _number(v) and 0 < v < 1),
    "effect": ("a number above 0, such as 0.1", lambda v: _number(v) and v > 0),
    **_SHARED,
}
"""What each key of a gate may be."""
GENERAL: dict[str, tuple[str, Check]] = {
    **_SHARED,
    "metrics": (
        'a table of text by family, such as { nolima = "contains" }',
        lambda v: isinstance(v, dict) and all(map(_text, v.values())),
    ),
    "gate": (
        "one or more tables, each under [[gate]]",
        lambda v: isinstance(v, list) and bool(v) and all(isinstance(g, dict) for g in v),
    ),
}
"""What each key beside the gates may be."""


def read_gates(path: str | Path | None = None) -> GateFile:
    """The gates of a file, or of the pyproject.toml in this folder or the nearest above it.

    Raises:
        LocosError: a file that is missing, is not TOML or has no gates; a key that is not known or
            has a wrong value. The message names the key and what is expected.
    """
    file = expanded(path) if path is not None else _project()
    content = _read(file)
    prefix = ""
    if file.name == "pyproject.toml":
        prefix = "tool.locos.gates."
        for key in ("tool", "locos", "gates"):
            content = content.get(key) if isinstance(content, dict) else None
            if content is None:
                raise LocosError(
                    f"{file}: no [tool.locos.gates] in it. Add [[tool.locos.gates.gate]] with a "
                    "metric and min or max, or give --config gates.toml."
                )
        if not isinstance(content, dict):
            raise LocosError(f"{file}: tool.locos.gates: expected a table, seen {_seen(content)}.")
    return gates_from(content, str(file), prefix)


def gates_from(content: Mapping[str, Any], where: str = "gates", prefix: str = "") -> GateFile:
    """The gates of a table, such as ``{"gate": [{"metric": "specificity", "min": 0.3}]}``.

    Args:
        content: keys as in `GENERAL`.
        where: it is from, for messages.
        prefix: of its keys, for messages.

    Raises:
        LocosError: as `read_gates`.
    """
    if "gate" not in content:
        close = [key for key in content if key not in GENERAL]
        if close:
            _checked(content, GENERAL, where, prefix)
        raise LocosError(f"{where}: no gates in it. Add\n[[{prefix}gate]]\n{_EXAMPLE}")
    _checked(content, GENERAL, where, prefix)
    shared = {key: content[key] for key in _SHARED if key in content}
    gates = [
        _gate(entry, shared, f"{where}, {prefix}gate {number}")
        for number, entry in enumerate(content["gate"], start=1)
    ]
    return GateFile(where, _distinct(gates), dict(content.get("metrics", {})))


_EXAMPLE = 'metric = "specificity"\nmin = 0.3'


def _project() -> Path:
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "pyproject.toml").is_file():
            return folder / "pyproject.toml"
    raise LocosError(
        f"no pyproject.toml in {here} or above it. Give --config gates.toml, with\n[[gate]]\n"
        f"{_EXAMPLE}"
    )


def _read(file: Path) -> Any:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ImportError:
            raise LocosError(
                "Python 3.10 cannot read TOML by itself: pip install tomli, or use Python 3.11."
            ) from None
    try:
        return tomllib.loads(file.read_bytes().decode("utf-8-sig").replace("\r\n", "\n"))
    except OSError as error:
        raise LocosError(
            f"{file}: cannot be read ({error.strerror}). Give --config FILE, such as "
            "--config gates.toml."
        ) from None
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        raise LocosError(
            f"{clean(str(file))}: not TOML ({clean(str(error)) or 'nested too deeply'}). Expected, "
            f"for example:\n[[gate]]\n{_EXAMPLE}"
        ) from None


def _checked(
    table: Mapping[str, Any], known: Mapping[str, tuple[str, Check]], where: str, prefix: str = ""
) -> None:
    for key, value in table.items():
        shown = clean(f"{prefix}{key}")
        if key not in known:
            close = get_close_matches(key, known, n=1)
            meant = f" Did you mean {close[0]}?" if close else ""
            raise LocosError(f"{where}: unknown key {shown}.{meant} Known: {', '.join(known)}.")
        expected, right = known[key]
        if not right(value):
            raise LocosError(f"{where}: {shown} = {_seen(value)}: expected {expected}.")


def _seen(value: Any) -> str:
    try:
        text = clean(repr(value))
    except (ValueError, RecursionError):  # thousands of digits in hexadecimal, of dotted keys
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _gate(entry: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> Gate:
    _checked(entry, KEYS, where)
    if "metric" not in entry:
        raise LocosError(f"{where}: no metric. Expected metric = one of {KNOWN}.")
    metric = clean(entry["metric"].strip())
    if not _is_metric(metric):
        close = get_close_matches(metric, WHOLE, n=1)
        meant = f" Did you mean {close[0]}?" if close else ""
        raise LocosError(f"{where}: unknown metric {metric!r}.{meant} Known: {KNOWN}.")
    least, most = entry.get("min"), entry.get("max")
    if metric == "controls_held":
        for key in ("min", "max", "judge", "level", "effect"):
            if key in entry:
                raise LocosError(
                    f"{where}: controls_held takes no {key}: it holds or not, by its 90% interval. "
                    "Give margin, or leave it at 0.05."
                )
    elif "margin" in entry:
        raise LocosError(f"{where}: margin is for controls_held, not for {metric}. Give max.")
    elif least is None and most is None:
        raise LocosError(f"{where}: {metric} without a threshold. Give min, max or both.")
    elif least is not None and most is not None and least > most:
        raise LocosError(
            f"{where}: min = {least} is above max = {most}. No number can pass; give min <= max."
        )
    if metric in POINTS and ("effect" in entry or entry.get("judge") == "bound"):
        raise LocosError(
            f'{where}: {metric} has no interval. Leave out effect and judge = "bound".'
        )
    settings = {**shared, **{key: entry[key] for key in _SHARED if key in entry}}
    if metric in POINTS:
        settings["judge"] = "point"
    texts = {
        key: clean(entry[key].strip()) for key in ("model", "ranking", "condition") if key in entry
    }
    gate = Gate(
        metric,
        minimum=None if least is None else float(least),
        maximum=None if most is None else float(most),
        k=entry.get("k"),
        **{key: float(entry[key]) for key in ("margin", "effect") if key in entry},
        **texts,
        **settings,
    )
    chosen = [f"{key}={value}" for key, value in texts.items()]
    chosen += [f"k={gate.k}"] if gate.k else []
    made = f"{metric} {gate.threshold}" + (f" ({', '.join(chosen)})" if chosen else "")
    return replace(gate, name=" ".join(clean(entry.get("name", made)).split()))


def _is_metric(metric: str) -> bool:
    task, sign, name = metric.partition(":")
    if sign:
        return bool(task and name)
    family, _, part = metric.rpartition("_")
    return metric in WHOLE or (bool(family) and part in PARTS)


def _distinct(gates: Sequence[Gate]) -> tuple[Gate, ...]:
    """The gates with a number behind a name that was there before."""
    seen: Counter[str] = Counter()
    found = []
    for gate in gates:
        seen[gate.name] += 1
        again = seen[gate.name] > 1
        found.append(replace(gate, name=f"{gate.name} ({seen[gate.name]})") if again else gate)
    return tuple(found)
