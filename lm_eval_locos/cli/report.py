"""``locos report``: results files of the harness as a leaderboard, figures and a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lm_eval_locos.cli import arguments as shared

if TYPE_CHECKING:
    from lm_eval_locos.reporting.board import Board

FORMATS = ("terminal", "markdown", "latex", "csv", "json", "html")

_EPILOG = """\
examples:
  lm_eval --model hf --model_args pretrained=MODEL --tasks locos --log_samples --output_path out
  lm_eval --model locos-ablated --model_args pretrained=MODEL,heads=locos.json,num_heads=20 \\
    --tasks locos --log_samples --output_path out
  locos report out
  locos report out --format html --output report.html --plots figures
  locos report out --format csv | column -s, -t | less -S

A row is a model under a condition (which heads of which ranking are ablated). Its drops are
against the run of the same model without ablation, document by document where both have sample
files (--log_samples); runs on other documents or prompts are never compared. Runs whose condition
is random are put together, and are the random control of the same ranking's top k.
"""


def add_parser(commands: Any) -> None:
    """Adds ``report`` to argparse's ``commands``."""
    report = commands.add_parser(
        "report",
        help="a leaderboard, figures and a page from results files of the harness",
        description="Compares runs of the harness with heads ablated to runs without, and shows "
        "scores, drops and specificity.",
        epilog=_EPILOG,
        formatter_class=shared.Formatter,
    )
    shared.add_runs(report)
    report.add_argument(
        "--format", choices=FORMATS, default="terminal", help="(default: %(default)s)"
    )
    report.add_argument(
        "--output", metavar="FILE", help="write to FILE, whole or not at all (html needs it)"
    )
    report.add_argument("--plots", metavar="DIR", help="write every figure as PNG and SVG")
    report.add_argument(
        "--metric",
        action="append",
        default=[],
        type=_metric,
        metavar="FAMILY=NAME",
        help="show another metric, such as nolima=contains (default: each task's first)",
    )
    report.add_argument(
        "--margin",
        type=_share,
        default=0.05,
        help="largest control drop that counts as held (default: %(default)s)",
    )
    shared.add_bootstrap(report)
    report.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """``locos report``; raises LocosError for files that cannot be read or compared."""
    from lm_eval_locos.errors import LocosError
    from lm_eval_locos.files import write_file
    from lm_eval_locos.reporting.leaderboard import leaderboard
    from lm_eval_locos.reporting.results import load

    if arguments.format == "html" and not arguments.output:
        raise LocosError("--format html needs --output FILE, such as --output report.html.")
    board = leaderboard(
        load(arguments.paths),
        baselines=load(arguments.baseline) if arguments.baseline else (),
        metrics=dict(arguments.metric),
        resamples=arguments.resamples,
        seed=arguments.seed,
        margin=arguments.margin,
    )
    text = _renderer(arguments)(board)
    if arguments.plots:
        from lm_eval_locos.reporting.figure_list import figure_list
        from lm_eval_locos.reporting.plots import write_all

        for path in write_all(figure_list(board), arguments.plots):
            print(path, file=sys.stderr)
    if arguments.output:
        write_file(arguments.output, text)
        print(arguments.output, file=sys.stderr)
    else:
        sys.stdout.write(text)


def _renderer(arguments: argparse.Namespace) -> Callable[[Board], str]:
    from lm_eval_locos.reporting import tables

    if arguments.format == "html":
        from lm_eval_locos.reporting.html import page

        return page
    if arguments.format == "terminal":
        return lambda board: tables.terminal(board, _width(arguments))
    return {
        "markdown": tables.markdown,
        "latex": tables.latex,
        "csv": tables.to_csv,
        "json": tables.to_json,
    }[arguments.format]


def _width(arguments: argparse.Namespace) -> int | None:
    """The terminal's width; None where the text goes to a file or a pipe."""
    import shutil

    to_terminal = not arguments.output and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if to_terminal else None


def _metric(text: str) -> tuple[str, str]:
    family, sign, name = text.partition("=")
    if not (family and sign and name):
        raise argparse.ArgumentTypeError(f"{text!r} is not FAMILY=NAME, such as nolima=contains")
    return family, name


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number between 0 and 1")
    return value
