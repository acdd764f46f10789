"""What the commands print about rankings: facts and tables, never cut in a pipe or a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lm_eval_locos.ranking import HeadRanking


def facts(ranking: HeadRanking) -> dict[str, Any]:
    """What the file says about itself; None for what it does not say."""
    meta, steps = ranking.meta, ranking.answer_steps
    stated = ("method", "model", "peft", "revision", "dataset", "split", "seed")
    stated += ("plugin_version",)
    return {
        "path": ranking.path,
        "sha256": ranking.sha256,
        **{key: meta.get(key) for key in stated},
        "trials_passed": meta.get("num_trials_passed", max(map(len, ranking.scores.values()))),
        "trials_total": meta.get("num_trials_total"),
        "trials_scored": meta.get("num_trials_scored"),
        "answer_steps": sum(steps) if steps else meta.get("pooled_ans_steps"),
        "heads_scored": len(ranking.order),
        "heads_named": len(ranking.scores),
    }


def facts_table(rankings: Sequence[HeadRanking]) -> Table:
    """A line a fact, a column a file; facts that no file states are left out."""
    columns = [_lines(ranking) for ranking in rankings]
    table = grid(len(columns))
    if len(columns) > 1:
        table.add_row("", *"AB")
    for label in columns[0]:
        texts = [column[label] for column in columns]
        if any(texts):
            table.add_row(label, *(text or "-" for text in texts))
    return table


def _lines(ranking: HeadRanking) -> dict[str, str]:
    from lm_eval_locos.reporting.text import clean

    of = facts(ranking)
    lines = {
        "file": of["path"],
        "method": _joined(of["method"]),
        "model": _joined(of["model"], adapter=of["peft"], revision=of["revision"]),
        "data": _joined(of["dataset"], split=of["split"], seed=of["seed"]),
        "trials": _trials(of["trials_scored"], of["trials_passed"], of["trials_total"]),
        "answer steps": _joined(of["answer_steps"]),
        "heads": f"{of['heads_scored']} of {of['heads_named']} have a score",
        "sha256": (of["sha256"] or "")[:12],
        "lm-eval-locos": _joined(of["plugin_version"]),
    }
    return {label: clean(text) for label, text in lines.items()}  # it must not steer a terminal


def _trials(scored: Any, passed: Any, total: Any) -> str:
    """How many trials passed, or, of a method that needs no pass, how many were scored too."""
    if scored is not None and scored != passed:
        return f"{scored} trials scored, {passed} passed"
    return f"{passed}" if total is None else f"{passed} of {total} passed"


def _joined(first: Any, **more: Any) -> str:
    """``first`` and after it whatever else is known; empty where ``first`` is not."""
    if first is None:
        return ""
    return ", ".join([str(first), *(f"{k} {v}" for k, v in more.items() if v is not None)])


def decimals(scores: Sequence[float]) -> Callable[[float], str]:
    """A function that writes scores to five digits of the largest, all to the same decimals."""
    most = max(map(abs, scores), default=0.0)
    size = math.floor(math.log10(most)) if most else 0
    return (f"{{:.{max(1, 4 - size)}f}}" if -8 < size < 6 else "{:.4e}").format


def console() -> Console:
    """Standard output; without an edge to fold at where it is no terminal."""
    from rich.console import Console

    # Names in files may hold brackets, which are not markup.
    out = Console(markup=False, highlight=False, emoji=False)
    if not out.is_terminal:
        out.width = 10_000
    return out


def grid(columns: int) -> Table:
    """A table without lines or header: a label and so many columns a row."""
    from rich.table import Table

    made = Table.grid(padding=(0, 2))
    made.add_column(no_wrap=True)
    for _ in range(columns):
        made.add_column(overflow="fold")
    return made


def table(out: Console, *columns: str) -> Table:
    """A table of right-aligned columns that are never cut; a line only on a terminal."""
    from rich import box
    from rich.table import Table

    made = Table(
        box=box.SIMPLE_HEAD if out.is_terminal else None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True, min_width=len(column))
    return made


def print_json(content: Mapping[str, Any]) -> None:
    """One JSON object on standard output."""
    print(json.dumps(content, indent=2, allow_nan=False))
