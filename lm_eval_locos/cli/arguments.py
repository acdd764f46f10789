"""Arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def whole(least: int = 0) -> Callable[[str], int]:
    """An argparse type: a whole number from ``least`` up."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)

    return read


RESAMPLES = whole(100)
"""An argparse type: resamples of a bootstrap."""


def add_paths(parser: argparse.ArgumentParser) -> None:
    """Adds ``PATH...``: results files of the harness."""
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="results files, or folders with them (what lm_eval --output_path wrote)",
    )
