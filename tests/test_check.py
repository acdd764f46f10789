"""`locos check`: gates in TOML, exit status, messages, JUnit, annotations; as a subprocess."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from report_files import BASE, TASK, binary, documents, sample, write_ranking, write_run

from lm_eval_locos.cli import check
from lm_eval_locos.errors import LocosError
from lm_eval_locos.gates import output
from lm_eval_locos.gates.config import GENERAL, KEYS, gates_from, read_gates
from lm_eval_locos.gates.evaluate import evaluate
from lm_eval_locos.pytest_gates import assert_gates
from lm_eval_locos.reporting.results import load
from lm_eval_locos.specificity_numbers import summarise
from lm_eval_locos.statistics import FamilyScores, documents_needed, specificity

N = 60
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def pair(folder: Path, *, n: int = N, loss: float = 0.6, **options) -> Path:
    """A baseline and a condition in which the first documents of retrieval are lost."""
    folder.mkdir(parents=True, exist_ok=True)
    ranking = write_ranking(folder / "locos.json")
    base = {family: binary(family, n, share) for family, share in BASE.items()}
    write_run(folder / "out", base, **options)
    after = {}
    for family, entries in base.items():
        metric = entries[0]["metrics"][0]
        lost = int(loss * n) if family in ("nolima", "musique", "babilong") else 0
        after[family] = [
            sample(e["doc"], metric, 0.0 if i < lost else e[metric]) for i, e in enumerate(entries)
        ]
    write_run(folder / "out", after, condition="top:20", ranking=ranking, number=1, **options)
    return folder / "out"


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return pair(tmp_path_factory.mktemp("study"))


def own(folder: Path, *, seeds: int = 19, families=tuple(BASE), change=lambda content: None):
    """A results file of ``locos_specificity``, with the statistics that the task would write."""
    folder.mkdir(parents=True, exist_ok=True)
    ranking = write_ranking(folder / "locos.json")
    conditions = ["baseline", "top:20", *(f"layer-random:20:{s}" for s in range(seeds))]
    records = []
    for family in families:
        for i, doc in enumerate(documents(family, N)):
            side = family in ("nolima", "musique", "babilong")
            scores = dict.fromkeys(conditions, float(i % 5 > 0))
            scores["top:20"] *= float(i % 3 == 0) if side else 1.0
            part = {key: doc[key] for key in ("id", "family", "cluster")}
            records.append(part | {"scores": scores, "changed": True})
    found = summarise(records, list(BASE), conditions)

    def write(content):
        name = "locos_specificity"
        content["results"] = {
            name: {"alias": name, **{f"{key},none": v for key, v in found.numbers.items()}}
        }
        content["configs"] = {
            name: {"task": name, "metadata": {"locos_specificity": found.as_dict()}}
        }
        change(content)

    write_run(
        folder / "out",
        {"nolima": binary("nolima", 2, 1.0)},
        condition="top:20",
        ranking=ranking,
        samples=False,
        change=write,
    )
    return folder / "out", found


def gates(folder: Path, text: str) -> Path:
    path = folder / "gates.toml"
    path.write_text(text, encoding="utf-8")
    return path


def gate(metric: str, **keys) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    return "\n".join(["[[gate]]", f'metric = "{metric}"', *lines, ""])


CODE = """
import argparse, sys
from lm_eval_locos.cli import check
from lm_eval_locos.errors import LocosError
parser = argparse.ArgumentParser(prog="locos")
check.add_parser(parser.add_subparsers(required=True))
arguments = parser.parse_args()
try:
    sys.exit(arguments.run(arguments))
except LocosError as error:
    print(f"locos: {error}", file=sys.stderr)
    sys.exit(2)
"""


def shell(*arguments, cwd, **environment) -> subprocess.CompletedProcess:
    """``locos check`` in a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GITHUB_")} | environment
    return subprocess.run(
        [sys.executable, "-c", CODE, "check", *map(str, arguments), "--resamples", "200"],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=env,
        check=False,
    )


