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
from lm_eval_locos.detection import rankings, runner
from lm_eval_locos.detection.batches import Trial
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
    with pytest.raises(DataError, match="another run's results: methods"):
        detect(*loaded(home), **options(home, output=folder, resume=True, methods="locos"))


def test_the_order_of_methods_does_not_matter(home, tmp_path, monkeypatch):
    """Neither to a finished run nor to an unfinished one nor to what is written."""
    first, second = ["wu", "headkv", "locos"], "locos,wu headkv"
    detect(*loaded(home), **options(home, output=tmp_path / "a", methods=first))
    write = module._write
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", lambda *_: None)
        detect(*loaded(home), **options(home, output=tmp_path / "b", methods=first))
    assert module._write is write
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", None)  # nothing runs
        for name in "ab":
            more = {"output": tmp_path / name, "resume": True, "methods": second}
            again = detect(*loaded(home), **options(home, **more))
            assert list(again.rankings) == ["locos", "wu", "headkv"]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


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
    ("wrong", "message"),
    [
        ({"methods": ["lokos"]}, "'lokos' is not known. Use all, or some of locos, dla"),
        ({"methods": "lokos"}, "'lokos' is not known"),
        ({"methods": []}, "no method"),
        ({"methods": " ,"}, "no method"),
        ({"methods": 3}, "methods=3: expected names"),
        ({"methods": [3]}, r"methods=\[3\]: expected names"),
        ({"lengths": "200:x:3"}, "lengths='200:x:3': expected different numbers"),
        ({"lengths": {}}, "lengths={}: expected"),
        ({"depths": 101}, "depths=101: expected different numbers from 0 to 100"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: expected a whole number, at least 1"),
        ({"max_new_tokens": -5}, "max_new_tokens=-5"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"batch_size": 0}, "batch_size=0: expected"),
        ({"batch_size": "many"}, "batch_size='many': expected"),
        ({"num_trials": 0}, "num_trials=0"),
        ({"data": "nowhere"}, "data=nowhere: expected nolima"),
    ],
)
def test_wrong_arguments_of_the_function(home, wrong, message):
    """Refused before the model is looked at."""
    with pytest.raises(LocosError, match=message):
        detect(None, None, **options(home, **wrong))


