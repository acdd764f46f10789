"""`locos compare`: numbers against computation by hand, pairing, refusals, the command."""

from __future__ import annotations

import argparse
import io
import json
import math
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_files import binary, documents, sample, write_ranking, write_run
from rich.console import Console

from lm_eval_locos.cli import compare as command
from lm_eval_locos.comparison import compare
from lm_eval_locos.errors import DataError, LocosError
from lm_eval_locos.reporting.results import load

METRIC = {"nolima": "contains", "musique": "acc", "arithmetic": "exact_match"}
TASK = {"nolima": "nolima", "musique": "musique", "arithmetic": "locos_arithmetic"}


def entries(family: str, scores: list[float], *, alone: bool = True) -> list[dict]:
    """Samples with these scores; `alone` makes every document its own cluster."""
    docs = documents(family, len(scores))
    if alone:
        docs = [doc | {"cluster": doc["id"]} for doc in docs]
    return [sample(doc, METRIC[family], score) for doc, score in zip(docs, scores, strict=True)]


def runs(tmp_path, first: dict[str, list[dict]], second: dict[str, list[dict]], **options):
    """Two results files, the second of another model by default."""
    paths = [
        write_run(tmp_path / "a", first, **options.get("a", {})),
        write_run(tmp_path / "b", second, number=1, **options.get("b", {"model": "org/other-2b"})),
    ]
    return [load([path]) for path in paths]


def exact_two_sided(lost: int, gained: int) -> float:
    """Sum of the binomial probabilities that are no larger than that of `lost` of all."""
    n = lost + gained
    weights = [math.comb(n, i) for i in range(n + 1)]
    return sum(w for w in weights if w <= weights[lost]) / 2**n


def test_means_changes_and_p_values_are_those_computed_by_hand(tmp_path):
    a = {"nolima": [1] * 30 + [0] * 10, "musique": [1] * 10 + [0] * 20, "arithmetic": [1, 0] * 15}
    b = {
        "nolima": [0] * 14 + [1] * 16 + [1] * 2 + [0] * 8,  # 14 fall, 2 rise
        "musique": [0] * 3 + [1] * 7 + [1] * 8 + [0] * 12,  # 3 fall, 8 rise
        "arithmetic": [1, 0] * 15,
    }
    found = compare(
        *runs(tmp_path, *({f: entries(f, s) for f, s in side.items()} for side in (a, b))),
        resamples=300,
    )
    assert [one.name for one in found.tasks] == [TASK[family] for family in a]
    p = {"nolima": exact_two_sided(14, 2), "musique": exact_two_sided(3, 8), "arithmetic": 1.0}
    assert p["nolima"] < p["musique"] < 1
    holm = {
        "nolima": 3 * p["nolima"],
        "musique": 2 * p["musique"],
        "arithmetic": 1.0,
    }
    for one, family in zip(found.tasks, a, strict=True):
        assert one.a == pytest.approx(sum(a[family]) / len(a[family]))
        assert one.b == pytest.approx(sum(b[family]) / len(b[family]))
        assert one.change.value == pytest.approx(one.b - one.a)
        change = [y - x for x, y in zip(a[family], b[family], strict=True)]
        ids = [f"{family}_{i}" for i in range(len(change))]
        assert sorted(one.gained) == sorted(i for i, c in zip(ids, change, strict=True) if c > 0)
        assert sorted(one.lost) == sorted(i for i, c in zip(ids, change, strict=True) if c < 0)
        assert one.p == pytest.approx(p[family])
        assert one.p_holm == pytest.approx(holm[family])
        assert one.test == "mcnemar"
        assert one.change.interval.low <= one.change.value <= one.change.interval.high
    assert (found.a.model, found.b.model) == ("org/model-1b", "org/other-2b")
    assert found.notes == ()