def call(*arguments) -> tuple[int, str, str]:
    """The same in this process, which is quicker: status, standard output, standard error."""
    import argparse

    parser = argparse.ArgumentParser(prog="locos")
    check.add_parser(parser.add_subparsers(required=True))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            parsed = parser.parse_args(["check", *map(str, arguments), "--resamples", "200"])
            status = parsed.run(parsed)
        except LocosError as error:
            print(f"locos: {error}", file=err)
            status = 2
        except SystemExit as error:
            status = error.code
    return status, out.getvalue(), err.getvalue()


@pytest.fixture(autouse=True)
def _no_github(monkeypatch):
    for name in list(os.environ):
        if name.startswith("GITHUB_"):
            monkeypatch.delenv(name)


# -- exit status, table, JUnit, annotations -------------------------------------------------


def test_a_subprocess_that_passes_writes_junit_and_a_summary(study, tmp_path):
    config = gates(tmp_path, gate("specificity", min=0.2) + gate("nolima_drop", min=0.2))
    done = shell(
        study, "--config", config, "--junit", "j.xml", "--summary", "sub/s.md", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["gate", "number", "interval", "threshold", "verdict", "reason"]
    assert lines[-1] == "2 of 2 gates passed."
    assert all(line == line.rstrip() for line in lines)
    suite = ElementTree.parse(tmp_path / "j.xml").getroot().find("testsuite")
    assert suite.attrib == {"name": "locos check", "tests": "2", "failures": "0", "errors": "0"}
    assert [c.get("name") for c in suite] == ["specificity >= 0.2", "nolima_drop >= 0.2"]
    assert (tmp_path / "sub" / "s.md").read_text().startswith("### locos check: 2 of 2")


def test_a_subprocess_that_fails_on_github_annotates_and_adds_to_the_summary(study, tmp_path):
    config = gates(
        tmp_path,
        gate("specificity", min=0.99, name="a: b, 100%\nsecond <line> & |")
        + gate("retrieval_drop", min=0.1),
    )
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    done = shell(
        *(study, "--config", config, "--junit", tmp_path / "j.xml"),
        cwd=tmp_path,
        GITHUB_ACTIONS="true",
        GITHUB_STEP_SUMMARY=str(summary),
    )
    assert (done.returncode, done.stderr) == (1, "")
    commands = [line for line in done.stdout.splitlines() if line.startswith("::")]
    assert len(commands) == 1
    assert commands[0].startswith("::error file=")
    assert "title=locos gate%3A a%3A b%2C 100%25 second <line> & |::" in commands[0]
    assert "lower end" in commands[0]
    text = summary.read_text()
    assert text.startswith("before\n### locos check: 1 of 2 gates passed.")
    assert "second &lt;line&gt; &amp; \\|" in text
    root = ElementTree.parse(tmp_path / "j.xml").getroot()
    failure = root.find("testsuite/testcase/failure")
    assert root.get("failures") == "1"
    assert "the interval's lower end" in failure.get("message")
    assert root.find("testsuite/testcase").get("name") == "a: b, 100% second <line> & |"


def test_a_subprocess_with_an_error_ends_with_2_and_a_junit_of_errors(tmp_path):
    config = gates(tmp_path, gate("specificity", min=0.2))
    done = shell(
        *("nowhere", "--config", config, "--junit", "j.xml"), cwd=tmp_path, GITHUB_ACTIONS="true"
    )
    assert done.returncode == 2
    assert done.stderr.startswith("locos: nowhere: no such file or folder.")
    assert done.stdout.startswith("::error file=")
    root = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (root.get("tests"), root.get("errors")) == ("1", "1")
    assert "no such file" in root.find("testsuite/testcase/error").get("message")


def test_all_passed_is_one_notice(study, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    config = gates(tmp_path, gate("specificity", min=0.2))
    status, out, _ = call(study, "--config", config)
    assert status == 0
    assert [x for x in out.splitlines() if x.startswith("::")] == [
        f"::notice file={config},title=locos check::1 of 1 gates passed."
    ]


# -- verdicts --------------------------------------------------------------------------------


def only(text: str) -> str:
    """The table's one row."""
    lines = text.splitlines()
    assert len(lines) == 3, text
    return lines[1]


def expected(n: int = N, loss: float = 0.6):
    """The statistics of `pair`, computed here from its scores."""
    families = {}
    for family, share in BASE.items():
        entries = binary(family, n, share)
        before = [e[e["metrics"][0]] for e in entries]
        side = "retrieval" if family in ("nolima", "musique", "babilong") else "control"
        lost = int(loss * n) if side == "retrieval" else 0
        after = [0.0 if i < lost else x for i, x in enumerate(before)]
        order = sorted(range(n), key=lambda i: entries[i]["doc_hash"])
        families[family] = FamilyScores(
            [before[i] for i in order],
            [after[i] for i in order],
            clusters=[entries[i]["doc"]["cluster"] for i in order],
            side=side,
        )
    return specificity(families, resamples=200)


def test_the_bound_is_judged_and_not_the_value(study, tmp_path):
    drop = expected().families["nolima"].drop
    between = (drop.interval.low + drop.value) / 2
    for least, judge, status in (
        (drop.interval.low - 1e-6, "bound", 0),
        (drop.interval.low + 1e-6, "bound", 1),
        (between, "bound", 1),
        (between, "point", 0),
        (drop.value + 1e-6, "point", 1),
    ):
        config = gates(tmp_path, gate("nolima_drop", min=least, judge=judge))
        assert call(study, "--config", config)[0] == status, (least, judge)
    for most, status in ((drop.interval.high + 1e-6, 0), (drop.interval.high - 1e-6, 1)):
        config = gates(tmp_path, gate("nolima_drop", max=most))
        assert call(study, "--config", config)[0] == status


def test_too_few_documents_names_the_number_needed(study, tmp_path):
    drop = expected().families["nolima"].drop
    least = drop.value - 0.05
    config = gates(tmp_path, gate("nolima_drop", min=least))
    needed = documents_needed(N, drop.standard_error, 0.05)
    status, out, _ = call(study, "--config", config)
    assert status == 1
    assert f"but {N} do not show it. About {needed} would" in only(out)
    config = gates(tmp_path, gate("nolima_drop", min=0.1, effect=0.01))
    status, out, _ = call(study, "--config", config)
    assert status == 1
    needed = documents_needed(N, drop.standard_error, 0.01)
    assert f"too few documents: {N} show an effect of" in only(out)
    assert f"0.01 needs about {needed}, in as many more clusters (30 here" in only(out)


def test_controls_held_uses_the_margin_of_the_gate(study, tmp_path):
    found = expected().controls.drop
    for margin, status in ((found.interval.high + 1e-4, 0), (found.interval.high - 1e-4, 1)):
        config = gates(tmp_path, gate("controls_held", margin=margin))
        assert call(study, "--config", config)[0] == status
    assert "90% interval's upper end" in call(study, "--config", config)[1]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("nolma_drop", "nolma_drop is missing. Did you mean nolima_drop?"),
        ("p_random", "there is no random control"),
        ("nolima:f2", "nolima has no metric f2; it has contains."),
        ("hellaswag:acc", "no run has the task hellaswag; there are: locos_arithmetic,"),
    ],
)
def test_a_missing_metric_fails(study, tmp_path, metric, message):
    config = gates(tmp_path, gate(metric, min=0.1, condition="top:20"))
    status, out, err = call(study, "--config", config)
    assert (status, err) == (1, "")
    assert message in only(out)


