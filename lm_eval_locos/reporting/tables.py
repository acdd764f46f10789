"""The leaderboard as terminal text, Markdown, LaTeX, CSV or JSON; each a pure function to text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

from lm_eval_locos import __version__
from lm_eval_locos.reporting.best_k import best_k
from lm_eval_locos.reporting.board import Board, Row, plain
from lm_eval_locos.reporting.fold import GAP, folded
from lm_eval_locos.reporting.grid import bundled_warning, grids, lines_of, notes
from lm_eval_locos.reporting.results import Run
from lm_eval_locos.reporting.text import title
from lm_eval_locos.statistics import Estimate

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "[": "{[}",  # after \\ a bracket would be an argument
    "]": "{]}",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
    "–": "--",
    "“": "``",
    "”": "''",
    "\n": " ",
    "\r": " ",
    "\t": " ",
}
_MARKDOWN = {c: "\\" + c for c in "\\`*_{}[]#|~"} | {
    "<": "&lt;",
    ">": "&gt;",
    "&": "&amp;",
    "\n": " ",
    "\r": " ",
}


def escaped_latex(text: str) -> str:
    """Text as LaTeX sets it."""
    return "".join(_LATEX.get(c, c) for c in text)


def escaped_markdown(text: str) -> str:
    """Text as Markdown shows it, inside a table too."""
    return "".join(_MARKDOWN.get(c, c) for c in text)


def terminal(board: Board, width: int | None = None) -> str:
    """Plain text; columns fold where `width` is too small for them, nothing is cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(
        file=out,
        width=width or 10_000,
        markup=False,
        highlight=False,
        emoji=False,
        color_system=None,
    )
    for warning in _warnings(board):
        console.print(f"WARNING: {warning}\n")
    for grid in grids(board):
        grid, columns = folded(grid, width)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        for i, header in enumerate(grid.headers):
            table.add_column(
                header,
                justify="left" if i < grid.labels else "right",
                overflow="fold",
                width=columns[i],
            )
        for row in grid.rows:
            table.add_row(*row)
        console.print(grid.title)
        console.print(table)
    for note in notes(board):
        console.print(note)
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def markdown(board: Board) -> str:
    """GitHub's Markdown."""
    parts = [f"> **Warning:** {escaped_markdown(warning)}\n" for warning in _warnings(board)]
    for grid in grids(board):
        lines = [grid.headers, *grid.rows]
        texts = ["| " + " | ".join(map(escaped_markdown, line)) + " |" for line in lines]
        rule = ["---" if i < grid.labels else "---:" for i in range(len(grid.headers))]
        texts.insert(1, "| " + " | ".join(rule) + " |")
        parts.append(f"**{escaped_markdown(grid.title)}**\n\n" + "\n".join(texts) + "\n")
    parts.append("\n".join(f"- {escaped_markdown(note)}" for note in notes(board)) + "\n")
    return "\n".join(parts)


def latex(board: Board) -> str:
    """Tables for the package booktabs; the notes stand below the last one."""
    parts = [f"% lm-eval-locos {__version__}; needs \\usepackage{{booktabs}}"]
    tables = grids(board)
    warnings = " ".join(_warnings(board))
    for i, grid in enumerate(tables):
        body = "\n".join(_latex_row(row) for row in grid.rows)
        columns = "l" * grid.labels + "r" * (len(grid.headers) - grid.labels)
        said = " ".join(filter(None, (f"{grid.title}.", warnings if i == 0 else "")))
        below = " ".join(notes(board)) if i == len(tables) - 1 else ""
        parts.append(
            "\\begin{table}\n\\centering\n\\small\n"
            f"\\caption{{{escaped_latex(said)}}}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n"
            f"{_latex_row(grid.headers)}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
            + (
                f"\n\\smallskip\n\\raggedright\\footnotesize\n{escaped_latex(below)}\n"
                if below
                else ""
            )
            + "\\end{table}"
        )
    return "\n\n".join(parts) + "\n"


def _latex_row(texts: tuple[str, ...]) -> str:
    return " & ".join(map(_latex_cell, texts)) + r" \\"


def _latex_cell(text: str) -> str:
    """A number with its interval and effect below, which beside it would not fit on a page."""
    parts = lines_of(text)
    if not parts[-1].startswith("MDE "):
        return escaped_latex(text)
    body = r" \\ ".join(map(escaped_latex, parts))
    return rf"\begin{{tabular}}[t]{{@{{}}r@{{}}}}{body}\end{{tabular}}"


def _warnings(board: Board) -> list[str]:
    first = bundled_warning(board)
    return [*([first] if first else []), *board.warnings]