def test_what_the_function_takes(home, tmp_path):
    """The same forms as the command line."""
    words = [f"w{n % 80 + 5}" for n in range(60)]
    row = {"context": " ".join(words), "needle": "w90 w91", "question": "w3", "answer": "w1"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    data = tmp_path / "p.jsonl"
    for methods, expected in (("headkv", ["headkv"]), (("headkv",), ["headkv"])):
        for lengths, tokens in (("20:40:3", [20, 30, 40]), (30, [30]), ("20", [20]), ([20], [20])):
            found = detect(
                *loaded(home),
                data=data,
                lengths=lengths,
                depths=50,
                methods=methods,
                num_trials=len(tokens),
                progress=False,
            )
            assert list(found.rankings) == expected
            assert sorted(probe.facts["length"] for probe in found.probes) == tokens
            assert found.rankings["headkv"].meta["data"]["lengths"] == tokens
    assert module.chosen_methods(["all"]) == module.chosen_methods("all") == ONE_PASS
    assert module.chosen_methods(["cri", "all", "locos"]) == [*ONE_PASS, "cri"]


def test_a_prompt_that_does_not_fit(home, tmp_path):
    fixed = (
        r"trial p\d: the prompt has \d+ tokens and needs 240 .* Use shorter contexts in the file"
    )
    with pytest.raises(DataError, match=fixed):
        detect(*loaded(home), **options(home, max_new_tokens=240))
    words = " ".join(f"w{n % 80 + 5}" for n in range(60))
    row = {"context": words, "needle": "w90 w91", "question": "w3", "answer": "w1"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"needs 240 .* Use shorter --lengths"):
        detect(*loaded(home), **options(home, data=tmp_path / "p.jsonl", max_new_tokens=240))


@pytest.mark.parametrize(
    ("data", "advised"),
    [
        ("nolima", "shorter --lengths, --data niah, another --needle-set, or a larger"),
        ("niah", "answers: shorter --lengths, or a larger"),
        ("my.jsonl", "answers: shorter contexts, easier questions, or a larger"),
    ],
)
def test_advice_where_no_trial_passes(bytewise, data, advised):
    trials = [Trial(tuple(bytewise.encode("Question? Answer:")), (0, 2), "Yuki")] * 4
    thought = "<think>\nThe question is"

    def result(text):
        shown = "" if text.startswith("<think>") and "</think>" not in text else text
        return TrialResult(tuple(bytewise.encode(text)), shown, (), False, {})

    def said(*texts):
        with pytest.raises(DataError) as error:
            runner.check_passed(
                trials, [result(text) for text in texts], data=data, tokenizer=bytewise
            )
        return str(error.value)

    plain = said("Zoe", "<think>a</think>Zoe", "", "Zoe")
    assert advised in plain
    assert "thinking" not in plain
    assert "generated 'Zoe'" in plain
    thinking = said(thought, "Zoe", thought, thought)
    assert advised in thinking
    assert "asked for 'Yuki', cut off while thinking, after '<think>\\nThe question is'" in thinking
    assert "In 3 trials the model was still thinking" in thinking
    assert "larger --max-new-tokens" in thinking
    assert "generated ''" not in thinking


def test_thinking_that_the_prompt_began(bytewise):
    trial = Trial(tuple(bytewise.encode("Who?<think>\n")), (0, 2), "Yuki")
    result = TrialResult(tuple(bytewise.encode("It may be")), "", (), False, {})
    with pytest.raises(DataError, match="cut off while thinking, after 'It may be'"):
        runner.check_passed([trial], [result], data="nolima", tokenizer=bytewise)


# -- the record and the card -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commit", "asked", "expected", "shown"),
    [
        (None, None, (None, None), "revision none"),
        (None, "main", ("main", None), "revision main"),
        ("c0ffee", None, ("c0ffee", None), "revision c0ffee"),
        ("c0ffee", "main", ("c0ffee", "main"), "revision c0ffee (asked for as main)"),
        ("c0ffee", "c0ffee", ("c0ffee", None), "revision c0ffee"),
    ],
)
def test_the_revision_is_the_commit(home, commit, asked, expected, shown):
    model, tokenizer = loaded(home)
    model.config._commit_hash = commit
    found = detect(model, tokenizer, **options(home, methods="headkv", revision=asked))
    meta = found.rankings["headkv"].meta
    assert (meta["revision"], meta.get("revision_requested")) == expected
    assert f", {shown}, float32 |" in rankings.card(found.rankings)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("given", [None, "my/adapter"])
def test_the_adapter_is_in_the_record(home, native, given):
    from peft import LoraConfig, get_peft_model, inject_adapter_in_model

    model, tokenizer = loaded(home)
    found = detect(model, tokenizer, **options(home, methods="headkv", name="tiny"))
    assert found.rankings["headkv"].meta["peft"] is None
    assert "| model | tiny, revision" in rankings.card(found.rankings)
    config = LoraConfig(r=2, target_modules=["q_proj"])
    if native:
        # What transformers' own loading of an adapter leaves behind.
        inject_adapter_in_model(config, model, "second")
        model._hf_peft_config_loaded, model.peft_config = True, {"second": config}
    else:
        model = get_peft_model(model, config, "second")
    found = detect(
        model.eval(), tokenizer, **options(home, methods="headkv", name="tiny", peft=given)
    )
    expected = given or "second (LORA)"
    assert found.rankings["headkv"].meta["peft"] == expected
    assert f"| model | tiny with adapter {expected}, revision" in rankings.card(found.rankings)


