"""k*: chosen on one half of the documents, reported on the other."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from report_files import study

from lm_eval_locos.reporting.best_k import best_k, in_development
from lm_eval_locos.reporting.grid import notes
from lm_eval_locos.reporting.leaderboard import leaderboard
from lm_eval_locos.reporting.results import load
from lm_eval_locos.reporting.tables import to_json


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    folder = study(tmp_path_factory.mktemp("study"), ks=(1, 5, 20), seeds=0, n=40)
    return leaderboard(load([folder]), resamples=200)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def by_hand(row, development):
    """Specificity from the pairs themselves; no half of a family may be empty here."""
    drops = {"retrieval": [], "control": []}
    for family, cell in row.cells.items():
        half = [p for p in cell.pairs if in_development(family, p[0].cluster) == development]
        before, after = (mean(pair[i].scores[cell.metric] for pair in half) for i in (0, 1))
        side = "control" if family in ("parametric", "arithmetic") else "retrieval"
        drops[side].append((before - after) / before)
    return mean(drops["retrieval"]) - mean(drops["control"])


def test_chosen_on_one_half_and_reported_on_the_other(board):
    choices = best_k(board)
    assert sorted(choice.ranking for choice in choices) == ["locos", "wu"]
    for choice in choices:
        rows = {
            row.k: row for row in board.rows if (row.ranking, row.kind) == (choice.ranking, "top")
        }
        expected = {k: by_hand(row, True) for k, row in rows.items()}
        assert choice.development == pytest.approx(expected)
        assert choice.k == max(expected, key=expected.get)
        assert choice.result.specificity.value == pytest.approx(by_hand(rows[choice.k], False))
        assert choice.result.specificity.interval is not None
        everything = sum(len(cell.pairs) for cell in rows[choice.k].cells.values())
        assert 0 < choice.documents < everything


def test_halves_do_not_share_clusters_and_do_not_depend_on_the_row(board):
    halves = {}
    for row in board.rows:
        for family, cell in row.cells.items():
            for before, _ in cell.pairs:
                key = (family, before.cluster)
                assert halves.setdefault(key, in_development(*key)) == in_development(*key)
    assert 0.3 < mean(halves.values()) < 0.7


def test_where_it_is_shown(board):
    line = next(note for note in notes(board) if note.startswith("k* of locos"))
    choice = next(choice for choice in best_k(board) if choice.ranking == "locos")
    assert f"k* of locos = {choice.k}," in line
    assert f"({choice.documents} documents)" in line
    stars = json.loads(to_json(board))["k_star"]
    assert {star["ranking"]: star["k"] for star in stars} == {c.ranking: c.k for c in best_k(board)}


def test_none_with_one_k_or_without_samples(board):
    one = replace(board, rows=tuple(row for row in board.rows if row.k in (0, 5)))
    assert best_k(one) == []
    bare = [
        replace(row, cells={f: replace(cell, pairs=()) for f, cell in row.cells.items()})
        for row in board.rows
    ]
    assert best_k(replace(board, rows=tuple(bare))) == []
