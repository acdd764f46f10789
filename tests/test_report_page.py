"""The page and the figures of `locos report`."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_files import (
    METRIC,
    binary,
    documents,
    sample,
    study,
    uniform,
    write_ranking,
    write_run,
)

from lm_eval_locos.cli import report
from lm_eval_locos.reporting.best_k import best_k
from lm_eval_locos.reporting.cards import cards, headlines
from lm_eval_locos.reporting.details import examples, most_specific, surface
from lm_eval_locos.reporting.figure_list import figure_list, unreadable_rankings
from lm_eval_locos.reporting.html import page
from lm_eval_locos.reporting.leaderboard import leaderboard
from lm_eval_locos.reporting.plots import slug
from lm_eval_locos.reporting.results import load
from lm_eval_locos.reporting.text import percent

VOID = set("area base br col embed hr img input link meta source track wbr".split())
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return study(tmp_path_factory.mktemp("study"), ks=(5, 20), seeds=2, n=20, bundled=True)


@pytest.fixture(scope="module")
def board(folder):
    return leaderboard(load([folder]), resamples=200)


@pytest.fixture(scope="module")
def text(board):
    return page(board)


class Tree(HTMLParser):
    """Checks that elements nest, and gathers what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), (tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)


def test_the_page_is_well_formed_and_needs_nothing_from_elsewhere(text):
    tree = Tree(text)
    ids = [attrs["id"] for _, attrs in tree.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in tree.tags:
        for name in ("href", "src", "xlink:href", "srcset", "action", "data"):
            assert str(attrs.get(name, "#")).startswith(("#", "data:image/png"))
        for link in re.findall(r"url\((.*?)\)", str(attrs)):
            assert link.startswith("#")
            assert link[1:] in ids
        assert not any(name.startswith("on") for name in attrs)
    assert not re.search(r"@import|url\((?!#)", text)
    assert [tag for tag, _ in tree.tags if tag in ("link", "iframe", "object", "embed")] == []


def test_the_policy_lets_only_the_pages_own_script_run(text):
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_the_table_has_every_row_and_number(board, text):
    body = text[text.index("<tbody>") : text.index("</tbody>")]
    rows = re.findall(r"<tr class.*?</tr>", body, flags=re.S)
    assert len(rows) == len(board.rows)
    heads = re.findall(r"data-name=\"([\w-]+)\"", text)
    for row, shown in zip(board.rows, rows, strict=True):
        values = [
            re.search(r'data-value="(.*?)"', cell)
            for cell in re.findall(r"<t[hd]\b.*?>", shown, flags=re.S)
        ]
        assert len(values) == len(heads)
        found = {
            name: value[1] for name, value in zip(heads, values, strict=True) if value is not None
        }
        assert int(found["k"]) == row.k
        for family, cell in row.cells.items():
            assert float(found[family]) == cell.score.value
        if row.specificity and row.specificity.value is not None:
            assert float(found["specificity"]) == row.specificity.value


def test_sections(board, text):
    words = " ".join(Tree(text).words)
    for heading in (
        "Leaderboard",
        "Scores by heads ablated",
        "Specificity by heads ablated",
        "Where the heads are",
        "NoLiMa by length and depth",
        "Answers before and after",
        "Provenance",
        "Not the benchmark",
    ):
        assert heading in words
    for run in board.runs:
        assert run.path in words
        assert run.sha256 in words
    assert "0123abc" in words  # the data's revision
    assert text.count("<svg") == len(figure_list(board))
    assert "bundled sample" in text[text.index("<tbody>") - 4000 : text.index("<tbody>")]


def test_examples_show_answers_before_and_after(board, text):
    row = most_specific(board)[0]
    found = examples(row.cells["nolima"])
    assert found[0].change == "lost"
    assert found[0].before.startswith("It is Answer")
    assert found[0].after == "I cannot tell."
    assert found[0].question in text
    assert found[0].scores == (1.0, 0.0)


# -- the cards -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def null(tmp_path_factory):
    """Twelve k of a ranking with no effect: a different tenth of the answers is lost at each."""
    folder = tmp_path_factory.mktemp("null")
    ranking = write_ranking(folder / "locos.json")
    families = ("nolima", "musique", "parametric", "arithmetic")
    for number in range(13):
        condition = f"top:{number}" if number else None
        tasks = {
            family: [
                sample(doc, METRIC[family], float(uniform(doc["id"], condition) > 0.1))
                for doc in documents(family, 40)
            ]
            for family in families
        }
        write_run(
            folder / "out",
            tasks,
            condition=condition,
            ranking=ranking if condition else None,
            number=number,
        )
    return leaderboard(load([folder / "out"]), resamples=200)


def test_the_headline_is_the_held_out_specificity(null):
    (choice,) = best_k(null)
    (card,) = cards(null, [choice])
    values = [row.specificity.value for row in null.rows if row.kind == "top"]
    held_out = choice.result.specificity
    assert held_out.value < max(values)  # what the card must not hide
    assert card["value"] == percent(held_out.value)
    assert f"MDE {percent(held_out.detectable)}" in card["interval"]
    assert card["name"] == f"locos, k* = {choice.k}"
    assert "chosen on one half of the documents, measured on the other" in card["what"]
    assert f"({choice.documents} documents)" in card["what"]
    assert card["facts"][0][1].startswith(percent(choice.result.retrieval_drop.value))
    said = "Highest of 12 settings on all documents, chosen and measured on the same ones: "
    assert card["remarks"][0].startswith(said)
    assert f", {percent(max(values))} [" in card["remarks"][0]
    words = " ".join(" ".join(Tree(page(null)).words).split())
    top = words[: words.index("A row is a set")]
    for text in (card["value"], card["what"], *card["remarks"]):
        assert text in top
    shown = {headline.row.k for headline in headlines(null, [choice])}
    assert shown == {choice.k}  # its answers are shown too


def test_without_held_out_documents_the_card_says_what_the_number_is(null):
    bare = [
        replace(row, cells={f: replace(cell, pairs=()) for f, cell in row.cells.items()})
        for row in null.rows
    ]
    board = replace(null, rows=tuple(bare))
    assert best_k(board) == []
    (card,) = cards(board, [])
    assert card["value"] == percent(max(r.specificity.value for r in bare if r.specificity))
    assert card["what"] == (
        "specificity, highest of 12 settings on all documents: chosen and measured on the same "
        "ones, so too high on average"
    )
    assert card["remarks"] == ["No held-out number: k* needs sample files (--log_samples)."]
    assert [name for name, _ in card["facts"]][-1] == "p (Holm)"


def test_of_one_setting_nothing_was_chosen(null):
    board = replace(null, rows=tuple(row for row in null.rows if row.k in (0, 5)))
    (card,) = cards(board, best_k(board))
    assert card["name"] == "locos, top:5"
    assert card["what"] == "specificity on all documents"
    assert card["remarks"] == []
    assert [name for name, _ in card["facts"]][-1] == "p (random)"


def test_hostile_text_does_nothing(tmp_path):
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>'\"$x_1$ & ]]> --> \x1b"
    ranking = write_ranking(tmp_path / "r.json")
    docs = documents("nolima", 10)
    for doc in docs:
        doc["question"] = doc["id"] = attack + doc["id"]
        doc["answers"] = [attack]
    for number, (condition, score) in enumerate([(None, 1.0), ("top:2", 0.0), ("top:4", 0.0)]):
        entries = []
        for i, doc in enumerate(docs):
            entry = sample(doc | {"id": f"x_{i}"}, METRIC["nolima"], score, attack)
            entries.append(entry | {"doc": doc})
        write_run(
            tmp_path / "out",
            {"nolima": entries},
            condition=condition,
            ranking=ranking if condition else None,
            method=attack,
            number=number,
            change=lambda content: content.update(model_name=attack),
        )
    board = leaderboard(load([tmp_path / "out"]), resamples=200)
    tree = Tree(page(board))
    tags = [tag for tag, _ in tree.tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    shown = " ".join(tree.words)
    assert shown.count("<script>alert(1)</script>") > 5
    assert any("$x_1$" in word for word in tree.words)


# -- figures -------------------------------------------------------------------------------


def test_which_figures_there_are(board):
    names = [plot.name for plot in figure_list(board)]
    assert len(names) == len(set(names))
    by_section = dict.fromkeys(("scores", "specificity", "heads", "nolima"), 0)
    for plot in figure_list(board):
        by_section[plot.section] += 1
    # Five families; two rankings; a baseline and two k of two rankings.
    assert by_section == {"scores": 5, "specificity": 1, "heads": 2, "nolima": 5}


def test_figures_are_written_as_png_and_svg(board, folder, tmp_path, capsys):
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    words = ["report", str(folder), "--resamples", "200", "--plots", str(tmp_path / "p")]
    arguments = parser.parse_args(words)
    arguments.run(arguments)
    expected = {f"{p.name}{s}" for p in figure_list(board) for s in (".png", ".svg")}
    assert {path.name for path in (tmp_path / "p").iterdir()} == expected
    for path in (tmp_path / "p").iterdir():
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
        else:
            assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    capsys.readouterr()


def test_a_figure_is_the_same_every_time_and_takes_the_pages_ink(board):
    plot = figure_list(board)[0]
    svg = plot.svg()
    assert svg == figure_list(board)[0].svg()
    assert "currentColor" in svg
    assert "var(--rule)" in svg
    assert "#ffffff" not in svg
    assert "NoLiMa" in svg  # text is text
    ET.fromstring(svg)


def test_one_k_has_no_curves(tmp_path):
    out = study(tmp_path, ks=(5,), methods=("locos",), seeds=0, n=10)
    board = leaderboard(load([out]), resamples=200)
    assert {plot.section for plot in figure_list(board)} == {"heads", "nolima"}
    assert "Scores by heads ablated" not in page(board)


def test_a_ranking_that_has_changed_is_not_drawn(tmp_path):
    out = study(tmp_path, ks=(5,), methods=("locos",), seeds=0, n=10)
    board = leaderboard(load([out]), resamples=200)
    assert unreadable_rankings(board) == []
    path = tmp_path / "locos.json"
    path.write_text(path.read_text() + "\n")
    assert "sha256 differs" in unreadable_rankings(board)[0]
    path.unlink()
    assert "cannot be read" in unreadable_rankings(board)[0]
    assert {plot.section for plot in figure_list(board)} == {"nolima"}
    assert "cannot be read" in page(board)


def test_means_by_length_and_depth(tmp_path):
    write_run(tmp_path, {"nolima": binary("nolima", 50, 0.7)})
    samples = load([tmp_path])[0].tasks["nolima"].samples
    found = surface(samples, "contains")
    assert found.lengths == (1000, 4750, 8500, 12250, 16000)
    assert found.depths == (0, 25, 50, 75, 100)
    for i, depth in enumerate(found.depths):
        for j, length in enumerate(found.lengths):
            here = [s for s in samples if (s.depth, s.length) == (depth, length)]
            assert found.counts[i][j] == len(here) == 2
            assert found.means[i][j] == sum(s.scores["contains"] for s in here) / 2
    assert surface([], "contains") is None


def test_file_names():
    assert slug("scores", "org/model 1b", "", None, "../x") == "scores-org-model-1b-..-x"
    assert "/" not in slug("a/b\\c", "../../etc")
    assert len(slug("x" * 500)) <= 120
    assert slug("???") == "figure"


# -- in a browser --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browse(text, tmp_path_factory):
    """Opens the page headless; returns its DOM and what the console said."""
    if not BROWSER:
        pytest.skip("no Chromium (apt-get install chromium)")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "report.html").write_text(text, encoding="utf-8")
    broken = text.replace('"use strict";', '"use strict"; missing();')
    (folder / "broken.html").write_text(broken, encoding="utf-8")

    def run(
        fragment: str = "", *options: str, name: str = "report", content: str | None = None
    ) -> tuple[str, str]:
        if content is not None:
            name = "other"
            (folder / "other.html").write_text(content, encoding="utf-8")
        done = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={folder / 'profile'}",
                "--enable-logging=stderr",
                "--virtual-time-budget=2000",
                *(options or ("--dump-dom",)),
                f"{(folder / f'{name}.html').as_uri()}{fragment}",
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"Chromium does not run here: {done.stderr.strip().splitlines()[-1:]}")
        console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
        return done.stdout, "\n".join(console)

    return run


