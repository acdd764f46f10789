"""``locos check``: thresholds on reported numbers, for continuous integration."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval_locos.cli import arguments as shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lm_eval_locos.gates.evaluate import Outcome
    from lm_eval_locos.gates.gate import GateFile

_EPILOG = """\
gates.toml:
  [[gate]]
  metric = "specificity"       # the lower end of its 95% interval must be at least 0.3
  min = 0.3

  [[gate]]
  metric = "control_drop"      # the upper end must be at most 0.05
  max = 0.05
  condition = "top:20"

  [[gate]]
  metric = "controls_held"     # the upper end of the 90% interval is below the margin
  margin = 0.05

metrics: specificity, retrieval_drop, control_drop, controls_held, p_random, random_specificity,
  FAMILY_drop, FAMILY_difference, FAMILY_baseline, FAMILY_ablated (nolima_drop), TASK:METRIC
  (nolima:contains)
keys of a gate: min, max; name; model, ranking, condition, k (which rows: names or patterns); level
  (0.95); judge ("bound", or "point" for the value itself); margin (of controls_held); effect (the
  sample has to be large enough to show one of this size); allow_bundled; allow_undefined
keys beside the gates: level, judge, allow_bundled, allow_undefined (for all gates); metrics, such
  as metrics = { nolima = "contains" }

examples:
  locos check out --config gates.toml
  locos check out/MODEL/results_DATE.json --config gates.toml --junit gates.xml
  locos check out                        # gates under [tool.locos.gates] in pyproject.toml

Exit status: 0 where every gate passes, 1 where one fails, 2 for a wrong argument, file or
comparison. A number that is missing, not finite, without an interval (no --log_samples) or from a
bundled sample fails. Under GitHub Actions failed gates are annotated and the table is added to the
job's summary.
"""


def add_parser(commands: Any) -> None:
    """Adds ``check`` to argparse's ``commands``."""
    check = commands.add_parser(
        "check",
        help="fail where reported numbers do not pass their gates",
        description="Judges numbers of results files by thresholds, on the end of the interval "
        "and not on the value alone.",
        epilog=_EPILOG,
        formatter_class=shared.Formatter,
    )
    shared.add_runs(check)
    check.add_argument(
        "--config",
        metavar="FILE",
        help="TOML with the gates (default: [tool.locos.gates] of pyproject.toml here or above)",
    )
    check.add_argument("--junit", metavar="FILE", help="write JUnit XML, a test case a gate")
    check.add_argument("--summary", metavar="FILE", help="write the table as Markdown")
    shared.add_bootstrap(check)
    check.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """``locos check``: 0 or 1; raises LocosError for what cannot be read or compared."""
    from lm_eval_locos.cli import tables
    from lm_eval_locos.errors import LocosError
    from lm_eval_locos.files import write_file
    from lm_eval_locos.gates import output
    from lm_eval_locos.gates.config import read_gates
    from lm_eval_locos.gates.evaluate import evaluate
    from lm_eval_locos.reporting.results import load

    config, file = arguments.config or "pyproject.toml", None
    try:
        file = read_gates(arguments.config)
        outcomes = evaluate(
            file,
            load(arguments.paths),
            baselines=load(arguments.baseline) if arguments.baseline else (),
            resamples=arguments.resamples,
            seed=arguments.seed,
        )
    except LocosError as error:
        if file is not None:
            _write_junit(arguments.junit, file, (), str(error))
        if _on_github():
            print(output.annotation("error", "locos check", str(error), config))
        raise
    console = tables.console()
    if console.is_terminal:
        output.show(outcomes, console)
    else:
        print(output.text(outcomes), end="")
    _write_junit(arguments.junit, file, outcomes)
    if arguments.summary:
        write_file(arguments.summary, output.markdown(outcomes))
    if _on_github():
        sys.stdout.flush()
        for line in output.annotations(outcomes, file.path):
            print(line)
        if path := os.environ.get("GITHUB_STEP_SUMMARY"):
            _append(path, output.markdown(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def _write_junit(
    path: str | None, file: GateFile, outcomes: Sequence[Outcome], error: str | None = None
) -> None:
    from lm_eval_locos.files import write_file
    from lm_eval_locos.gates.output import junit

    if path:
        write_file(path, junit(file.gates, outcomes, error))


def _append(path: str, text: str) -> None:
    from lm_eval_locos.errors import LocosError

    try:
        with Path(path).open("a", encoding="utf-8") as summary:
            summary.write(text)
    except OSError as error:
        raise LocosError(
            f"GITHUB_STEP_SUMMARY={path}: cannot be written ({error.strerror}). Make the file "
            "writable, or remove the variable."
        ) from error
