"""Sweeps: which runs, their results files, resume; on a tiny model."""

from __future__ import annotations

import json

import pytest

from lm_eval_locos import sweep as module
from lm_eval_locos.architecture import Head
from lm_eval_locos.cli import main
from lm_eval_locos.errors import DataError, LocosError, RankingError
from lm_eval_locos.model import LocosAblatedLM
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.sweep import names, plan

RANKING = HeadRanking({Head(i, j): (float(4 * i + j),) for i in range(3) for j in range(4)})
TASKS = ["locos_arithmetic_2da", "locos_parametric"]


def test_plan():
    runs = plan({"a": RANKING, "b": RANKING}, [2, 3, 2], ["random:2", "bottom", "layer-random:1"])
    assert [run.name for run in runs[:7]] == [
        "baseline",
        "a-top-2",
        "a-random-2-0",
        "a-random-2-1",
        "a-bottom-2",
        "a-layer-random-2-0",
        "a-top-3",
    ]
    assert len(runs) == len({run.name for run in runs}) == 1 + 2 * 2 * 5
    assert [str(run.condition) for run in runs[:4]] == [
        "baseline",
        "top:2",
        "random:2:0",
        "random:2:1",
    ]
    assert [run.ranking for run in runs[:2]] == [None, "a"]


@pytest.mark.parametrize(
    "control", ["randon:3", "random", "random:0", "bottom:2", "top:3", "random:x"]
)
def test_unknown_controls(control):
    with pytest.raises(LocosError, match=f"control '{control}' is not known"):
        plan({"a": RANKING}, [1], [control])


@pytest.mark.parametrize("k", [0, 13])
def test_k_out_of_range(k):
    with pytest.raises(RankingError, match=f"k={k}: expected 1 to 12"):
        plan({"a": RANKING}, [k])


def test_names():
    assert names(["x/locos.json", "wu.json"]) == {"locos": "x/locos.json", "wu": "wu.json"}
    assert names(["x/locos.json", "y/locos.json"]) == {
        "x-locos": "x/locos.json",
        "y-locos": "y/locos.json",
    }
    with pytest.raises(RankingError, match="would both be called x-locos"):
        names(["x/locos.json", "x/locos.json"])


@pytest.fixture
def run(folder, monkeypatch):
    """A sweep of a few runs over two documents a task."""
    monkeypatch.chdir(folder)
    lm = LocosAblatedLM("model", num_heads=0, device="cpu", batch_size=2)
    rankings = {"heads": HeadRanking.load("heads.json")}

    def go(ks=(2,), controls=("random:1",), **options):
        runs = plan(rankings, ks, controls)
        arguments = {
            "tasks": TASKS,
            "output": "out",
            "limit": 2,
            "model_args": {"pretrained": "model"},
        }
        return module.sweep(lm, rankings, runs, progress=False, **arguments | options)

    go.lm = lm
    return go


def read(path):
    (found,) = path.rglob("results_*.json")
    return json.loads(found.read_text(encoding="utf-8"))


def folders(path):
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir())


def test_every_run_is_a_results_file(run, folder):
    paths = run()
    assert [path.name for path in paths] == ["baseline", "heads-top-2", "heads-random-2-0"]
    conditions = []
    for path in paths:
        found = read(path)
        conditions.append(found["config"]["locos"]["condition"])
        assert set(found["results"]) == set(TASKS)
        assert found["model_source"] == "locos-ablated"
        assert found["config"]["model_args"]["pretrained"] == "model"
        assert len(list(path.rglob("samples_*.jsonl"))) == 2
    assert conditions == ["baseline", "top:2", "random:2:0"]
    assert read(paths[1])["config"]["locos"]["heads"] == ["2-3", "2-2"]
    assert read(paths[0])["config"]["locos"]["ranking"] is None
    means = {
        read(p)["config"]["locos"]["calibration"].get("parametric", {}).get("means_sha256")
        for p in paths[1:]
    }
    assert len(means) == 1


