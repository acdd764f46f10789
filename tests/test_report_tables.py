"""Formats of `locos report`: each parses back, nothing in a file can break out of its place."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_files import METRIC, documents, sample, study, write_ranking, write_run

from lm_eval_locos.reporting.best_k import best_k, in_development
from lm_eval_locos.reporting.cards import cards
from lm_eval_locos.reporting.fold import GAP, folded
from lm_eval_locos.reporting.grid import Grid, best_k_lines, bundled_warning, grids, notes
from lm_eval_locos.reporting.html import page
from lm_eval_locos.reporting.leaderboard import leaderboard
from lm_eval_locos.reporting.results import load
from lm_eval_locos.reporting.tables import (
    escaped_latex,
    escaped_markdown,
    latex,
    markdown,
    terminal,
    to_csv,
    to_json,
)
from lm_eval_locos.reporting.text import clean, family_of, fixed, p_value, percent

HOSTILE = "<script>alert(1)</script>|`x`|\\input{/etc/passwd}$a_1^2$%&#~{\"'\x1b[31m\u202e\ud800"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("study")
    return study(path, ks=(5, 20), seeds=2, n=20, bundled=True, models=("org/a", "org/b"))


@pytest.fixture(scope="module")
def board(folder):
    return leaderboard(load([folder]), resamples=200)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A study whose every name is an attack."""
    path = tmp_path_factory.mktemp("hostile")
    ranking = write_ranking(path / "r.json")
    docs = documents("nolima", 8)
    for doc in docs:
        doc["question"] = doc["answers"][0] = HOSTILE
    for number, (condition, score) in enumerate([(None, 1.0), ("top:2", 0.0), ("top:4", 0.0)]):
        entries = [sample(doc, METRIC["nolima"], score, HOSTILE) for doc in docs]
        write_run(
            path / "out",
            {"nolima": entries},
            condition=condition,
            ranking=ranking if condition else None,
            method=HOSTILE,
            number=number,
            change=lambda content: content.update(model_name=HOSTILE),
        )
    return leaderboard(load([path / "out"]), resamples=200)


def cells(line: str) -> list[str]:
    """A line of a Markdown table, split where GitHub splits it."""
    assert line.startswith("| ")
    assert line.endswith(" |")
    return re.split(r"(?<!\\) \| ", line[2:-2])


def balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", text):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


@pytest.mark.parametrize("which", ["board", "hostile"])
def test_markdown_has_as_many_columns_in_every_line(which, request):
    board = request.getfixturevalue(which)
    text = markdown(board)
    tables = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
    for table, grid in zip(tables, grids(board), strict=True):
        lines = table.splitlines()
        assert len(lines) == 2 + len(grid.rows)
        assert {len(cells(line)) for line in lines} == {len(grid.headers)}
        assert set("".join(cells(lines[1]))) <= set("-:")


@pytest.mark.parametrize("which", ["board", "hostile"])
def test_latex_is_balanced_and_has_as_many_columns_in_every_line(which, request):
    board = request.getfixturevalue(which)
    text = latex(board)
    assert balanced(text)
    assert text.count("\\begin{table}") == text.count("\\end{table}") == len(grids(board))
    assert text.count("\\begin{tabular}{") == len(grids(board))  # others are within a cell
    assert text.count("\\begin{tabular}") == text.count("\\end{tabular}")
    for grid, body in zip(
        grids(board), re.findall(r"\\toprule\n(.*?)\\bottomrule", text, flags=re.S), strict=True
    ):
        lines = [line for line in body.splitlines() if line != "\\midrule"]
        assert len(lines) == 1 + len(grid.rows)
        for line in lines:
            assert line.endswith(r" \\")
            assert len(re.findall(r"(?<!\\)&", line)) == len(grid.headers) - 1
        spec = text[text.index("\\begin{tabular}{") + 16 :].split("}")[0]
        assert set(spec) <= set("lr")


