"""Detection end to end on a tiny model: files, resume after a kill, processes, errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_locos import detect as module
from lm_eval_locos import probes
from lm_eval_locos.architecture import Head
from lm_eval_locos.detect import METHODS, detect
from lm_eval_locos.detection import runner
from lm_eval_locos.detection.checkpoint import Checkpoint
from lm_eval_locos.detection.generate import Engine, TrialResult
from lm_eval_locos.errors import DataError, LocosError
from lm_eval_locos.ranking import HeadRanking

ONE_PASS = [method for method in METHODS if method != "cri"]


def row(number, answer):
    """A probe in the tiny tokenizer's words."""
    words = [f"w{5 + (7 * number + j) % 80}" for j in range(12 + 3 * number)]
    needle = f"w{40 + number} w{60 + number} w{20 + number}"
    context = " ".join([*words[: 4 + number], needle, *words[4 + number :]])
    return {
        "id": f"p{number}",
        "context": context,
        "needle": needle,
        "question": f"w{number}",
        "answer": answer,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory, tokenizer):
    """A saved tiny model, and ``probes.jsonl`` of ten trials of which seven pass."""
    from tiny import tiny_model

    folder = tmp_path_factory.mktemp("detect")
    tiny_model("llama", seed=3).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")

    def write(answers):
        rows = [json.dumps(row(i, answer)) for i, answer in enumerate(answers)]
        (folder / "probes.jsonl").write_text("\n".join(rows))

    write(["w1"] * 10)
    engine = Engine(*loaded(folder), methods=[])
    found, _ = probes.load(str(folder / "probes.jsonl"), engine.tokenizer)
    texts = {found[i].id: r.text for i, r in engine.run_all([p.trial for p in found])}
    words = [[w for w in texts[f"p{i}"].split() if w.startswith("w")] for i in range(10)]
    # A word that is generated, for some trials two of them; nothing that is, for the last.
    answers = [" ".join(w[: 1 + i % 2]) if i < 7 else "nothing" for i, w in enumerate(words)]
    assert all(answers)
    write(answers)
    return folder


