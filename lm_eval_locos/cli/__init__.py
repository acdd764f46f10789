"""The command ``locos``: one module a subcommand.

Each module has ``add_parser(commands)``, which adds its subcommand and sets ``run`` to a function
of the parsed arguments. Heavy imports stay inside that function, so that ``locos --help`` is quick.

Exit status: 0, 1 where a check found what it looks for, 2 for a wrong argument or input, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from lm_eval_locos import __version__
from lm_eval_locos.cli import check, compare, demo, detect, doctor, heads, report, sweep
from lm_eval_locos.errors import LocosError


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    top = argparse.ArgumentParser(
        prog="locos",
        description="Finds the attention heads of a language model that retrieve from context, "
        "and reports what their removal does. The evaluation itself runs in the harness: lm_eval "
        "--model locos-ablated ...",
    )
    top.add_argument("--version", action="version", version=f"lm-eval-locos {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in (demo, doctor, detect, heads, sweep, report, check, compare):
        module.add_parser(commands)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; ends the process with its status."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    try:
        sys.exit(arguments.run(arguments) or 0)
    except LocosError as error:
        print(f"locos: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        resumable = hasattr(arguments, "resume")
        advice = " The same command with --resume goes on where it stopped." if resumable else ""
        print(f"locos: interrupted.{advice}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # the reader, such as head, has enough
        sys.stderr.close()
        sys.exit(0)