def ranked(scores, trials=3, **data):
    """A ranking of 1 x n heads whose trials all give the same."""
    meta = {
        "model": "m",
        "revision": None,
        "dtype": "float32",
        "dataset": "nolima",
        "split": "s",
        "fingerprint": {
            "num_layers": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
            "architecture": "tiny",
        },
        "data": {"source": "bundled"} | data,
        "num_trials_total": 4,
        "num_trials_passed": 1,
        "pass_rate": 0.25,
        "seed": 1,
        "chat_template": True,
        "plugin_version": "0",
        "versions": {},
    }
    return HeadRanking({Head(0, i): (x,) * trials for i, x in enumerate(scores)}, meta)


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        ([0, 3, 0, 1, 0], "0-1, 0-3 (no other head scored) | 1.00 (of 2) |"),
        ([0, 3, 0, 1, -1], "0-1, 0-3 (no other head is above zero) | 1.00 (of 2) |"),
        ([0, 0, 0], "no head scored | none |"),
        ([0, -1, 0], "no head is above zero | none |"),
        ([-2, -1, 0], "0-2, 0-1, 0-0 | 1.00 (of 3) |"),
        (
            [1.0 * n for n in range(1, 12)] + [0, 0],
            "0-10, 0-9, 0-8, 0-7, 0-6, 0-5, 0-4, 0-3, 0-2, 0-1 | 1.00 |",
        ),
    ],
)
def test_heads_that_tie_at_zero_are_not_on_the_card(scores, line):
    card = rankings.card({"wu": ranked(scores)})
    (found,) = [row for row in card.splitlines() if row.startswith("| wu |")]
    assert found == f"| wu | share of the needle's tokens | {line}"


def test_the_card_has_a_files_grid():
    card = rankings.card(
        {"wu": ranked([1, 2], source="file", lengths=[10, 20], depths=[0.0, 50.0])}
    )
    assert "| data | nolima, source file, lengths 10, 20 tokens, depths 0, 50 % |" in card
    assert "source file, contexts as long as they are" in rankings.card(
        {"wu": ranked([1, 2], source="file")}
    )


def test_guessing_stands_beside_the_pass_rate():
    assert "guessing" not in rankings.card({"wu": ranked([1, 2])})
    card = rankings.card({"wu": ranked([1, 2], candidates=7)})
    assert "| guessing | among the 7 names in the planted sentences would pass about 1/7" in card
    # A pass rate of 0.25, against twice 1/7 and twice 1/9.
    assert rankings.near_guessing(ranked([1], candidates=7).meta)
    assert not rankings.near_guessing(ranked([1], candidates=9).meta)
    assert not rankings.near_guessing(ranked([1]).meta)


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
        (["--device-map", "some"], "--device-map some cannot be loaded: When passing"),
        (["--device", "cuda:99"], "locos: --device cuda:99: PyTorch "),
        (["--device", "nonsense"], "locos: --device nonsense: no such device. Use cpu, cuda"),
        (["--device", "meta"], "locos: --device meta: no such device"),
        (["--max-new-tokens", "0"], "--max-new-tokens: '0' is not a whole number from 1 up"),
        (["--max-new-tokens", "-5"], "--max-new-tokens: '-5' is not a whole number from 1 up"),
        (["--num-trials", "0"], "--num-trials: '0' is not a whole number from 1 up"),
        (["--lengths", "300:301:3"], "locos: lengths='300:301:3': expected different numbers"),
        (["--revision", "main"], "locos: --revision main: --model "),
        (["--peft", "/no/such"], "locos: --peft /no/such cannot be loaded: "),
        (["--tokenizer", "/no/such"], "locos: --tokenizer /no/such cannot be loaded: "),
        (["--output", "/proc/nope"], "locos: --output /proc/nope: cannot be written to ("),
        (["--output", "x" * 5000], "cannot be written to (File name too long)"),
    ],
)
def test_wrong_arguments(home, tmp_path, capsys, more, message):
    from lm_eval_locos.cli import main

    with pytest.raises(SystemExit) as ended:
        main([*command(home, "--output", str(tmp_path / "o"), *more)[3:]])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert "gguf-file;" not in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "more",
    [
        ["--methods", "lokos"],
        ["--lengths", "300:301:3"],
        ["--data", "missing.jsonl"],
        ["--output", "/proc/nope"],
        ["--device", "cuda:99"],
        ["--peft", "/no/such"],
        ["--tokenizer", "/no/such"],
    ],
)
def test_wrong_arguments_are_refused_before_the_model_is_loaded(
    home, tmp_path, capsys, monkeypatch, more
):
    from lm_eval_locos.cli import main

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(SystemExit) as ended:
        main([*command(home, "--output", str(tmp_path / "o"), *more)[3:]])
    assert ended.value.code == 2
    assert more[1] in capsys.readouterr().err