def test_the_interval_is_that_of_an_independent_clustered_bootstrap(tmp_path):
    """Against resampling clusters in plain numpy: same ends up to BCa's small correction."""
    rng = np.random.default_rng(5)
    n = 300
    base = rng.random(n)
    before = np.clip(base, 0, 1)
    after = np.clip(base - 0.15 + 0.2 * rng.standard_normal(n), 0, 1)
    a, b = (
        {"nolima": entries("nolima", list(map(float, x)), alone=False)} for x in (before, after)
    )
    (one,) = compare(*runs(tmp_path, a, b), resamples=4000).tasks
    assert (one.documents, one.clusters, one.p) == (n, n // 2, None)
    change = (after - before).reshape(-1, 2).mean(axis=1)  # clusters are pairs of neighbours
    drawn = change[rng.integers(0, len(change), (20_000, len(change)))].mean(axis=1)
    low, high = np.quantile(drawn, [0.025, 0.975])
    width = high - low
    assert one.change.value == pytest.approx(float((after - before).mean()))
    assert one.change.interval.low == pytest.approx(low, abs=0.05 * width)
    assert one.change.interval.high == pytest.approx(high, abs=0.05 * width)
    z = 1.959964 + 0.841621  # of 97.5% and of power 0.8
    assert one.change.detectable == pytest.approx(z * drawn.std(), rel=0.05)


@given(
    scores=st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])), min_size=3)
)
@settings(max_examples=15, deadline=None)
def test_changing_sides_changes_the_sign(tmp_path_factory, scores):
    folder = tmp_path_factory.mktemp("sides")
    a, b = ({"nolima": entries("nolima", [pair[i] for pair in scores])} for i in (0, 1))
    sides = runs(folder, a, b)
    (one,) = compare(*sides, resamples=100).tasks
    (other,) = compare(*sides[::-1], resamples=100).tasks
    assert (one.a, one.b, one.gained, one.lost) == (other.b, other.a, other.lost, other.gained)
    assert one.change.value == -other.change.value
    assert one.p == other.p
    lost, gained = (sum(x - y == sign for x, y in scores) for sign in (1, -1))
    assert one.p == pytest.approx(exact_two_sided(lost, gained) if lost + gained else 1.0)


def test_documents_are_paired_by_hash_and_not_by_place(tmp_path):
    a = entries("nolima", [1, 1, 0, 0, 1, 0])
    b = entries("nolima", [1, 0, 0, 0, 1, 1])
    (one,) = compare(*runs(tmp_path, {"nolima": a}, {"nolima": b[::-1]}), resamples=100).tasks
    assert (one.gained, one.lost) == (("nolima_5",), ("nolima_1",))


def test_a_document_without_a_score_is_left_out_and_counted(tmp_path):
    a, b = entries("nolima", [1, 1, 0, 0]), entries("nolima", [1, 0, 0, 0])
    del b[1]["contains"]
    (one,) = compare(*runs(tmp_path, {"nolima": a}, {"nolima": b}), resamples=100).tasks
    assert (one.documents, one.skipped, one.a, one.lost) == (3, 1, pytest.approx(1 / 3), ())


def test_different_documents_are_refused_with_how_many_and_an_example(tmp_path):
    a, b = entries("nolima", [1] * 5), entries("nolima", [1] * 7)
    with pytest.raises(DataError, match="different documents: 0 of 5 are only in A, 2 of 7") as e:
        compare(*runs(tmp_path, {"nolima": a}, {"nolima": b}))
    assert "nolima_5 only in B" in str(e.value) or "nolima_6 only in B" in str(e.value)


def test_other_prompts_are_noted(tmp_path):
    a, b = entries("nolima", [1, 0] * 4), entries("nolima", [1, 1] * 4)
    for entry in b[:3]:
        entry["prompt_hash"] = "another"
    template = {"model": "org/b", "change": lambda c: c.update(chat_template_sha="f00")}
    found = compare(*runs(tmp_path, {"nolima": a}, {"nolima": b}, b=template), resamples=100)
    (note,) = found.notes
    assert note.startswith("nolima: different in A and B: chat template ")
    assert "the prompts of 3 of 8 documents" in note