def loaded(folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    return model, AutoTokenizer.from_pretrained(folder / "model")


def options(home, **more):
    return {"data": str(home / "probes.jsonl"), "batch_size": 2, "progress": False} | more


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def whole(home):
    """An uninterrupted run's detection and folder."""
    return detect(*loaded(home), **options(home, output=home / "whole")), home / "whole"


def test_what_is_written(home, whole):
    found, folder = whole
    assert set(contents(folder)) == {"detect.json", "README.md", *(f"{m}.json" for m in ONE_PASS)}
    assert not (folder / "checkpoint").exists()
    record = json.loads((folder / "detect.json").read_text())
    assert [trial["passed"] for trial in record["trials"]].count(True) == 7
    assert record["pass_rate"] == found.pass_rate == 0.7
    for method in ONE_PASS:
        ranking = HeadRanking.load(folder / f"{method}.json")
        meta = ranking.meta
        assert (meta["method"], meta["num_trials_total"], meta["num_trials_passed"]) == (
            method,
            10,
            7,
        )
        assert meta["fingerprint"]["num_layers"] == 3
        assert {"model", "revision", "tokenizer_sha256", "dataset", "split", "seed"} <= set(meta)
        assert len(ranking.order) == 12
        assert len(ranking.trial_ids) == (10 if method == "headkv" else 7)
        assert (ranking.answer_steps is not None) == (
            method in ("locos", "dla", "attention_spatial")
        )
        for head, (low, high) in ranking.confidence_intervals.items():
            assert low <= ranking.pooled[head] * (1 + 1e-6) + 1e-9
            assert high >= ranking.pooled[head] * (1 - 1e-6) - 1e-9
    card = (folder / "README.md").read_text()
    for text in (
        "10, of which 7 passed (pass rate 0.70)",
        "arXiv:2607.01002",
        "| locos | logits |",
    ):
        assert text in card


def test_equation_4_from_the_steps_themselves(home, whole):
    """Every answer step weighs the same: as if each step were a trial of its own."""
    found, _ = whole
    passed = [result for result in found.results if result.passed]
    assert len({len(result.steps) for result in passed}) > 1
    rows = torch.cat([r.scores["locos"][None].expand(len(r.steps), -1, -1) for r in passed])
    for (layer, head), pooled in found.rankings["locos"].pooled.items():
        assert pooled == pytest.approx(float(rows[:, layer, head].mean()), rel=1e-6, abs=1e-9)


def test_cri_on_request(home):
    found = detect(*loaded(home), **options(home, methods=["locos", "cri"], num_trials=4))
    passed = sum(result.passed for result in found.results)
    assert list(found.rankings) == ["locos", "cri"]
    assert len(found.rankings["cri"].trial_ids) == passed
    assert found.rankings["cri"].answer_steps == found.rankings["locos"].answer_steps


# -- interrupted runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 3])
def test_resume_gives_the_same_files(home, whole, tmp_path, monkeypatch, batches):
    run, done = Engine.run, []

    def interrupted(self, trials, batch):
        if len(done) == batches:
            raise KeyboardInterrupt
        done.append(batch)
        return run(self, trials, batch)

    monkeypatch.setattr(Engine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        detect(*loaded(home), **options(home, output=tmp_path / "out"))
    assert not (tmp_path / "out" / "detect.json").exists()
    monkeypatch.setattr(Engine, "run", run)
    with pytest.raises(DataError, match=r"unfinished run\. Add --resume"):
        detect(*loaded(home), **options(home, output=tmp_path / "out"))

    def counted(self, trials, batch):
        assert batch not in done  # nothing is run twice
        return run(self, trials, batch)

    monkeypatch.setattr(Engine, "run", counted)
    detect(*loaded(home), **options(home, output=tmp_path / "out", resume=True))
    assert contents(tmp_path / "out") == contents(whole[1])


def test_a_damaged_batch_is_run_again(home, whole, tmp_path, monkeypatch):
    write = module._write
    monkeypatch.setattr(module, "_write", lambda *_: None)
    detect(*loaded(home), **options(home, output=tmp_path / "out"))
    monkeypatch.setattr(module, "_write", write)
    first, second, *_ = sorted((tmp_path / "out" / "checkpoint").glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:100])
    second.unlink()
    detect(*loaded(home), **options(home, output=tmp_path / "out", resume=True))
    assert contents(tmp_path / "out") == contents(whole[1])


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"seed": 1}, "trials_sha256"),
        ({"methods": ["locos"]}, "methods"),
        ({"batch_size": 3}, "batch_size"),
        ({"share": False}, "share"),
        ({"max_new_tokens": 20}, "max_new_tokens"),
    ],
)
def test_another_runs_checkpoint_is_refused(home, tmp_path, monkeypatch, changed, key):
    monkeypatch.setattr(module, "_write", lambda *_: None)
    detect(*loaded(home), **options(home, output=tmp_path / "out"))
    before = sorted((tmp_path / "out" / "checkpoint").iterdir())
    with pytest.raises(DataError, match=f"belongs to another run: {key} was"):
        detect(*loaded(home), **options(home, output=tmp_path / "out", resume=True, **changed))
    assert sorted((tmp_path / "out" / "checkpoint").iterdir()) == before


def test_a_finished_run(home, whole, monkeypatch):
    found, folder = whole
    before = contents(folder)
    with pytest.raises(DataError, match="results of a finished run"):
        detect(*loaded(home), **options(home, output=folder))
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", None)  # nothing runs
        again = detect(*loaded(home), **options(home, output=folder, resume=True))
    assert again.rankings["locos"].pooled == found.rankings["locos"].pooled
    assert again.pass_rate == found.pass_rate
    assert contents(folder) == before
    with pytest.raises(DataError, match="another run's results: trials_sha256"):
        detect(*loaded(home), **options(home, output=folder, resume=True, seed=7))


def test_a_checkpoint_remembers_everything(tmp_path):
    store = Checkpoint(tmp_path / "c", {"a": 1})
    store.begin()
    scores = {"locos": torch.randn(3, 4, dtype=torch.float64), "wu": torch.zeros(3, 4)}
    results = {
        5: TrialResult((1, 2), "Zoé 👩‍🚀 \n", (0,), True, scores),
        2: TrialResult((), "", (), False, {}),
    }
    store.save(0, results)
    again = store.load(0, (2, 5))
    assert {i: (r.ids, r.text, r.steps, r.passed) for i, r in again.items()} == {
        i: (r.ids, r.text, r.steps, r.passed) for i, r in results.items()
    }
    assert again[2].scores == {}
    for name, tensor in scores.items():
        assert again[5].scores[name].dtype == tensor.dtype
        assert torch.equal(again[5].scores[name], tensor)
    assert store.load(0, (2, 6)) is None  # another plan
    assert store.load(1, (2, 5)) is None
    store.save(1, {0: results[2]})
    assert list(store.load(1, (0,))) == [0]