def test_rows_are_chosen_and_every_one_has_to_pass(study, tmp_path):
    config = gates(tmp_path, gate("nolima:contains", min=0.5))
    status, _, err = call(study, "--config", config)
    assert status == 2
    assert "was measured under baseline, top:20. Say which is meant" in err
    for keys, status in (
        ({"condition": "baseline"}, 0),
        ({"condition": "top"}, 1),
        ({"condition": "*"}, 1),
        ({"k": 20, "ranking": "locos.json"}, 1),
        ({"condition": "baseline", "model": "*-1b"}, 0),
        ({"condition": "baseline", "model": "*-2b"}, 1),
    ):
        config = gates(tmp_path, gate("nolima:contains", min=0.5, **keys))
        assert call(study, "--config", config)[0] == status, keys
    status, out, _ = call(study, "--config", config)
    assert "no row matches model = '*-2b', condition = 'baseline'. There are: org/model-1b" in out


def test_a_number_that_is_nan_fails_and_takes_the_means_with_it(tmp_path):
    def spoil(content):
        if content["config"]["model"] == "locos-ablated":
            content["results"]["locos_arithmetic"]["exact_match,none"] = float("nan")

    out = pair(tmp_path, change=spoil)
    for metric in ("arithmetic_drop", "specificity", "control_drop", "controls_held"):
        keys = {} if metric == "controls_held" else {"max": 5}
        config = gates(tmp_path, gate(metric, **keys))
        status, table, err = call(out, "--config", config)
        assert (status, err) == (1, ""), metric
        assert "locos_arithmetic's exact_match is nan in " in only(table)
    assert call(out, "--config", gates(tmp_path, gate("nolima_drop", min=0.1)))[0] == 0