def column(dom: str, number: int) -> list[float | None]:
    body = dom[dom.index("<tbody>") : dom.index("</tbody>")]
    found = []
    for row in re.findall(r"<tr class.*?</tr>", body, flags=re.S):
        value = re.search(
            r'data-value="(.*?)"', re.findall(r"<t[hd]\b.*?>", row, flags=re.S)[number]
        )
        found.append(float(value[1]) if value else None)
    return found


@pytest.mark.parametrize("direction", ["ascending", "descending"])
def test_the_table_is_sorted_in_a_browser(browse, text, direction):
    names = re.findall(r"data-name=\"([\w-]+)\"", text)
    number = names.index("specificity")
    before = column(text, number)
    dom, console = browse(f"#sort=specificity:{direction}")
    assert console == ""
    after = column(dom, number)
    known = sorted((v for v in before if v is not None), reverse=direction == "descending")
    assert after == known + [None] * before.count(None)
    assert after != before
    assert dom.count(f'<th scope="col" aria-sort="{direction}"') == 1


def test_the_page_has_no_errors_and_a_browser_keeps_its_elements(browse, text):
    dom, console = browse()
    assert console == ""
    for tag in ("svg", "table", "tr", "figure", "details", "article"):
        assert dom.count(f"<{tag}") == text.count(f"<{tag}")
    assert json.dumps(column(dom, 1)) == json.dumps(column(text, 1))