def test_tasks_and_metrics_that_one_side_lacks_are_noted(tmp_path):
    a = {"nolima": entries("nolima", [1, 0] * 4), "musique": entries("musique", [1, 0] * 4)}
    b = {"nolima": entries("nolima", [1, 1] * 4), "arithmetic": entries("arithmetic", [1] * 4)}
    sides = runs(tmp_path, a, b)
    found = compare(*sides, resamples=100)
    assert found.notes == ("only in A: musique.", "only in B: locos_arithmetic.")
    with pytest.raises(DataError, match=r"nothing to compare: .* nolima has no f1; it has con"):
        compare(*sides, metric="f1")
    with pytest.raises(DataError, match="no task is in both runs: A has musique, B has locos_arit"):
        compare(
            *runs(tmp_path / "none", {"musique": a["musique"]}, {"arithmetic": b["arithmetic"]})
        )


def test_a_metric_that_is_no_share_is_left_out(tmp_path):
    a, b = entries("nolima", [12.0, 15.0]), entries("nolima", [11.0, 16.0])
    with pytest.raises(DataError, match="contains has scores outside 0 to 1"):
        compare(*runs(tmp_path, {"nolima": a}, {"nolima": b}))


def test_without_sample_files_it_says_how_to_get_them(tmp_path):
    a = {"nolima": entries("nolima", [1, 0])}
    with pytest.raises(DataError, match=r"nolima: no sample file beside .*--log_samples"):
        compare(*runs(tmp_path, a, a, b={"samples": False}))


def test_a_folder_of_several_runs_is_refused(tmp_path):
    ranking = write_ranking(tmp_path / "locos.json")
    a = {"nolima": entries("nolima", [1, 0])}
    write_run(tmp_path / "out", a)
    write_run(tmp_path / "out", a, condition="top:20", ranking=ranking, number=1)
    both = load([tmp_path / "out"])
    with pytest.raises(DataError, match=r"A holds 2 runs: .*\(baseline\); .*\(top:20\)"):
        compare(both, both)


def test_one_cluster_has_no_interval_and_says_so(tmp_path):
    a, b = entries("nolima", [1, 0], alone=False), entries("nolima", [0, 0], alone=False)
    (one,) = compare(*runs(tmp_path, {"nolima": a}, {"nolima": b}), resamples=100).tasks
    assert one.change.interval is None
    assert one.change.value == -0.5
    assert "1 cluster: no interval" in one.change.reason


# -- the command -----------------------------------------------------------------------------

CODE = """
import argparse, sys
from lm_eval_locos.cli import compare
from lm_eval_locos.errors import LocosError
parser = argparse.ArgumentParser(prog="locos")
compare.add_parser(parser.add_subparsers(required=True))
arguments = parser.parse_args()
try:
    sys.exit(arguments.run(arguments))
except LocosError as error:
    print(f"locos: {error}", file=sys.stderr)
    sys.exit(2)
"""


@pytest.fixture
def files(tmp_path):
    ranking = write_ranking(tmp_path / "locos.json")
    base = {family: binary(family, 40, 0.7) for family in METRIC}
    lost = dict(base)
    lost["nolima"] = [sample(e["doc"], "contains", 0.0) for e in base["nolima"]]
    return (
        write_run(tmp_path / "out", base, bundled=True),
        write_run(tmp_path / "out", lost, condition="top:20", ranking=ranking, number=1),
    )


def test_the_command_prints_a_table(files, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, "compare", *map(str, files), "--resamples", "200"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0][:4] == ["A", "org/model-1b,", "baseline,", str(files[0])]
    assert lines[1][:4] == ["B", "org/model-1b,", "locos", "top:20,"]
    nolima = next(line for line in lines if line[:1] == ["nolima"])
    right = sum(e["contains"] for e in binary("nolima", 40, 0.7))
    assert nolima[:3] == ["nolima", "[bundled", "sample]"]
    assert nolima[3:8] == ["contains", "40", f"{right / 40:.3f}", "0.000", f"-{right / 40:.3f}"]
    assert nolima[10:12] == ["0", f"{right:.0f}"]


@pytest.mark.parametrize("width", [60, 200])
def test_no_number_is_cut_whatever_the_width(files, width):
    found = compare(*(load([path]) for path in files), resamples=200)
    out = io.StringIO()
    command._print_tasks(found, Console(file=out, width=width))
    text = out.getvalue()
    assert "…" not in text
    for task in found.tasks:
        ends = task.change.interval
        assert f"[{command._signed(ends.low)}, {command._signed(ends.high)}]" in text
        assert task.name in text
    assert all(len(line) <= width for line in text.splitlines())