@pytest.mark.parametrize("metric", ["nolima_drop", "specificity"])
def test_a_baseline_that_is_nan_fails_as_well(tmp_path, metric):
    def spoil(content):
        if content["config"]["model"] != "locos-ablated":
            result = content["results"]["nolima"]
            result.update({key: float("nan") for key in result if "," in key})

    out = pair(tmp_path, change=spoil)
    status, table, err = call(out, "--config", gates(tmp_path, gate(metric, min=0.1)))
    assert (status, err) == (1, "")
    assert "nolima's contains is nan in " in only(table)


def without(family):
    def change(content):
        if content["config"]["model"] == "locos-ablated":
            for part in ("results", "configs", "n-samples", "task_hashes", "n-shot"):
                content[part].pop(TASK.get(family, family), None)

    return change


def test_a_family_that_only_the_baseline_ran_fails_the_means(tmp_path):
    out = pair(tmp_path, change=without("arithmetic"))
    said = "the baseline ran locos_arithmetic, and top:20 did not: run it too, or leave it out"
    for metric, keys in (("specificity", {"min": 0.1}), ("controls_held", {})):
        status, table, _ = call(out, "--config", gates(tmp_path, gate(metric, **keys)))
        assert status == 1
        assert said in only(table)
    assert call(out, "--config", gates(tmp_path, gate("nolima_drop", min=0.1)))[0] == 0


def test_other_weights_under_the_same_path_are_refused(tmp_path):
    """The folder was overwritten between the two runs."""
    ranking = write_ranking(tmp_path / "locos.json")
    base = {family: binary(family, N, share) for family, share in BASE.items()}

    def weights(value):
        return lambda content: content["config"]["locos"].update(model_identity=value)

    def runs(folder, *identities):
        options = [{"condition": "baseline"}, {"condition": "top:20"}]
        for i, (identity, more) in enumerate(zip(identities, options, strict=True)):
            change = weights(identity)
            write_run(folder, base, ranking=ranking, number=i, change=change, **more)
        return folder

    config = gates(tmp_path, gate("nolima_drop", max=0.5))
    assert call(runs(tmp_path / "same", "a1", "a1"), "--config", config)[0] == 0
    status, _, err = call(runs(tmp_path / "other", "a1", "b2"), "--config", config)
    assert status == 2
    assert "are of different models: weights is a1 there and b2 here" in err


def test_skipped_documents_are_told_of_a_gate_that_passes(tmp_path):
    ranking = write_ranking(tmp_path / "locos.json")
    base = {family: binary(family, N, share) for family, share in BASE.items()}
    write_run(tmp_path / "out", base)
    after = {family: [*entries] for family, entries in base.items()}
    after["nolima"][:3] = [
        {k: v for k, v in e.items() if k not in e["metrics"]} | {"metrics": []}
        for e in after["nolima"][:3]
    ]
    write_run(tmp_path / "out", after, condition="top:20", ranking=ranking, number=1)
    config = gates(tmp_path, gate("nolima_drop", max=0.5))
    status, table, _ = call(tmp_path / "out", "--config", config)
    assert status == 0
    assert "Skipped documents do not count: 3 of NoLiMa." in only(table)


def test_the_condition_that_the_task_measured_is_judged(tmp_path):
    """Its metadata may have asked for another k than the model's arguments."""

    def change(content):
        content["config"]["locos"]["condition"] = "top:4"
        recorded = content["configs"]["locos_specificity"]["metadata"]["locos_specificity"]
        recorded["conditions"] = ["baseline", "top:20", "layer-random:20:0"]

    out, _ = own(tmp_path, change=change)
    for keys, status in (({"k": 20}, 0), ({"condition": "top:20"}, 0), ({"k": 4}, 1)):
        config = gates(tmp_path, gate("specificity", min=0.1, **keys))
        assert call(out, "--config", config)[0] == status, keys


