"""``locos doctor``: says whether this package is right about a model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lm_eval_locos.cli import loading
from lm_eval_locos.cli.arguments import Formatter

if TYPE_CHECKING:
    from rich.panel import Panel
    from rich.table import Table

    from lm_eval_locos.doctor import Check

EPILOG = """\
checks:
  k = 0         no head ablated gives bit-equal logits, and no hook stays behind
  query site    ablating a head's query changes its own query and its own output alone
  output site   ablating a head's output changes its own output alone, and the logits
  left padding  a left-padded batch gives the logits of each prompt alone
  unembedding   the logits come from the unembedding's rows and the final norm's output
  pieces        a padded batch fed piece by piece gives the same, as detection feeds it
  visible keys  each layer attends where its window lets it
  scaling       scaling, soft cap and sinks are those of the attention's own call
  attention     the captured queries, keys and values give the heads' outputs again
  queries       what is ablated is the query, and no key or value
  scores        LOCOS and attention_spatial equal sums over eager attention matrices

A check that does not apply is skipped with the reason: a model whose heads can be ablated but not
scored (ALiBi, packed weights) passes. In half precision tolerances are wide; --dtype float32 is
strict.

examples:
  locos doctor --model Qwen/Qwen3-0.6B
  locos doctor --model FOLDER --gguf-file model.Q4_K_M.gguf --json doctor.json

A model type that is not known is described in a script, my_model.py:
  from lm_eval_locos.architecture import Family, register_family
  from lm_eval_locos.cli import main

  register_family(Family(("my_model",), attention="attn", query="wq", output="wo"))
  main()

and checked by it:
  python my_model.py doctor --model FOLDER

exit status: 0 nothing failed, 1 a check failed, 2 wrong argument or input
"""
_RESULTS = {True: ("pass", "green"), False: ("FAIL", "bold red"), None: ("skipped", "yellow")}


def add_parser(commands: Any) -> None:
    """Adds ``doctor``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check on a model's own weights that this package is right about it",
        description="Checks on a model's own weights, with a short prompt and in seconds, that "
        "ablation changes the head it should and nothing else, and that scores are what attention "
        "matrices give. For models of a type that is not listed, and for any model before a long "
        "run.",
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    loading.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write description and checks to FILE too")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 1 where a check failed."""
    from lm_eval_locos.architecture import describe
    from lm_eval_locos.cli import tables
    from lm_eval_locos.doctor import facts

    model, tokenizer = loading.load(arguments)
    architecture = describe(model)
    description = facts(model, architecture)
    out = tables.console()
    out.print(panel(arguments.model, description))
    checks = list(_checks(model, tokenizer))
    out.print(result_table(checks, lines=out.is_terminal))
    count = [sum(check.passed is result for check in checks) for result in _RESULTS]
    out.print("{} checks passed, {} failed, {} skipped.".format(*count))
    if arguments.json:
        _write(arguments.json, arguments.model, description, checks)
    if not count[1]:
        return 0
    out.print(
        "What failed first is most often the cause. The description above is what the family's "
        "Family says: see lm_eval_locos.architecture.register_family."
    )
    return 1


def _checks(model: Any, tokenizer: Any) -> Iterator[Check]:
    """The checks; on a terminal a line on standard error says which one runs."""
    from rich.console import Console

    from lm_eval_locos.doctor import diagnose

    with Console(file=sys.stderr).status("loaded") as status:
        yield from diagnose(model, tokenizer, progress=lambda name: status.update(f"{name} ..."))


def panel(name: str, description: Mapping[str, str]) -> Panel:
    """What was found in the model, a line a fact."""
    from rich.panel import Panel
    from rich.text import Text

    from lm_eval_locos.cli import tables
    from lm_eval_locos.reporting.text import clean

    lines = tables.grid(1)
    for fact, value in description.items():
        lines.add_row(fact, clean(value))
    return Panel(lines, title=Text(clean(name)), title_align="left", expand=False)


def result_table(checks: Sequence[Check], *, lines: bool) -> Table:
    """A row a check: its name, its result, what it saw; on request a line below the header."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from lm_eval_locos.reporting.text import clean

    table = Table(box=box.SIMPLE_HEAD if lines else None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("check", "result"):
        table.add_column(column, no_wrap=True)
    table.add_column("detail", overflow="fold")
    for check in checks:
        word, style = _RESULTS[check.passed]
        table.add_row(check.name, Text(word, style=style), clean(check.detail))
    return table


def _write(path: str, model: str, description: Mapping[str, str], checks: Sequence[Check]) -> None:
    from dataclasses import asdict

    from lm_eval_locos.files import write_file

    content = {
        "model": model,
        "passed": all(check.passed is not False for check in checks),
        "description": dict(description),
        "checks": [asdict(check) for check in checks],
    }
    write_file(path, json.dumps(content, indent=1) + "\n")