@pytest.mark.parametrize("which", ["board", "hostile"])
def test_csv_and_json_have_the_numbers_of_the_board(which, request):
    board = request.getfixturevalue(which)
    content = json.loads(to_json(board))
    lines = list(csv.DictReader(io.StringIO(to_csv(board))))
    assert len(lines) == len(content["rows"]) == len(board.rows)
    for row, line, entry in zip(board.rows, lines, content["rows"], strict=True):
        assert (line["model"], line["condition"]) == (row.model, row.condition)
        assert None not in line  # no line is longer than the header
        assert line["bundled_sample"] == str(row.bundled).lower()
        for family, cell in row.cells.items():
            assert float(line[f"{family}_score"]) == cell.score.value
            assert entry["cells"][family]["score"]["value"] == cell.score.value
            drop = cell.drop.value if cell.drop else None
            assert line[f"{family}_drop"] == ("" if drop is None else str(drop))
        if row.specificity and row.specificity.interval:
            assert float(line["specificity_low"]) == row.specificity.interval.low
        if row.random:
            assert float(line["p_random_holm"]) == row.random.p_holm
    assert len(content["runs"]) == len(board.runs)
    assert all(len(run["sha256"]) == 64 for run in content["runs"])
    assert "samples" not in content["runs"][0]


def test_terminal_has_every_row_and_folds_instead_of_cutting(board):
    wide = terminal(board)
    assert "…" not in terminal(board, 60)
    for grid in grids(board):
        for row in grid.rows:
            assert any(all(text in line for text in row) for line in wide.splitlines())
    assert max(map(len, terminal(board, 100).splitlines())) <= 100


def plain_text(form, board) -> str:
    """A format's text without its escapes."""
    return re.sub(r"[\\{}]", "", form(board)).replace("$-$", "−")


@pytest.mark.parametrize("form", [terminal, markdown, latex, page])
def test_the_minimum_detectable_effect_stands_beside_every_interval(board, form):
    text = plain_text(form, board)
    between = r"\s*|</span>\s*<span class=\"minor\">" if form is page else r"\s+"
    seen = 0
    for row in board.rows:
        for found in (row.retrieval_drop, row.control_drop, row.specificity):
            if found and found.interval:
                low, high = (fixed(100 * x, 1) for x in (found.interval.low, found.interval.high))
                effect = percent(found.detectable)
                assert re.search(rf"\[{low}, {high}\](?:{between})MDE {effect}", text)
                seen += 1
    assert seen == 3 * 8  # two models, two rankings, two k
    assert len(re.findall(r"\[−?[\d.]+, −?[\d.]+\]", text)) == len(re.findall(r"MDE [\d.]", text))
    assert "MDE: minimum detectable effect" in text


def test_the_minimum_detectable_effect_of_every_estimate_is_in_the_csv(board):
    lines = list(csv.DictReader(io.StringIO(to_csv(board))))
    found = 0
    for row, line in zip(board.rows, lines, strict=True):
        estimates = {"specificity": row.specificity, "control_drop": row.control_drop}
        estimates |= {f"{family}_drop": cell.drop for family, cell in row.cells.items()}
        estimates |= {f"{family}_score": cell.score for family, cell in row.cells.items()}
        for name, estimate in estimates.items():
            effect = estimate.detectable if estimate else None
            assert line[f"{name}_detectable"] == ("" if effect is None else str(effect))
            found += effect is not None
        if row.controls:
            assert line["control_drop_detectable_90"] == str(row.controls.drop.detectable)
    assert found > 50
    assert {name for name in lines[0] if name.endswith("_low")} == {
        name.replace("_detectable", "_low") for name in lines[0] if name.endswith("_detectable")
    }