# -- for machines --------------------------------------------------------------------------

_ROW: tuple[tuple[str, Callable[[Row], Any]], ...] = (
    ("model", lambda r: r.model),
    ("ranking", lambda r: r.ranking),
    ("ranking_sha256", lambda r: r.ranking_sha256),
    ("condition", lambda r: r.condition),
    ("kind", lambda r: r.kind),
    ("k", lambda r: r.k),
    ("site", lambda r: r.site),
    ("mode", lambda r: r.mode),
    ("seeds", lambda r: len(r.seeds) or None),
    ("source", lambda r: r.source),
    ("bundled_sample", lambda r: r.bundled),
)


def records(board: Board) -> list[dict[str, Any]]:
    """A flat dict a row, all with the same keys; None where there is nothing."""
    found = []
    for row in board.rows:
        record = {name: of(row) for name, of in _ROW}
        for side in ("retrieval_drop", "control_drop", "specificity"):
            record |= _flat(side, getattr(row, side), board.level)
        controls, random = row.controls, row.random
        record["controls_held"] = row.controls_held
        held = controls and controls.drop.interval
        record["control_drop_high_90"] = held.high if held else None
        record["control_drop_detectable_90"] = controls.drop.detectable if held else None
        record["random_seeds"] = random.seeds if random else None
        record["random_specificity"] = random.specificity if random else None
        record["p_random"] = random.p if random else None
        record["p_random_holm"] = random.p_holm if random else None
        for family in board.families:
            cell = row.cells.get(family)
            names = ("metric", "documents", "bundled", "paired", "status", "lost", "gained")
            for name in (*names, "p", "p_holm"):
                record[f"{family}_{name}"] = getattr(cell, name) if cell else None
            for name in ("score", "baseline", "drop", "difference"):
                estimate = getattr(cell, name) if cell else None
                record |= _flat(f"{family}_{name}", estimate, board.level)
        record["notes"] = "; ".join(row.notes)
        record["runs"] = ";".join(row.runs)
        found.append(plain(record))
    return found


def _flat(name: str, found: Estimate | None, level: float) -> dict[str, float | None]:
    ends = found.interval if found else None
    return {
        name: found.value if found else None,
        f"{name}_low": ends.low if ends else None,
        f"{name}_high": ends.high if ends else None,
        f"{name}_stderr": found.standard_error if found else None,
        f"{name}_detectable": found.detectable if found else None,
    }


def to_csv(board: Board) -> str:
    """A line a row with every number in full; the columns of `records`."""
    out = io.StringIO()
    table = records(board)
    writer = csv.DictWriter(out, list(table[0]), lineterminator="\n")
    writer.writeheader()
    for record in table:
        writer.writerow({k: _word(v) for k, v in record.items()})
    return out.getvalue()


def _word(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def to_json(board: Board) -> str:
    """Everything, with the provenance of every run."""
    content = {
        "lm_eval_locos": __version__,
        "warnings": _warnings(board),
        "bundled_sample": board.bundled,
        "settings": {
            "resamples": board.resamples,
            "seed": board.seed,
            "level": board.level,
            "margin": board.margin,
        },
        "families": {family: title(family) for family in board.families},
        "rows": [plain(row) for row in board.rows],
        "k_star": [
            {
                "model": choice.model,
                "ranking": choice.ranking,
                "site": choice.site,
                "mode": choice.mode,
                "source": choice.source,
                "k": choice.k,
                "chosen_with": choice.chosen_with,
                "lost_families": dict(choice.lost),
                "gained_families": dict(choice.gained),
                "development": {str(k): value for k, value in choice.development.items()},
                "documents": choice.documents,
                "result": choice.result.as_dict(),
            }
            for choice in best_k(board)
        ],
        "runs": [provenance(run) for run in board.runs],
    }
    return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def provenance(run: Run) -> dict[str, Any]:
    """Where a run's numbers are from."""
    tasks: Mapping[str, Any] = {
        name: {
            "documents": task.documents,
            "bundled_sample": task.bundled,
            "samples": task.samples is not None,
            "data": task.data,
            "settings": task.settings,
            "documents_and_prompts_hash": task.hash,
        }
        for name, task in run.tasks.items()
    }
    return plain(
        {
            "path": run.path,
            "sha256": run.sha256,
            "date": run.date,
            "model_type": run.kind,
            "model": run.model,
            "identity": run.identity,
            "condition": run.condition,
            "ablation": run.locos,
            "versions": run.versions,
            "limit": run.config.get("limit"),
            "batch_size": run.config.get("batch_size"),
            "tasks": tasks,
        }
    )
