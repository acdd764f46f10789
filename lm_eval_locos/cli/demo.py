"""``locos demo``: the whole effect on the bundled model, in less than a minute."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lm_eval_locos.cli.arguments import Formatter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

# Few documents where a story is long, more where a control has to be shown to hold.
PER_FAMILY = {"nolima": 14, "musique": 14, "babilong": 20, "parametric": 60, "arithmetic": 60}
TASK = "locos_specificity"
EPILOG = """\
locos-mini is a small model made for this: its retrieval heads were planted before it was trained,
so that finding them is a check and no discovery, and its numbers say nothing about real models.
The documents are the sample in the package, not the benchmarks.

The same by hand:
  lm_eval --model locos-ablated --tasks locos_specificity --log_samples --output_path out
  locos report out --format html --output out/report.html --plots out/figures
"""


def add_parser(commands: Any) -> None:
    """Adds ``demo``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="see the whole effect on the bundled model, offline, in a minute",
        description="Asks the bundled model questions of five families with nothing ablated, with "
        "its retrieval heads ablated, and with random heads ablated; prints the comparison and "
        "writes the report and its figures.",
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "--output", default="locos-demo", metavar="DIR", help="folder (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, default=10, metavar="N", help="random draws (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Runs the command."""
    import logging
    import os
    from pathlib import Path

    os.environ["LOCOS_DATA"] = "bundled"  # no time is lost on a hub that is not needed
    from lm_eval.tasks import TaskManager
    from rich.console import Console

    from lm_eval_locos import tasks_dir
    from lm_eval_locos.bundled import MINI_NAME
    from lm_eval_locos.errors import DataError
    from lm_eval_locos.evaluation import evaluate
    from lm_eval_locos.files import check_folder
    from lm_eval_locos.model import LocosAblatedLM
    from lm_eval_locos.reporting.figure_list import figure_list
    from lm_eval_locos.reporting.html import page
    from lm_eval_locos.reporting.leaderboard import leaderboard
    from lm_eval_locos.reporting.plots import write_all
    from lm_eval_locos.reporting.results import load

    folder = Path(arguments.output)
    check_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty. Choose another --output.")
    # What a run warns of (the bundled model, ranking and sample) is what this command is about.
    for name in ("lm_eval", "lm_eval_locos"):
        logging.getLogger(name).setLevel(logging.ERROR)
    console = Console(highlight=False)
    lm = LocosAblatedLM(batch_size=32)
    k = lm.condition.k
    asked = {"per_family": PER_FAMILY, "random_seeds": arguments.seeds, "k": k}
    manager = TaskManager(include_path=tasks_dir(), include_defaults=False, metadata=asked)
    console.print(
        f"locos-mini answers {sum(PER_FAMILY.values())} questions with nothing ablated, with its "
        f"top {k} heads ablated, and {arguments.seeds} times with {k} random heads ablated ..."
    )
    results = evaluate(
        lm, folder, tasks=[TASK], manager=manager, model_args={"pretrained": MINI_NAME}
    )
    if results is None:
        return
    record = results["configs"][TASK]["metadata"][TASK]
    documents = [sample["doc"] for sample in results["samples"][TASK]]
    console.print(comparison(record, documents))
    console.print(summary(record))
    board = leaderboard(load([folder]))
    (folder / "report.html").write_text(page(board), encoding="utf-8")
    write_all(figure_list(board), folder / "figures")
    console.print(f"Report: {folder / 'report.html'}   Figures: {folder / 'figures'}")


def comparison(record: Mapping[str, Any], documents: Sequence[Mapping[str, Any]]) -> Table:
    """A row a condition, a column a family: mean scores with their 95% intervals.

    Args:
        record: what the task wrote into its metadata.
        documents: with each condition's score.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title="\nMean scores and their 95% intervals   \\[bundled sample]", box=box.SIMPLE
    )
    table.title_justify = "left"
    table.add_column("heads\nablated")
    families = record["statistics"]["families"]
    for family, found in families.items():
        table.add_column(f"{family}\n{found['side']}", justify="right")
    _, top, *random = record["conditions"]
    for label, key in (("none\n(baseline)", "baseline"), (f"{top}\nby LOCOS", "condition")):
        table.add_row(label, *(_cell(found[key]) for found in families.values()))
    means = []
    for family in families:
        scores = [
            doc["locos"]["conditions"][condition]["score"]
            for doc in documents
            if doc["family"] == family
            for condition in random
        ]
        means.append(f"{sum(scores) / len(scores):.2f}" if scores else "-")
    table.add_row(f"random\nmean of {len(random)}", *means)
    return table


def _cell(found: Mapping[str, Any], form: str = "{value:.2f}\n{low:.2f}–{high:.2f}") -> str:
    value, ends = found["value"], found["interval"]
    if value is None or ends is None:
        return "-" if value is None else f"{value:.2f}"
    return form.format(value=value, **ends)


def summary(record: Mapping[str, Any]) -> str:
    """Specificity, what the controls show, and the random control, in words."""
    found = record["statistics"]
    lines = [
        f"{name}: {_cell(found[key], '{value:.2f} (95%: {low:.2f} to {high:.2f})')}"
        for name, key in (
            ("Retrieval drop", "retrieval_drop"),
            ("Control drop", "control_drop"),
            ("Specificity", "specificity"),
        )
    ]
    held = "yes" if record["controls_held"] else "not shown"
    random, p = found["random_specificity"], found["p_random"]
    if random is not None and p is not None:
        lines.append(
            f"Controls held: {held}   Specificity of random heads: {random:.2f} (p {p:.3f})"
        )
    else:
        lines.append(f"Controls held: {held}")
    return "\n".join(lines)