def test_a_narrow_terminal_breaks_no_number(board):
    text = terminal(board, 100)
    for row in board.rows:
        for found in (row.retrieval_drop, row.control_drop, row.specificity):
            if found and found.interval:
                low, high = (fixed(100 * x, 1) for x in (found.interval.low, found.interval.high))
                for part in (percent(found.value), f"[{low}, {high}]"):
                    assert part in text
                assert f"MDE {percent(found.detectable)}" in text
    words = text.split()
    assert {"org/a", "locos", "wu", "top:5", "Specificity", "(random)", "Arithmetic"} <= set(words)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=3),
    st.lists(st.integers(1, 30), min_size=1, max_size=4),
    st.integers(20, 120),
)
def test_a_folded_table_has_the_same_text_and_fits(names, numbers, width):
    row = (*("n" * n for n in names), *(f"1.0% [{'2' * n}] MDE 3%" for n in numbers))
    grid = Grid("", tuple(f"h{i}" for i in range(len(row))), len(names), (row,))
    found, columns = folded(grid, width)
    assert " ".join(found.rows[0]).split() == " ".join(row).split()
    assert len(columns) == len(found.headers)
    if None not in columns:
        assert sum(columns) + GAP * len(columns) <= width
        for size, text in list(zip(columns, found.rows[0], strict=True))[found.labels :]:
            assert max(map(len, text.split("\n"))) <= size
    assert folded(grid, None) == (grid, [None] * len(row))


def test_k_star_lines_tell_models_sites_and_rankings_apart(board, tmp_path):
    lines = best_k_lines(board)
    assert len(lines) == len(set(lines)) == 4
    for model in ("org/a", "org/b"):
        for ranking in ("locos", "wu"):
            assert sum(line.startswith(f"{model}: k* of {ranking} = ") for line in lines) == 1
    assert [line for line in notes(board) if "k* of" in line] == lines
    rows = [
        replace(row, site="output") if row.model == "org/b" and row.site else row
        for row in board.rows
    ]
    lines = best_k_lines(replace(board, rows=tuple(replace(row, model="m") for row in rows)))
    assert sum(line.startswith("output, mean: k* of wu = ") for line in lines) == 1


def whole(board, family: str, development: bool):
    """The board with every cluster of a family in one half."""

    def moved(pair):
        names = (f"{pair[0].cluster}/{i}" for i in range(99))
        name = next(n for n in names if in_development(family, n) == development)
        return tuple(replace(sample, cluster=name) for sample in pair)

    def changed(row):
        cell = row.cells[family]
        new = replace(cell, pairs=tuple(map(moved, cell.pairs)))
        return replace(row, cells={**row.cells, family: new})

    return replace(board, rows=tuple(map(changed, board.rows)))


@pytest.mark.parametrize(
    ("development", "said"),
    [
        (True, "Arithmetic had a part in the choice of k, but has none on the other half"),
        (False, "Arithmetic had no part in the choice of k, but has one on the other half"),
    ],
)
def test_a_family_in_one_half_alone_is_named(board, development, said):
    assert not any("had" in line for line in best_k_lines(board) if "Arithmetic" in line)
    changed = whole(board, "arithmetic", development)
    choices = best_k(changed)
    choice = choices[0]
    assert ("arithmetic" in choice.chosen_with) == development
    assert ("arithmetic" in choice.result.families) != development
    said += " (all its clusters are in one half)."
    assert all(line.endswith(said) for line in best_k_lines(changed, choices))
    assert all(said in card["remarks"] for card in cards(changed, choices))
    star = json.loads(to_json(changed))["k_star"][0]
    key = "lost_families" if development else "gained_families"
    assert star[key] == {"arithmetic": "all its clusters are in one half"}


@pytest.mark.parametrize("form", [terminal, markdown, latex])
def test_the_bundled_sample_is_marked_and_warned_of(board, form):
    text = form(board)
    plain = re.sub(r"[\\{}]", "", text)
    assert "[bundled sample]" in plain
    assert "not from the benchmark" in plain
    assert plain.index("not from the benchmark") < plain.index("baseline")
    for family in ("NoLiMa", "Arithmetic"):
        assert re.search(rf"{family} +\[bundled sample\]", plain)