# -- errors ----------------------------------------------------------------------------------------


def test_no_trial_passes(home, tmp_path):
    rows = [json.dumps(row(i, f"nothing{i}")) for i in range(4)]
    (tmp_path / "p.jsonl").write_text("\n".join(rows))
    model, tokenizer = loaded(home)
    with pytest.raises(DataError) as error:
        detect(model, tokenizer, data=str(tmp_path / "p.jsonl"), progress=False)
    assert "0 of 4 trials passed (pass rate 0.00)" in str(error.value)
    assert str(error.value).count("asked for 'nothing") == 3
    # HeadKV generates nothing, and needs no trial that passes.
    found = detect(
        model, tokenizer, data=str(tmp_path / "p.jsonl"), methods=["headkv"], progress=False
    )
    assert len(found.rankings["headkv"].trial_ids) == 4


@pytest.mark.parametrize(
    ("methods", "message"), [(["lokos"], "'lokos' is not known"), ([], "no m")]
)
def test_wrong_methods(home, methods, message):
    with pytest.raises(LocosError, match=message):
        detect(*loaded(home), **options(home, methods=methods))


def test_a_prompt_that_does_not_fit(home):
    with pytest.raises(DataError, match=r"trial p\d: the prompt has \d+ tokens and needs 240"):
        detect(*loaded(home), **options(home, max_new_tokens=240))


# -- the command -----------------------------------------------------------------------------------


def command(home, *more):
    return [
        *(sys.executable, "-m"),
        "lm_eval_locos.cli",
        "detect",
        *("--model", str(home / "model"), "--data", str(home / "probes.jsonl")),
        *("--batch-size", "2", *more),
    ]


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


def test_killed_and_resumed(home, tmp_path):
    """SIGKILL as soon as a batch is on disk."""
    plain = subprocess.run(
        command(home, "--output", str(tmp_path / "plain")),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "7 of 10 trials passed (0.70)" in plain.stdout
    assert "Only 7 trials passed" in plain.stdout
    assert f"{tmp_path}/plain/locos.json" in plain.stdout
    assert "passed 7/10" in plain.stderr
    out = tmp_path / "killed"
    process = subprocess.Popen(
        command(home, "--output", str(out)), env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not list(out.glob("checkpoint/*.safetensors")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = subprocess.run(
        command(home, "--output", str(out), "--resume"),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert contents(out) == contents(tmp_path / "plain")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "lokos"], "locos: method 'lokos' is not known"),
        (["--batch-size", "many"], "locos: --batch-size many: expected auto"),
        (["--depths", "0:200:3"], "locos: depths='0:200:3': expected different numbers"),
        (["--data", "missing.jsonl"], "locos: data=missing.jsonl: expected nolima, niah"),
        (["--model", "/no/such/folder"], "locos: --model /no/such/folder cannot be loaded"),
        (["--device", "cpu", "--device-map", "auto"], "locos: --device and --device-map exclude"),
    ],
)
def test_wrong_arguments(home, tmp_path, capsys, more, message):
    from lm_eval_locos.cli import main

    with pytest.raises(SystemExit) as ended:
        main([*command(home, "--output", str(tmp_path / "o"), *more)[3:]])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_batches_of_processes_are_a_partition(home):
    engine = Engine(*loaded(home), methods=["locos"])
    found, _ = probes.load(str(home / "probes.jsonl"), engine.tokenizer)
    batches = engine.plan([p.trial for p in found], batch_size=2)
    for world in (1, 2, 3, 20):
        parts = [list(runner._own(batches, rank, world)) for rank in range(world)]
        assert sorted(number for part in parts for number in part) == list(range(len(batches)))


def test_heads_are_named_by_layer_and_head(home, whole):
    found, _ = whole
    result = next(result for result in found.results if result.passed)
    first = found.rankings["locos"].scores[Head(2, 1)][0]
    assert first == pytest.approx(float(result.scores["locos"][2, 1]), rel=1e-6)
