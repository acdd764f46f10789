"""What gates found, for people and for machines: a table, JUnit, Markdown, GitHub's annotations."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from lm_eval_locos.gates.evaluate import Check, Outcome
from lm_eval_locos.reporting.tables import escaped_markdown
from lm_eval_locos.reporting.text import clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lm_eval_locos.gates.gate import Gate

COLUMNS = ("gate", "number", "interval", "threshold", "verdict", "reason")


def rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """The table's cells, a row for each gate and each row that it is about."""
    for outcome in outcomes:
        several = len(outcome.checks) > 1
        for check in outcome.checks:
            yield (
                _line(outcome.gate.name + (f" [{check.row}]" if several else "")),
                "-" if check.value is None else f"{check.value:.4g}",
                _interval(check),
                outcome.gate.threshold + (" (value)" if _by_value(outcome.gate) else ""),
                "pass" if check.passed else "FAIL",
                _line(check.reason),
            )


def _line(text: str) -> str:
    """On one line: GitHub takes a line that begins with two colons for a command."""
    return " ".join(text.split())


def _by_value(gate: Gate) -> bool:
    return gate.judge == "point" and gate.metric != "controls_held"


def _interval(check: Check) -> str:
    if check.low is None or check.high is None or check.level is None:
        return "-"
    return f"[{check.low:.4g}, {check.high:.4g}] {100 * check.level:g}%"


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line: how many gates passed."""
    passed = sum(outcome.passed for outcome in outcomes)
    return f"{passed} of {len(outcomes)} gates passed."


NARROW = 140
"""Below this many characters reasons stand under the table."""


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Prints the table and the summary; on a narrow console with the reasons below."""
    narrow = console.width < NARROW
    console.print(table(outcomes, console, reasons=not narrow))
    if narrow:
        for row in rows(outcomes):
            if row[5]:
                console.print(f"{row[0]}: {row[5]}\n")
    console.print(summary(outcomes), soft_wrap=True)


def table(outcomes: Sequence[Outcome], console: Console, *, reasons: bool = True) -> Table:
    """The table; numbers are never cut, names and reasons fold where the console ends."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(
        box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for column in COLUMNS if reasons else COLUMNS[:-1]:
        text = column in ("gate", "reason")
        made.add_column(column, no_wrap=not text, overflow="fold", min_width=len(column))
    for row in rows(outcomes):
        style = "green" if row[4] == "pass" else "bold red"
        made.add_row(*row[:4], Text(row[4], style=style), *row[5 : 5 + reasons])
    return made


def text(outcomes: Sequence[Outcome], width: int = 10_000) -> str:
    """The table and the summary as plain text."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, width=width, markup=False, highlight=False, emoji=False)
    show(outcomes, console)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table in Markdown, failed gates marked."""
    lines = [f"### locos check: {summary(outcomes)}", ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows(outcomes):
        cells = [escaped_markdown(cell) for cell in row]
        cells[4] = "✅ pass" if row[4] == "pass" else "❌ **FAIL**"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def junit(gates: Sequence[Gate], outcomes: Sequence[Outcome], error: str | None = None) -> str:
    """JUnit XML, a test case a gate.

    Args:
        gates: all of them.
        outcomes: of the gates; empty with `error`.
        error: why no gate could be judged.
    """
    failed = sum(not outcome.passed for outcome in outcomes)
    counts = {
        "tests": str(len(gates)),
        "failures": str(failed),
        "errors": str(len(gates) if error is not None else 0),
    }
    top = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(top, "testsuite", {"name": "locos check", **counts})
    found = {outcome.gate.name: outcome for outcome in outcomes}
    for gate in gates:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": "locos.check", "name": clean(gate.name)}
        )
        if error is not None:
            _said(case, "error", error, error)
            continue
        outcome = found[gate.name]
        lines = "\n".join("  ".join(row) for row in rows([outcome]))
        if outcome.passed:
            ElementTree.SubElement(case, "system-out").text = clean(lines)
        else:
            _said(case, "failure", outcome.reason, lines)
    ElementTree.indent(top)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(top, "unicode") + "\n"


def _said(case: ElementTree.Element, kind: str, message: str, body: str) -> None:
    attributes = {"message": clean(_line(message)), "type": kind}
    ElementTree.SubElement(case, kind, attributes).text = clean(body)


def annotations(outcomes: Sequence[Outcome], config: str) -> list[str]:
    """GitHub's workflow commands: an error a failed gate, a notice where all passed.

    Args:
        outcomes: of the gates.
        config: the gates' file.
    """
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if not failed:
        return [annotation("notice", "locos check", summary(outcomes), config)]
    return [
        annotation("error", f"locos gate: {outcome.gate.name}", outcome.reason, config)
        for outcome in failed
    ]


def annotation(kind: str, title: str, message: str, file: str) -> str:
    """One workflow command, escaped as GitHub's toolkit does it."""
    given = f"file={_property(file)},title={_property(title)}"
    return f"::{kind} {given}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