def test_the_same_as_a_run_of_its_own(run, folder):
    from lm_eval import simple_evaluate

    paths = run()
    alone = simple_evaluate(
        "locos-ablated",
        {"pretrained": "model", "heads": "heads.json", "num_heads": 2},
        TASKS,
        limit=2,
        batch_size=2,
        device="cpu",
        bootstrap_iters=0,
    )
    for task in TASKS:
        (file,) = paths[1].rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        assert [row["resps"] for row in rows] == [row["resps"] for row in alone["samples"][task]]


def test_resume(run, folder, monkeypatch):
    evaluate, seen = module.evaluate, []

    def stop_at_second(lm, *args, **kwargs):
        if len(seen) == 1:
            (folder / "out" / ".run-left").mkdir()  # what SIGKILL would leave
            raise KeyboardInterrupt
        seen.append(str(lm.condition))
        evaluate(lm, *args, **kwargs)

    monkeypatch.setattr(module, "evaluate", stop_at_second)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert sorted(p.name for p in (folder / "out").iterdir() if p.is_dir()) == [
        ".run-left",
        "baseline",
    ]
    with pytest.raises(DataError, match="Add --resume"):
        run()

    def remembered(lm, *args, **kwargs):
        seen.append(str(lm.condition))
        evaluate(lm, *args, **kwargs)

    monkeypatch.setattr(module, "evaluate", remembered)
    paths = run(ks=(2, 3), resume=True)
    assert seen == ["baseline", "top:2", "random:2:0", "top:3", "random:3:0"]
    assert folders(folder / "out") == sorted(path.name for path in paths)


@pytest.mark.parametrize(
    ("changed", "key"), [({"limit": 1}, "limit"), ({"tasks": TASKS[:1]}, "tasks")]
)
def test_another_sweep_is_refused(run, monkeypatch, changed, key):
    monkeypatch.setattr(module, "evaluate", lambda lm, folder, **_: folder.mkdir())
    run()
    with pytest.raises(DataError, match=rf"holds another sweep \({key} was"):
        run(resume=True, **changed)


def test_a_ranking_of_another_model(run):
    rankings = {"heads": HeadRanking({Head(7, 0): (1.0,)})}
    with pytest.raises(RankingError, match="head 7-0"):
        module.sweep(
            run.lm, rankings, plan(rankings, [1]), tasks=TASKS, output="out", model_args={}
        )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--k", "2,x"], "--k 'x': expected whole numbers"),
        (["--controls", "randon:2"], "control 'randon:2' is not known"),
        (["--model-args", "num_heads=3"], "--model-args num_heads=...: use"),
        (["--metadata", "{"], "--metadata is not JSON"),
        (["--tasks", "locos_parametrik"], "--tasks locos_parametrik: no such task. Did you mean"),
        (["--tasks", "locos_specificity_lite"], "--tasks locos_specificity_lite: it asks under"),
        (["--limit", "0"], "--limit 0: expected a number of documents"),
        (["--limit", "-3"], "--limit -3: expected a number of documents"),
        (["--heads", "none.json"], "heads=none.json: cannot be read"),
    ],
)
def test_wrong_arguments(folder, monkeypatch, capsys, more, message):
    monkeypatch.chdir(folder)
    line = ["--model", "model", "--heads", "heads.json", "--k", "2", "--tasks", "locos_parametric"]
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *line, "--output", "out", "--device", "cpu", *more])
    assert ended.value.code == 2
    assert f"locos: {message}" in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_the_command(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    line = ["--model", "model", "--heads", "heads.json", "--k", "2", "--tasks", TASKS[0]]
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *line, "--limit", "1", "--device", "cpu", "--output", "out"])
    assert ended.value.code == 0
    assert "2 runs in out. Next: locos report out" in capsys.readouterr().out
    assert read(folder / "out" / "heads-top-2")["config"]["limit"] == 1