def test_the_command_prints_json(files, capsys):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(
        ["compare", *map(str, files), "--json", "--metric", "contains", "--resamples", "200"]
    )
    assert arguments.run(arguments) is None
    found = json.loads(capsys.readouterr().out)
    (task,) = found["tasks"]
    assert (task["name"], task["metric"], task["gained"]) == ("nolima", "contains", [])
    assert len(task["lost"]) == sum(e["contains"] for e in binary("nolima", 40, 0.7))
    assert found["b"]["condition"] == "top:20"
    assert any("locos_arithmetic has no contains" in note for note in found["notes"])


@pytest.mark.parametrize("places", product(("A", "B"), ("missing", "broken")))
def test_files_that_cannot_be_read_are_named(files, tmp_path, places):
    letter, kind = places
    wrong = tmp_path / f"{kind}.json"
    if kind == "broken":
        wrong.write_text('{"results": ')
    given = [wrong, files[1]] if letter == "A" else [files[0], wrong]
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["compare", *map(str, given)])
    with pytest.raises(LocosError, match=f"{kind}.json: n"):
        arguments.run(arguments)


# -- a task that asks under conditions ------------------------------------------------------------


def asked_under(folder, scores_by_family: dict[str, list[float]], *, number: int, condition: str):
    """A results file of ``locos_specificity`` whose documents have a baseline of 1."""
    own = {"conditions": ["baseline", condition], "families": {}}
    lines = []
    for family, scores in scores_by_family.items():
        metric = {"nolima": "contains"}.get(family, "exact_match")
        own["families"][family] = {"metric": metric}
        for doc, score in zip(documents(family, len(scores)), scores, strict=True):
            answers = {"baseline": ("yes", 1.0), condition: ("no", score)}
            found = {name: {"answer": a, "score": s} for name, (a, s) in answers.items()}
            # The harness hashes a document before it is scored.
            line = sample(doc, "contains", score)
            lines.append(line | {"doc": doc | {"locos": {"conditions": found}}})

    def change(content):
        name = "locos_specificity"
        for part in ("results", "configs", "n-samples", "task_hashes", "n-shot", "versions"):
            content[part] = {name: content[part]["nolima"]} if part in content else {}
        content["configs"][name]["metadata"][name] = own
        content["results"][name]["specificity,none"] = 0.5

    path = write_run(
        folder,
        {"nolima": lines},
        condition="top:5",  # the model's own, which the task's metadata overrode
        ranking=write_ranking(folder.parent / "locos.json"),
        number=number,
        change=change,
    )
    (samples,) = path.parent.glob(f"samples_nolima_*{path.name[-30:-5]}*")
    samples.rename(str(samples).replace("samples_nolima", "samples_locos_specificity"))
    return path


def test_tasks_that_ask_under_conditions_are_compared_family_by_family(tmp_path):
    a = {"nolima": [0.0] * 6 + [1.0] * 6, "parametric": [1.0] * 12}
    b = {"nolima": [1.0] * 12, "parametric": [1.0] * 11 + [0.0]}
    first = asked_under(tmp_path / "a", a, number=0, condition="top:9")
    second = asked_under(tmp_path / "b", b, number=1, condition="top:3")
    found = compare(load([first]), load([second]), resamples=100)
    assert (found.a.condition, found.b.condition) == ("top:9", "top:3")
    assert [(t.name, t.metric, t.a, t.b) for t in found.tasks] == [
        ("locos_specificity:nolima", "contains", 0.5, 1.0),
        ("locos_specificity:parametric", "exact_match", 1.0, pytest.approx(11 / 12)),
    ]
    assert [len(t.gained) for t in found.tasks] == [6, 0]


def test_conditions_of_an_unknown_form_are_an_error(tmp_path):
    first = asked_under(tmp_path / "a", {"nolima": [1.0, 0.0]}, number=0, condition="top:9")
    content = json.loads(first.read_text())
    content["configs"]["locos_specificity"]["metadata"]["locos_specificity"]["families"] = {"x": 3}
    first.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"A: a task recorded its conditions in a form .* Run it"):
        compare(load([first]), load([first]), resamples=100)