def test_the_mark_is_in_json_and_csv(board):
    content = json.loads(to_json(board))
    assert content["bundled_sample"] is True
    assert content["warnings"][0] == bundled_warning(board)
    assert all(row["bundled"] for row in content["rows"])


def test_without_bundled_data_there_is_no_mark(tmp_path):
    out = study(tmp_path, ks=(5,), methods=("locos",), seeds=0, n=8)
    board = leaderboard(load([out]), resamples=200)
    for form in (terminal, markdown, latex, to_csv, to_json):
        assert "bundled sample" not in form(board)


def test_unpaired_and_undefined_drops_are_marked(tmp_path):
    ranking = write_ranking(tmp_path / "r.json")
    for number, condition in enumerate((None, "top:2")):
        found = {
            "nolima": [sample(d, "contains", 1.0 - number) for d in documents("nolima", 8)],
            "musique": [sample(d, "acc", 0.0) for d in documents("musique", 8)],
            "parametric": [sample(d, "exact_match", 1.0) for d in documents("parametric", 8)],
        }
        write_run(
            tmp_path / "out",
            found,
            condition=condition,
            ranking=ranking if condition else None,
            number=number,
            samples=False,
        )
    board = leaderboard(load([tmp_path / "out"]), resamples=200)
    for form in (terminal, markdown):
        text = form(board)
        assert "0.000 (100.0%†)" in text
        assert "0.000 (‡)" in text
        assert "† Unpaired" in text
        assert "‡ Undefined (floor)" in text
    assert r"0.000 (100.0\%$\dagger$)" in latex(board)
    line = list(csv.DictReader(io.StringIO(to_csv(board))))[1]
    assert line["nolima_paired"] == "false"
    assert line["nolima_drop_low"] == ""
    assert line["musique_status"] == "undefined (floor)"
    html = page(board)
    assert "drop 100.0%†" in html
    assert "drop ‡" in html


def test_hostile_text_is_shown_and_does_nothing(hostile):
    for form in (terminal, markdown, latex, to_csv, to_json):
        text = form(hostile)
        assert "\x1b" not in text
        assert "\u202e" not in text
        text.encode("utf-8")  # no lone surrogate
        assert "alert(1)" in text
    assert "<script" not in markdown(hostile)
    assert "\\input{" not in latex(hostile)
    assert "\\textbackslash{}input\\{" in latex(hostile)


@given(st.text(max_size=40))
def test_escaped_text_stays_in_its_cell(text):
    shown = escaped_markdown(clean(text))
    assert not re.search(r"(?<!\\)(?:\\\\)*\|", shown)
    assert not {"<", "\n", "\r"} & set(shown)
    set_text = escaped_latex(clean(text))
    assert balanced(set_text)
    assert not re.search(r"(?<!\\)(?:\\\\)*[&%#]", set_text)


@given(
    st.recursive(st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_clean_text_can_be_written_and_is_clean_already(value):
    found = clean(value)
    assert clean(found) == found
    json.dumps(found, ensure_ascii=False).encode("utf-8")


@pytest.mark.parametrize(
    ("task", "family"),
    [
        ("nolima", "nolima"),
        ("nolima_16k", "nolima"),
        ("locos_babilong_qa2_0k", "babilong"),
        ("locos_arithmetic_2da", "arithmetic"),
        ("arithmetic_2da", "arithmetic"),
        ("nolimax", "nolimax"),
        ("hellaswag", "hellaswag"),
    ],
)
def test_families_by_name(task, family):
    assert family_of(task) == family


def test_numbers_as_text():
    assert fixed(-0.0001) == "0.000"
    assert fixed(-0.25, 1) == "−0.2"
    assert fixed(None) == "–"
    assert percent(0.615) == "61.5%"
    assert percent(-0.024) == "−2.4%"
    assert p_value(0.0909) == "0.091"
    assert p_value(3e-6) == "<0.0001"
    assert p_value(None) == "–"
