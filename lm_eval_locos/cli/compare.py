"""``locos compare``: two runs on the same documents, document by document."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lm_eval_locos.cli import arguments as shared
from lm_eval_locos.cli import tables

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lm_eval_locos.comparison import Comparison, Side, TaskComparison

_EPILOG = """\
examples:
  locos compare out/baseline out/ablated
  locos compare out/MODEL/results_DATE.json out/OTHER/results_DATE.json --metric acc
  locos compare out/a out/b --json | jq '.tasks[] | {name, change: .change.value, p_holm}'

Any two runs with sample files (lm_eval --log_samples): two models, two rankings, with and without
ablation. Documents are paired by the harness's hash; runs on different documents are refused.

Columns: the mean scores, B - A with its 95% interval (bootstrap over clusters of documents), the
documents whose score rose and fell from A to B, the exact p-value where scores are 0 or 1 (McNemar;
where documents share clusters a sign test over clusters), the same adjusted over the tasks (Holm),
and the difference that this many documents show with power 0.8.
"""


def add_parser(commands: Any) -> None:
    """Adds ``compare`` to argparse's ``commands``."""
    compare = commands.add_parser(
        "compare",
        help="two runs of the harness, document by document",
        description="Compares two runs on the same documents, task by task.",
        epilog=_EPILOG,
        formatter_class=shared.Formatter,
    )
    compare.add_argument("a", metavar="A", help="a results file, or a folder with one run")
    compare.add_argument("b", metavar="B", help="another")
    compare.add_argument(
        "--metric", metavar="M", help="metric to compare (default: each task's first)"
    )
    shared.add_bootstrap(compare)
    compare.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object instead of a table, with the documents that changed",
    )
    compare.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """``locos compare``; raises LocosError for runs that cannot be read or compared."""
    from lm_eval_locos.comparison import compare
    from lm_eval_locos.reporting.board import plain
    from lm_eval_locos.reporting.results import load

    found = compare(
        load([arguments.a]),
        load([arguments.b]),
        metric=arguments.metric,
        resamples=arguments.resamples,
        seed=arguments.seed,
    )
    if arguments.json:
        tables.print_json(plain(found))
        return
    console = tables.console()
    head = tables.grid(1)
    head.add_row("A", _described(found.a))
    head.add_row("B", _described(found.b))
    console.print(head, "")
    _print_tasks(found, console)
    for note in (*found.notes, *_remarks(found)):
        console.print(f"Note: {note}", soft_wrap=True)


def _described(side: Side) -> str:
    parts = [side.model, " ".join(filter(None, (side.ranking, side.condition))), *side.paths]
    return ", ".join(parts)


def _print_tasks(found: Comparison, console: Console) -> None:
    """A row a task; a block a task where the terminal is too narrow for rows."""
    labels = (
        *("task", "metric", "documents", "A", "B", "B - A", f"{found.level:.0%} interval"),
        *("rose", "fell", "p", "p (Holm)", "detectable"),
    )
    made = _table(found, labels, console)
    if console.measure(made, options=console.options.update(width=10_000)).maximum <= console.width:
        console.print(made)
        return
    for task in found.tasks:
        block = tables.grid(1)
        for label, cell in zip(labels, _cells(task), strict=True):
            block.add_row(label, cell)
        console.print(block, "")


def _table(found: Comparison, labels: tuple[str, ...], console: Console) -> Table:
    made = tables.table(console, *labels)
    for column in made.columns[:2]:
        column.justify = "left"
    for task in found.tasks:
        made.add_row(*_cells(task))
    return made


def _cells(task: TaskComparison) -> tuple[str, ...]:
    ends = task.change.interval
    return (
        task.name + (" [bundled sample]" if task.bundled else ""),
        task.metric,
        str(task.documents),
        f"{task.a:.3f}",
        f"{task.b:.3f}",
        _signed(task.change.value),
        f"[{_signed(ends.low)}, {_signed(ends.high)}]" if ends else "-",
        str(len(task.gained)),
        str(len(task.lost)),
        _p(task.p),
        _p(task.p_holm),
        "-" if task.change.detectable is None else f"{task.change.detectable:.3f}",
    )


def _remarks(found: Comparison) -> list[str]:
    remarks = [
        f"{task.name}: {task.skipped} documents were left out, a side has no score for them."
        for task in found.tasks
        if task.skipped
    ]
    return remarks + [
        f"{task.name}: {task.change.reason}" for task in found.tasks if task.change.reason
    ]


def _signed(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.3f}" if float(f"{value:.3f}") else "0.000"


def _p(value: float | None) -> str:
    if value is None:
        return "-"
    return "<0.0001" if value < 1e-4 else f"{value:.2g}"