def test_a_file_with_nothing_but_nan_fails(tmp_path):
    def spoil(content):
        for result in content["results"].values():
            result.update({key: float("nan") for key in result if "," in key})

    out = pair(tmp_path, change=spoil)
    for text in (gate("specificity", min=0.1), gate("nolima:contains", max=1, condition="top")):
        status, _, err = call(out, "--config", gates(tmp_path, text))
        assert (status, err) == (1, "")


def test_bundled_samples_are_refused_unless_allowed(tmp_path):
    out = pair(tmp_path, bundled=True)
    text = gate("nolima_drop", min=0.1)
    status, table, _ = call(out, "--config", gates(tmp_path, text))
    assert status == 1
    assert "the package's small sample, not the benchmark" in only(table)
    assert call(out, "--config", gates(tmp_path, "allow_bundled = true\n" + text))[0] == 0
    allowed = gate("nolima_drop", min=0.1, allow_bundled=True)
    assert call(out, "--config", gates(tmp_path, allowed))[0] == 0
    denied = gate("nolima_drop", min=0.1, allow_bundled=False)
    assert call(out, "--config", gates(tmp_path, "allow_bundled = true\n" + denied))[0] == 1


def test_without_samples_a_bound_fails_and_a_value_can_be_judged(tmp_path):
    out = pair(tmp_path, samples=False)
    status, table, _ = call(out, "--config", gates(tmp_path, gate("specificity", min=0.1)))
    assert status == 1
    assert "no interval" in only(table)
    assert "--log_samples" in only(table)
    point = gate("specificity", min=0.1, judge="point")
    assert call(out, "--config", gates(tmp_path, point))[0] == 0
    absolute = gate("nolima:contains", min=0.1, condition="baseline")
    assert "Run with --log_samples" in call(out, "--config", gates(tmp_path, absolute))[1]


def test_other_documents_are_refused(tmp_path):
    out = pair(tmp_path, n=20)
    ranking = tmp_path / "locos.json"
    other = {"nolima": binary("nolima", 25, 0.5)}
    write_run(out, other, condition="top:50", ranking=ranking, number=9)
    status, _, err = call(out, "--config", gates(tmp_path, gate("nolima_drop", min=0.1)))
    assert status == 2
    assert "the documents differ: 20 there, 25 here" in err


def test_other_models_are_refused_and_no_baseline_fails(tmp_path):
    base = {family: binary(family, 20, share) for family, share in BASE.items()}
    ranking = write_ranking(tmp_path / "locos.json")
    out = tmp_path / "out"
    write_run(out, base, condition="top:20", ranking=ranking, number=1)
    config = gates(tmp_path, gate("specificity", min=0.1))
    status, table, _ = call(out, "--config", config)
    assert status == 1
    assert "there is no baseline" in only(table)
    write_run(out, base, model="org/another-1b")
    status, _, err = call(out, "--config", config)
    assert status == 2
    assert "different models: pretrained is org/another-1b there and org/model-1b here" in err


def test_the_baseline_and_the_metric_can_be_named(tmp_path):
    out = pair(tmp_path, n=20)
    baseline, ablated = sorted(out.rglob("results_*.json"))
    config = gates(tmp_path, gate("nolima_drop", min=0.01))
    assert call(ablated, "--config", config)[0] == 1
    assert call(ablated, "--config", config, "--baseline", baseline)[0] == 0
    status, _, err = call(ablated, "--config", config, "--baseline", ablated)
    assert (status, "ran under top:20" in err) == (2, True)
    text = "metrics = {{ {} }}\n" + gate("nolima_drop", min=0.01)
    for metrics, status, message in (
        ('nolima = "contains"', 0, ""),
        (
            'nolima = "f2"',
            2,
            "metrics.nolima = 'f2': nolima has no such metric. Use one of: contains.",
        ),
        ('nolma = "contains"', 2, "metrics.nolma: no run has this family. There are: arithmetic"),
    ):
        found, _, err = call(out, "--config", gates(tmp_path, text.format(metrics)))
        assert found == status
        assert message in err


