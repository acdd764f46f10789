"""``locos heads``: what it prints, what it refuses, and the heatmap."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

from lm_eval_locos import figures
from lm_eval_locos.architecture import Head
from lm_eval_locos.cli import heads
from lm_eval_locos.errors import LocosError, RankingError
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.ranking_stats import compare, intervals, stability

META = {
    "method": "locos",
    "model": "a/model [bundled sample]",
    "revision": "abc123",
    "fingerprint": {"num_layers": 3, "num_heads": 4, "vocab_size": 10},
    "dataset": "nolima",
    "split": "detection",
    "seed": 42,
    "num_trials_total": 9,
    "num_trials_passed": 5,
    "pooled_ans_steps": 8,
    "plugin_version": "0.1.0",
}


def made(seed=0, trials=5, **changes):
    """A ranking of 3 x 4 heads, one of them without a score."""
    generator = np.random.default_rng(seed)
    scores = {
        Head(i, j): tuple((generator.normal(size=trials) + i - 1).tolist())
        for i in range(3)
        for j in range(4)
    }
    scores[Head(0, 2)] = ()
    given = {"meta": META, "answer_steps": (1, 2, 1, 3, 1)[:trials]} | changes
    return HeadRanking(scores, **given)


@pytest.fixture
def files(tmp_path, monkeypatch):
    """a.json and b.json in the working folder."""
    monkeypatch.chdir(tmp_path)
    made(0).save("a.json")
    made(1).save("b.json")
    return tmp_path


def run(*arguments):
    parser = argparse.ArgumentParser()
    heads.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["heads", *map(str, arguments)])
    assert not parsed.run(parsed)


def printed(capsys):
    return json.loads(capsys.readouterr().out)


def test_show_lists_the_top_with_what_the_bootstrap_says(files, capsys):
    run("show", "a.json", "--top", 4, "--k", 3, "--json", "--resamples", 50, "--seed", 7)
    shown = printed(capsys)
    ranking = HeadRanking.load("a.json")
    ends = intervals(ranking, resamples=50, seed=7)
    stable = stability(ranking, 3, resamples=50, seed=7)
    assert shown["heads"] == [
        {
            "rank": rank,
            "head": str(head),
            "score": ranking.pooled[head],
            "interval": list(ends[head]),
            "in_top_k": stable.share[head],
        }
        for rank, head in enumerate(ranking.top(4), start=1)
    ]
    expected = {
        "path": "a.json",
        "sha256": ranking.sha256,
        "model": META["model"],
        "trials_passed": 5,
        "trials_total": 9,
        "answer_steps": 8,
        "heads_scored": 11,
        "heads_named": 12,
        "bootstrap": {"resamples": 50, "seed": 7},
        "k": 3,
        "stability": stable.mean,
        "interval_source": "bootstrap",
        "heatmap": None,
    }
    assert {key: shown[key] for key in expected} == expected


def test_show_as_a_table(files, capsys):
    run("show", "a.json", "--top", 5)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    facts = dict(line.split("  ", 1) for line in lines[: lines.index("")])
    facts = {label: text.strip() for label, text in facts.items()}
    ranking = HeadRanking.load("a.json")
    assert facts == {
        "file": "a.json",
        "method": "locos",
        "model": "a/model [bundled sample], revision abc123",
        "data": "nolima, split detection, seed 42",
        "trials": "5 of 9 passed",
        "answer steps": "8",
        "heads": "11 of 12 have a score",
        "sha256": ranking.sha256[:12],
        "lm-eval-locos": "0.1.0",
    }
    rows = [line.split() for line in lines[lines.index("") + 1 :]]
    assert rows[0] == "rank head score 95% interval in top 5".split()
    assert [row[:2] for row in rows[1:6]] == [
        [str(rank), str(head)] for rank, head in enumerate(ranking.top(5), start=1)
    ]
    assert float(rows[1][2]) == pytest.approx(ranking.pooled[ranking.order[0]], abs=1e-4)
    assert rows[1][5].endswith("%")
    assert lines[-2] == ("Intervals: percentile bootstrap, 1000 resamples of the trials, seed 0.")
    assert lines[-1].startswith(
        f"Stability: a resample keeps {stability(ranking, 5).mean:.1%} of the top 5 on average"
    )


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({"num_trials_scored": 9, "num_trials_passed": 1}, "9 trials scored, 1 passed"),
        ({"num_trials_scored": 9, "num_trials_passed": 0}, "9 trials scored, 0 passed"),
        ({"num_trials_scored": 5}, "5 of 9 passed"),
        ({}, "5 of 9 passed"),
    ],
)
def test_how_many_trials_were_scored(files, capsys, counts, said):
    made(meta=META | counts).save("c.json")
    run("show", "c.json")
    assert f"trials         {said}" in capsys.readouterr().out.replace("  \n", "\n")
    run("show", "c.json", "--json")
    assert printed(capsys)["trials_scored"] == counts.get("num_trials_scored")


def test_the_adapter_is_shown(files, capsys):
    made(meta=META | {"peft": "my/adapter"}).save("c.json")
    run("show", "c.json")
    shown = capsys.readouterr().out
    assert "a/model [bundled sample], adapter my/adapter, revision abc123" in shown
    run("show", "c.json", "--json")
    assert printed(capsys)["peft"] == "my/adapter"


def test_intervals_in_the_file_come_first_and_the_note_says_so(files, capsys):
    top = made().order[0]
    made(confidence_intervals={top: (-1.0, 7.5)}).save("c.json")
    run("show", "c.json", "--json")
    shown = printed(capsys)
    assert shown["interval_source"] == "file"
    assert [row["interval"] for row in shown["heads"]] == [[-1.0, 7.5]] + [None] * 10
    run("show", "c.json")
    text = capsys.readouterr().out
    assert "Intervals: as recorded in the file." in text
    assert "[-1.0000, 7.5000]" in text


@pytest.mark.parametrize("ends", [(1.0,), (2.0, 1.0), (0.0, 1.0, 2.0)])
def test_an_interval_in_the_file_that_is_none(files, ends):
    made(confidence_intervals={Head(1, 1): ends}).save("c.json")
    with pytest.raises(RankingError, match=r"c.json: .*head 1-1 is .*Expected \[low, high\]"):
        run("show", "c.json")


def test_wus_form_shows_only_what_it_knows(files, capsys):
    (files / "wu.json").write_text(json.dumps({"10-11": [0.5, 0.25], "0-1": [0.0, 0.0]}))
    run("show", "wu.json")
    text = capsys.readouterr().out
    labels = [line.split("  ")[0] for line in text.splitlines()]
    assert labels[:5] == ["file", "trials", "heads", "sha256", ""]
    assert "10-11" in text
    assert "0.37500" in text


def test_one_trial_and_uneven_lists_have_no_intervals(files, capsys, caplog):
    made(trials=1).save("one.json")
    run("show", "one.json")
    text = capsys.readouterr().out
    assert "No intervals: there is only one trial." in text
    assert "%" not in text.split("95% interval")[1]
    assert not caplog.records
    (files / "uneven.json").write_text(json.dumps({"0-0": [1, 2], "0-1": [5]}))
    run("show", "uneven.json", "--json")
    shown = printed(capsys)
    assert [row["head"] for row in shown["heads"]] == ["0-1", "0-0"]
    assert (shown["stability"], shown["interval_source"]) == (None, None)
    assert "head 0-1 has 1 scores and head 0-0 has 2" in caplog.text


def test_without_a_terminal_nothing_is_cut(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    name = "x" * 300
    (files / "long.json").write_text(
        json.dumps({"meta": {"model": name}, "scores": {"1234-5678": [1, 2]}})
    )
    run("show", "long.json")
    text = capsys.readouterr().out
    assert name in text
    assert "1234-5678" in text
    assert "\x1b" not in text
    assert text.isascii()


def test_compare_reports_both_files(files, capsys):
    run("compare", "a.json", "b.json", "--k", 4, "--json", "--resamples", 30)
    shown = printed(capsys)
    a, b = HeadRanking.load("a.json"), HeadRanking.load("b.json")
    expected = compare(a, b, 4)
    for key in ("k", "overlap", "jaccard", "spearman", "common"):
        assert shown[key] == getattr(expected, key)
    for name, ranking, only in (("a", a, expected.only_a), ("b", b, expected.only_b)):
        assert shown[name]["sha256"] == ranking.sha256
        assert shown[name]["stability"] == stability(ranking, 4, resamples=30).mean
        assert only
        assert shown[name]["only"] == [
            {"head": str(one.head), "rank": one.rank, "other_rank": one.other_rank} for one in only
        ]
    assert shown["warnings"] == []


def test_compare_as_a_table(files, capsys):
    run("compare", "a.json", "b.json", "--k", 4)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    found = compare(HeadRanking.load("a.json"), HeadRanking.load("b.json"), 4)
    assert f"overlap         {found.overlap} of the top 4 ({found.overlap / 4:.1%})" in lines
    assert f"Spearman        {found.spearman:.3f} over the 11 heads that both score" in lines
    assert sum(line.startswith("stability of ") for line in lines) == 2
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        start = lines.index(f"Only in the top 4 of {name}:") + 2
        assert [line.split() for line in lines[start : start + len(only)]] == [
            [str(one.head), str(one.rank), str(one.other_rank)] for one in only
        ]


def test_compare_with_itself(files, capsys):
    run("compare", "a.json", "a.json", "--k", 11)
    text = capsys.readouterr().out
    assert "11 of the top 11 (100.0%)" in text
    assert "1.000 over the 11 heads" in text
    assert "Only in" not in text


def test_compare_by_default_names_the_largest_k(files):
    with pytest.raises(RankingError, match=r"k=50, .*11 heads. The largest k is 11"):
        run("compare", "a.json", "b.json")
    with pytest.raises(RankingError, match=r"k=12, .*11 heads. The largest k is 11"):
        run("show", "a.json", "--k", 12)


def test_other_fingerprints_warn_and_other_sizes_are_refused(files, capsys, caplog):
    fingerprint = META["fingerprint"] | {"vocab_size": 11}
    made(meta=META | {"fingerprint": fingerprint}).save("vocab.json")
    with caplog.at_level(logging.WARNING):
        run("compare", "a.json", "vocab.json", "--k", 3, "--json")
    assert printed(capsys)["warnings"] == ["vocab_size differs: 10 and 11"]
    assert "a.json and vocab.json: vocab_size differs: 10 and 11" in caplog.text
    made(meta=META | {"fingerprint": META["fingerprint"] | {"num_layers": 4}}).save("deep.json")
    with pytest.raises(RankingError, match=r"a.json has num_layers 3 and deep.json has num_layers"):
        run("compare", "a.json", "deep.json", "--k", 3)


@pytest.mark.parametrize("option", [("--top", "0"), ("--k", "-1"), ("--seed", "x"), ("--k", "1.5")])
def test_numbers_that_are_none(option, capsys):
    with pytest.raises(SystemExit) as ended:
        run("show", "a.json", *option)
    assert ended.value.code == 2
    assert f"{option[1]!r} is not a whole number" in capsys.readouterr().err


def test_as_a_command(files):
    def locos(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "lm_eval_locos.cli", *arguments],
            capture_output=True,
            text=True,
            env=os.environ | {"MPLCONFIGDIR": str(files)},
        )

    shown = locos("heads", "show", "a.json", "--top", "3", "--heatmap", "out/heads.png")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.rstrip().endswith("Heatmap: out/heads.png")
    assert imread(files / "out" / "heads.png").ndim == 3
    assert [file.name for file in (files / "out").iterdir()] == ["heads.png"]
    missing = locos("heads", "compare", "a.json", "none.json")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("locos: heads=none.json: cannot be read")
    explained = locos("heads", "show", "--help")
    assert "locos heads show out/locos.json --top 50 --heatmap heads.png" in explained.stdout


# -- the heatmap ---------------------------------------------------------------------------


def near(picture, colour, tolerance=0.02):
    """Number of pixels of about that RGB colour."""
    return int((np.abs(picture[..., :3] - colour).max(axis=-1) < tolerance).sum())


def test_the_heatmap_shows_scores_of_both_signs_and_the_lack_of_one(files):
    scores = {Head(0, 0): (2.0,), Head(0, 1): (-2.0,), Head(1, 0): (0.0,), Head(1, 1): ()}
    figures.heatmap(HeadRanking(scores), "a.png")
    picture = imread("a.png")
    height, width = picture.shape[:2]
    assert min(height, width) > 300
    cell = 0.01 * height * width
    for score in (1.0, 0.0, -1.0):
        assert near(picture, figures._COLOURS((score + 1) / 2)[:3]) > cell
    assert near(picture, (0xDE / 255,) * 3) > cell / 2
    # Layer 0 is below layer 1: red is in the lower half, white in the upper.
    red = np.abs(picture[..., :3] - figures._COLOURS(1.0)[:3]).max(axis=-1) < 0.02
    rows = np.nonzero(red[:, : width // 2])[0]
    assert rows.mean() > height / 2


def test_marks_are_drawn(files):
    ranking = made()
    figures.heatmap(ranking, "plain.png", title="t")
    figures.heatmap(ranking, "marked.png", marked=ranking.top(3), title="t")
    plain, marked = imread("plain.png"), imread("marked.png")
    black = (0x11 / 255,) * 3
    assert near(marked, black) > near(plain, black) + 500


def test_the_colours_are_centred_on_zero_and_the_bar_is_cut_to_the_scores(files):
    scores = np.array([[0.5, 2.0], [np.nan, -1.0]])
    figure = figures._draw(scores, "logits", [Head(0, 1)], "top 1", "title")
    axes, bar = figure.axes
    (image,) = axes.images
    assert (image.norm.vmin, image.norm.vmax) == (-2, 2)
    assert bar.get_ylim() == (-1, 2)
    assert bar.get_ylabel() == "logits"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("head", "layer")
    assert axes.get_ylim() == (-0.5, 1.5)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["top 1", "no score"]


@pytest.mark.parametrize(("layers", "heads_"), [(1, 1), (30, 9), (100, 128), (2, 400)])
def test_few_ticks_whatever_the_size(layers, heads_):
    figure = figures._draw(np.zeros((layers, heads_)), "score", [], "", "x" * 500)
    figure.canvas.draw()
    axes = figure.axes[0]
    for ticks, limit in ((axes.get_xticks(), heads_), (axes.get_yticks(), layers)):
        inside = [tick for tick in ticks if 0 <= tick < limit]
        assert 0 in inside
        assert len(inside) <= 12
        assert all(tick == int(tick) for tick in inside)
    assert max(figure.get_size_inches()) < 10


def test_the_grid_is_the_models_where_the_file_knows_it():
    scores = {Head(1, 2): (4.0,), Head(0, 0): ()}
    known = figures.grid(HeadRanking(scores, {"fingerprint": {"num_layers": 5, "num_heads": 6}}))
    assert known.shape == (5, 6)
    assert known[1, 2] == 4
    assert np.isnan(known).sum() == 29
    assert figures.grid(HeadRanking(scores)).shape == (2, 3)


@pytest.mark.parametrize(
    ("method", "unit"),
    [("locos", "logits"), ("logit_contribution", "logits"), ("dla", "logits"), ("wu", "score")],
)
def test_units(method, unit):
    assert figures.unit(HeadRanking({Head(0, 0): (1.0,)}, {"method": method})) == unit


def test_svg_and_other_suffixes(files, capsys):
    run("show", "a.json", "--heatmap", "heads.SVG")
    assert "<svg" in (files / "heads.SVG").read_text()
    for name in ("heads.pdf", "heads"):
        with pytest.raises(LocosError, match=rf"{name}: figures are written as .png or .svg, not "):
            run("show", "a.json", "--heatmap", name)
        assert not (files / name).exists()


def test_what_cannot_be_drawn_or_written(files):
    ranking = made()
    with pytest.raises(LocosError, match=r"head 3-0 cannot be marked: .* has 3 layers of 4 heads"):
        figures.heatmap(ranking, "a.png", marked=[Head(3, 0)])
    with pytest.raises(LocosError, match="100000001 layers of 1 heads, more than the 1,000,000"):
        figures.heatmap(HeadRanking({Head(10**8, 0): (1.0,)}), "a.png")
    (files / "file").write_text("")
    with pytest.raises(LocosError, match=r"file/a.png: cannot be written \(.+\)"):
        figures.heatmap(ranking, "file/a.png")
    assert sorted(path.name for path in files.iterdir()) == ["a.json", "b.json", "file"]


def test_a_failed_write_leaves_the_old_picture(files, monkeypatch):
    figures.heatmap(made(), "a.png")
    before = (files / "a.png").read_bytes()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(LocosError, match="Permission denied"):
        figures.heatmap(made(3), "a.png")
    assert (files / "a.png").read_bytes() == before
    assert [path.name for path in files.glob("*a.png*")] == ["a.png"]


def test_no_global_state(files):
    code = (
        "import sys; from lm_eval_locos import figures; from lm_eval_locos.ranking import *;"
        "figures.heatmap(HeadRanking.load('a.json'), 'a.png');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
