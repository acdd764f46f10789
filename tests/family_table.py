"""The README's table of families, made from the test matrix: `python tests/family_table.py`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tiny import FAMILIES, tiny_model

from lm_eval_locos.architecture import describe

README = Path(__file__).resolve().parent.parent / "README.md"
START, END = "<!-- families: python tests/family_table.py -->\n", "<!-- end of families -->"


def table() -> str:
    """A row for each family of the matrix, with what its tiny model showed and what is checked."""
    rows = [
        "| models | `model_type` | query site | layers | ablation | scores | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in FAMILIES.items():
        found = describe(tiny_model(name))
        kinds = Counter(found.kinds)
        cells = (
            case.models,
            f"`{case.type or name}`",
            f"`{case.attention}.{case.query}`",
            " and ".join(sorted(kinds, key=lambda kind: -kinds[kind])),
            "✓",
            "✓" if case.scored else "no",
            case.notes,
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    README.write_text(before + START + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