def test_names_in_files_cannot_begin_a_line(tmp_path, monkeypatch):
    """GitHub reads ``::command::`` at the beginning of a line of the log."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")

    def spoil(content):
        content["model_name"] = "x\n::stop-commands::token"

    out = pair(tmp_path, n=20, change=spoil)
    config = gates(tmp_path, gate("nolima:contains", min=0.99, condition="*"))
    status, table, _ = call(out, "--config", config)
    assert status == 1
    assert "x ::stop-commands::token" in table
    assert "%0A" in table
    assert not [x for x in table.splitlines() if x.lstrip().startswith("::stop")]


def test_a_family_at_its_floor_is_never_a_pass(tmp_path):
    ranking = write_ranking(tmp_path / "locos.json")
    base = {family: binary(family, 40, share) for family, share in BASE.items()}
    base["nolima"] = [sample(d, "contains", 0.0) for d in documents("nolima", 40)]
    write_run(tmp_path / "out", base)
    lost = dict(base)
    lost["musique"] = [sample(d, "acc", 0.0) for d in documents("musique", 40)]
    write_run(tmp_path / "out", lost, condition="top:20", ranking=ranking, number=1)
    for text, status, words in (
        (gate("nolima_drop", max=5), 1, "  undefined (floor): the baseline's 95% lower bound"),
        (gate("retrieval_drop", max=5), 1, "NoLiMa: undefined, the baseline is at its floor"),
        (gate("retrieval_drop", max=5, allow_undefined=True), 0, "NoLiMa: undefined"),
    ):
        found, table, _ = call(tmp_path / "out", "--config", gates(tmp_path, text))
        assert found == status
        assert words in only(table)


# -- the task that computes its own numbers ----------------------------------------------------


def test_numbers_of_the_specificity_task_are_those_it_wrote(tmp_path):
    out, found = own(tmp_path)
    interval = found.result.specificity.interval
    for least, status in ((interval.low - 1e-6, 0), (interval.low + 1e-6, 1)):
        for metric in ("specificity", "locos_specificity:specificity"):
            config = gates(tmp_path, gate(metric, min=least))
            assert call(out, "--config", config)[0] == status
    text = gate("p_random", max=0.05) + gate("musique_baseline", min=0.5)
    text += gate("controls_held", margin=0.2) + gate("babilong_difference", min=0.1)
    status, table, _ = call(out, "--config", gates(tmp_path, text))
    assert (status, table.splitlines()[-1]) == (0, "4 of 4 gates passed.")
    high = found.result.controls.drop.interval.high
    assert call(out, "--config", gates(tmp_path, gate("controls_held", margin=high - 1e-4)))[0] == 1


def test_too_few_random_seeds_are_named(tmp_path):
    out, _ = own(tmp_path, seeds=4)
    status, table, _ = call(out, "--config", gates(tmp_path, gate("p_random", max=0.05)))
    assert status == 1
    assert "With 4 random seeds it cannot be below 0.2: run at least 19." in only(table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.update({"specificity,none": float("nan")}), "specificity is nan in"),
        (lambda line: line.update({"specificity,none": 0.9}), "contradicts itself"),
        (lambda line: line.pop("specificity,none"), "specificity is missing"),
        (lambda line: line.update(alias="locos_specificity [bundled sample]"), "small sample"),
    ],
)
def test_a_specificity_that_cannot_be_trusted_fails(tmp_path, change, message):
    out, _ = own(tmp_path, change=lambda c: change(c["results"]["locos_specificity"]))
    status, table, err = call(out, "--config", gates(tmp_path, gate("specificity", max=5)))
    assert (status, err) == (1, "")
    assert message in only(table)


def test_a_family_without_documents_fails_the_mean(tmp_path):
    out, found = own(tmp_path, families=tuple(BASE)[:-1])
    assert found.missing == ("arithmetic",)
    for metric, keys in (("control_drop", {"max": 5}), ("controls_held", {"margin": 0.9})):
        status, table, _ = call(out, "--config", gates(tmp_path, gate(metric, **keys)))
        assert status == 1
        assert "no document of Arithmetic was scored" in only(table)
    assert call(out, "--config", gates(tmp_path, gate("retrieval_drop", min=0.1)))[0] == 0


def test_statistics_of_an_unknown_form_are_an_error(tmp_path):
    def spoil(content):
        record = content["configs"]["locos_specificity"]["metadata"]["locos_specificity"]
        record["statistics"]["specificity"] = {"value": 1}

    out, _ = own(tmp_path, change=spoil)
    status, _, err = call(out, "--config", gates(tmp_path, gate("specificity", max=5)))
    assert status == 2
    assert "a form that is not known (KeyError: 'interval')" in err


# -- TOML --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no gates in it. Add\n[[gate]]"),
        ("gate = []", "gate = []: expected one or more tables"),
        ("[[gates]]\n", "unknown key gates. Did you mean gate?"),
        ("[[gate]]\nmin = 1", "gate 1: no metric. Expected metric = one of specificity"),
        (gate("specificty", min=1), "unknown metric 'specificty'. Did you mean specificity?"),
        (gate("specificity"), "specificity without a threshold. Give min, max or both."),
        (gate("specificity", minimum=1), "unknown key minimum. Did you mean min? Known: metric,"),
        (gate("specificity", min="0.3"), "gate 1: min = '0.3': expected a number."),
        (gate("specificity", min=True), "min = True: expected a number."),
        ('[[gate]]\nmetric = "specificity"\nmin = nan', "min = nan: expected a number."),
        (gate("specificity", min=0.4, max=0.3), "min = 0.4 is above max = 0.3."),
        (gate("specificity", min=0, level=95), "level = 95: expected a number from 0.5 to 1"),
        (gate("specificity", min=0, k=0), "k = 0: expected a whole number from 1 up"),
        (gate("specificity", min=0, judge="mean"), "judge = 'mean': expected \"bound\""),
        (gate("specificity", min=0, margin=0.1), "margin is for controls_held"),
        (gate("controls_held", min=1), "controls_held takes no min"),
        (gate("p_random", max=0.05, judge="bound"), "p_random has no interval"),
        (gate("control_drop", max=0.05, effect=0), "effect = 0: expected a number above 0"),
        ("[[gate]", "not TOML"),
        ("metrics = { nolima = 1 }\n" + gate("specificity", min=0), "metrics = {'nolima': 1}"),
    ],
)
def test_wrong_toml_is_named(tmp_path, text, message):
    with pytest.raises(LocosError) as error:
        read_gates(gates(tmp_path, text))
    assert message in str(error.value)
    assert "gates.toml" in str(error.value)


def test_gates_in_pyproject_are_found_from_a_folder_below(tmp_path, monkeypatch):
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    project = tmp_path / "pyproject.toml"
    text = gate("specificity", min=0.3).replace("[[gate]]", "[[tool.locos.gates.gate]]")
    project.write_text("[tool.locos.gates]\nallow_bundled = true\n" + text)
    (found,) = read_gates().gates
    assert (found.minimum, found.allow_bundled, found.judge) == (0.3, True, "bound")
    assert read_gates(project) == read_gates()
    project.write_text("[tool.other]\n")
    with pytest.raises(LocosError, match=r"no \[tool.locos.gates\] in it"):
        read_gates()


def test_names_of_equal_gates_differ(tmp_path):
    found = read_gates(gates(tmp_path, gate("specificity", min=0.3) * 2)).gates
    assert [one.name for one in found] == ["specificity >= 0.3", "specificity >= 0.3 (2)"]


def test_the_example_is_read():
    found = read_gates(EXAMPLES / "gates.toml").gates
    assert [one.metric for one in found] == [
        "specificity",
        "controls_held",
        "p_random",
        "nolima_baseline",
        "nolima_drop",
    ]


def test_the_example_workflow_is_valid_yaml():
    import yaml

    content = yaml.safe_load((EXAMPLES / "github-workflow.yml").read_text())
    steps = content["jobs"]["specificity"]["steps"]
    assert all("@v" in step["uses"] for step in steps if "uses" in step)
    runs = "\n".join(step["run"] for step in steps if "run" in step)
    assert "locos_specificity" in runs
    assert "locos check out" in runs


VALUES = st.one_of(
    st.booleans(),
    st.integers(-3, 10**400),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["bound", "point", "specificity", "nolima_drop", "controls_held", "top:20"]),
    st.lists(st.integers(0, 2), max_size=2),
)
KEY = st.one_of(st.sampled_from([*KEYS, *GENERAL]), st.text(max_size=5))

TABLE = st.dictionaries(KEY, VALUES, max_size=4)
HEAD = st.sampled_from(["[[gate]]"] * 20 + ["[gate]", ""])
METRICS = ["specificity", "control_drop", "nolima_drop", "musique_ablated", "x_drop", "nolima:acc"]
RIGHT = st.fixed_dictionaries(
    {"metric": st.sampled_from(METRICS), "min": st.floats(-1, 1)},
    optional={
        "judge": st.sampled_from(["bound", "point"]),
        "level": st.sampled_from([0.9, 0.95]),
        "condition": st.sampled_from(["top", "baseline", "*", "[", "top:2?"]),
        "effect": st.floats(0.001, 2),
        "name": st.text(min_size=1, max_size=6),
        "k": st.integers(1, 30),
    },
)
ANY = st.one_of(TABLE, RIGHT, RIGHT, RIGHT)


def toml(value) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    return str(value)


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_the_toml_says_there_is_no_traceback(study, tmp_path, data):
    if data.draw(st.integers(0, 5), label="raw") == 0:
        content = data.draw(st.binary(max_size=60))
    else:
        lines = []
        for table in data.draw(
            st.lists(st.one_of(TABLE, RIGHT, RIGHT, RIGHT), min_size=1, max_size=3)
        ):
            lines.append(data.draw(HEAD))
            lines += [f"{json.dumps(key)} = {toml(value)}" for key, value in table.items()]
        content = "\n".join(lines).encode("utf-8", "replace")
    path = tmp_path / "gates.toml"
    path.write_bytes(content)
    junit = tmp_path / "j.xml"
    junit.unlink(missing_ok=True)
    status, out, err = call(study, "--config", path, "--junit", junit)
    event(f"status {status}")
    assert status in (0, 1, 2)
    assert (status == 2) == err.startswith("locos: ")
    if status < 2:
        count = len(read_gates(path).gates)
        assert out.splitlines()[-1].endswith(f" of {count} gates passed.")
        cases = ElementTree.parse(junit).getroot().findall("testsuite/testcase")
        assert len(cases) == count
        assert (status == 1) == any(len(case.findall("failure")) for case in cases)


# -- in tests ------------------------------------------------------------------------------------


def test_the_pytest_helper_raises_with_the_table(study, tmp_path):
    config = gates(tmp_path, gate("specificity", min=0.2))
    (found,) = assert_gates(study, config=config, resamples=200)
    assert found.passed
    with pytest.raises(AssertionError) as error:
        assert_gates(
            study,
            gates=[{"metric": "specificity", "min": 0.2}, {"metric": "nolima_drop", "min": 0.99}],
            resamples=200,
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "1 of 2 gates passed."
    assert lines[1].startswith("gate ")
    assert "FAIL" in lines[3]
    with pytest.raises(LocosError, match="both given"):
        assert_gates(study, gates=[], config=config)
    with pytest.raises(LocosError, match="gate = \\[\\]: expected one or more"):
        assert_gates(study, gates=[])


@pytest.mark.parametrize("width", [72, 139, 140, 400])
def test_no_number_is_cut_whatever_the_width(study, tmp_path, width):
    gate_keys = {"metric": "nolima_drop", "min": 0.99}
    with pytest.raises(AssertionError) as error:
        assert_gates(study, gates=[gate_keys], resamples=200)
    (line,) = [x for x in str(error.value).splitlines() if x.startswith("nolima_drop")]
    drop = expected().families["nolima"].drop
    parts = [f"{drop.value:.4g}", f"[{drop.interval.low:.4g}, {drop.interval.high:.4g}] 95%"]
    assert all(part in line for part in parts)
    file = gates_from({"gate": [gate_keys]})
    text = output.text(evaluate(file, load([study]), resamples=200), width=width)
    assert all(part in text for part in [*parts, ">= 0.99", "FAIL", "0 of 1 gates passed."])
    assert all(len(x) <= width for x in text.splitlines())
    assert "the interval's lower end" in " ".join(text.split())


def test_annotations_are_escaped_as_github_wants():
    made = output.annotation("error", "a:b,c", "50%\r\nnext", "x,y:z")
    assert made == "::error file=x%2Cy%3Az,title=a%3Ab%2Cc::50%25%0D%0Anext"
