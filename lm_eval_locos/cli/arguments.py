"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps a text of one line, such as a description, and leaves others, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


def whole(least: int = 0) -> Callable[[str], int]:
    """An argparse type: a whole number from ``least`` up."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)

    return read


def add_runs(parser: argparse.ArgumentParser) -> None:
    """Adds ``PATH...``, results files of the harness, and ``--baseline``."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="results files, or folders with them (what lm_eval --output_path wrote)",
    )
    parser.add_argument(
        "--baseline",
        action="append",
        default=[],
        metavar="PATH",
        help="compare with this run alone; once a model (default: every run without ablation)",
    )


def add_bootstrap(
    parser: argparse.ArgumentParser,
    *,
    over: str = "documents",
    least: int = 100,
    default: int = 10_000,
) -> None:
    """Adds ``--resamples`` and ``--seed`` of a bootstrap."""
    parser.add_argument(
        "--resamples",
        type=whole(least),
        default=default,
        metavar="R",
        help=f"bootstrap resamples of the {over} (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=whole(), default=0, help="of the bootstrap (default: %(default)s)"
    )