def test_another_script_would_be_refused_and_the_console_would_say_so(browse):
    _, console = browse(name="broken")
    assert "Content Security Policy" in console


def test_the_page_can_be_printed(browse, tmp_path):
    browse("", f"--print-to-pdf={tmp_path / 'page.pdf'}")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(("width", "wider"), [(1280, False), (700, True)])
def test_a_table_that_does_not_fit_says_so(browse, width, wider):
    dom, _ = browse("", f"--window-size={width},900", "--dump-dom")
    hint = re.search(r'<p class="hint" id="wider"(.*?)>', dom)[1]
    assert ("hidden" not in hint) == wider


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="no pdftotext (poppler-utils)")
@pytest.mark.parametrize("above", [0, 160])
def test_a_heading_is_printed_on_the_page_of_its_first_chart(browse, text, tmp_path, above):
    place = '<section id="scores"'
    assert text.count(place) == 1
    moved = text.replace(place, f'<div style="height:{above}mm"></div>{place}')
    browse("", f"--print-to-pdf={tmp_path / 'page.pdf'}", content=moved)
    done = subprocess.run(
        ["pdftotext", "-layout", tmp_path / "page.pdf", "-"],
        capture_output=True,
        text=True,
        check=True,
    )
    starts = {
        "Leaderboard": "baseline",
        "Scores by heads ablated": "NoLiMa score by heads",
        "Specificity by heads ablated": "Specificity by heads ablated, org",
        "NoLiMa by length and depth": "NoLiMa by context length",
    }
    for heading, first in starts.items():
        pages = [p for p in done.stdout.split("\f") if re.search(rf"^ *{heading}$", p, flags=re.M)]
        assert len(pages) == 1
        assert first in pages[0][pages[0].index(heading) + len(heading) :]