def test_a_file_above_the_output_folder(home, tmp_path, capsys):
    from lm_eval_locos.cli import main

    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/sub", "file/sub/sub"):
        for resume in ((), ("--resume",)):
            with pytest.raises(SystemExit) as ended:
                main([*command(home, "--output", str(tmp_path / name), *resume)[3:]])
            assert ended.value.code == 2
            said = capsys.readouterr().err
            assert f"locos: {tmp_path / 'file'} is a file, and --output is a folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_models_that_cannot_be_loaded(home, tmp_path, capsys):
    import shutil

    from lm_eval_locos.cli import main

    def said(change, *more):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(home / "model", folder)
        change(folder)
        with pytest.raises(SystemExit) as ended:
            main(
                [*command(home, "--output", str(tmp_path / "o"), "--model", str(folder), *more)[3:]]
            )
        assert ended.value.code == 2
        return capsys.readouterr().err.strip()

    def cut(folder):
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])

    def untokenised(folder):
        for path in folder.glob("tokenizer*"):
            path.unlink()

    whole = said(cut)
    assert whole.startswith(
        f"locos: --model {tmp_path / 'model'} cannot be loaded: Error while deser"
    )
    assert whole.endswith("damaged or cut short: download or copy it again.")
    tokenizer = said(untokenised)
    assert f"--model {tmp_path / 'model'}: its tokenizer cannot be loaded: " in tokenizer
    assert tokenizer.endswith("Name another one with --tokenizer ID.")
    nothing = said(lambda folder: (folder / "config.json").write_text("{"))
    assert f"--model {tmp_path / 'model'} cannot be loaded: " in nothing
    assert "GGUF" not in nothing
    lost = said(lambda folder: [(folder / "a.gguf").touch(), (folder / "config.json").unlink()])
    assert lost.endswith("for a GGUF file add --gguf-file.")
    asked = said(lambda folder: None, "--gguf-file", "none.gguf")
    assert f"--model {tmp_path / 'model'} --gguf-file none.gguf cannot be loaded: " in asked
    assert asked.endswith("with that file.")


def test_ctrl_c(home, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(home, "--output", str(out)), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None and not list(out.glob("checkpoint/*.safetensors")):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.splitlines()[-1] == (
        "locos: interrupted. The same command with --resume goes on where it stopped."
    )


@pytest.mark.parametrize("words", [("heads", "show", "a.json"), ("detect",)])
def test_ctrl_c_in_any_command(home, monkeypatch, capsys, words):
    from lm_eval_locos.cli import detect as detecting
    from lm_eval_locos.cli import heads, main

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(heads, "run_show", interrupted)
    monkeypatch.setattr(detecting, "detect", interrupted)
    more = ("--model", "m", "--output", "o") if words == ("detect",) else ()
    with pytest.raises(SystemExit) as ended:
        main([*words, *more])
    assert ended.value.code == 130
    advice = " The same command with --resume goes on where it stopped." if more else ""
    assert capsys.readouterr().err == f"locos: interrupted.{advice}\n"


@pytest.mark.parametrize(
    ("methods", "answer", "said"),
    [
        ("headkv", "nothing", ["10 trials scored, 0 passed", "Only 10 trials were scored: the"]),
        ("headkv,locos", None, ["7 of 10 trials passed (0.70)", "Only 7 trials passed: the order"]),
    ],
)
def test_closing_lines(home, tmp_path, capsys, methods, answer, said):
    from lm_eval_locos.cli import main

    rows = [json.loads(line) for line in (home / "probes.jsonl").read_text().splitlines()]
    rows = [row | ({"answer": answer} if answer else {}) for row in rows]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    more = (
        "--data",
        str(tmp_path / "p.jsonl"),
        "--methods",
        methods,
        "--output",
        str(tmp_path / "o"),
    )
    with pytest.raises(SystemExit) as ended:
        main([*command(home, *more)[3:]])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for text in said:
        assert text in shown
    assert "Only 0 trials" not in shown


@pytest.mark.parametrize(("rate", "warned"), [(0.28, True), (0.29, False)])
def test_a_pass_rate_near_guessing(capsys, rate, warned):
    from lm_eval_locos.cli.detect import _report

    passed = round(100 * rate)
    results = [TrialResult((), "", (), i < passed, {}) for i in range(100)]
    ranking = ranked([1, 2], candidates=7)
    ranking.meta["pass_rate"] = rate
    _report(module.Detection({"wu": ranking}, [], results), "out")
    shown = capsys.readouterr().out
    assert ("guessing among the 7 names in the planted sentences would pass" in shown) == warned


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
