"""Probes: from NoLiMa's detection part, literal needles, and a user's file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from lm_eval_locos import probes
from lm_eval_locos.errors import DataError
from lm_eval_locos.families import calibration_prompts, nolima
from lm_eval_locos.families.grids import numbers
from lm_eval_locos.probes import jsonl
from lm_eval_locos.sources.needles import load_benchmark


@pytest.fixture(autouse=True)
def bundled(monkeypatch):
    monkeypatch.setenv("LOCOS_DATA", "bundled")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A tokenizer that keeps every word and blank of the bundled sample."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


GRID = {"lengths": (1500, 2500), "depths": (0, 50, 100)}  # bytes


def shown(tokenizer, probe):
    return tokenizer.decode(probe.trial.ids[slice(*probe.trial.needle)])


@pytest.mark.parametrize("data", ["nolima", "niah"])
def test_needles_stand_where_they_should(real, data):
    found, source = probes.load(data, real, num_trials=12, **GRID)
    assert len({probe.id for probe in found}) == 12
    for probe in found:
        needle, gold = probe.facts["needle"], probe.trial.gold
        assert shown(real, probe).strip() == needle
        assert gold in needle
        assert gold not in probe.facts["question"]
        prompt = real.decode(probe.trial.ids)
        assert prompt.count(needle) == 1
        assert probe.facts["prompt_tokens"] == len(probe.trial.ids)
    assert (source["dataset"], source["split"], source["source"]) == (data, "detection", "bundled")
    cells = Counter((probe.facts["length"], probe.facts["depth"]) for probe in found)
    # Twelve trials over six cells; NoLiMa's also take turns with nine tests.
    assert len(cells) == 6
    assert max(cells.values()) <= 2 + (data == "nolima")
    assert source["trials_sha256"] == probes.fingerprint(found)


def test_niah_asks_literally(real):
    (probe,), _ = probes.load("niah", real, num_trials=1, **GRID)
    asked = probe.facts["question"].removeprefix("What is ").removesuffix("?")
    assert probe.facts["needle"].lower() == f"{asked.lower()} is {probe.trial.gold}."


@pytest.mark.parametrize("data", ["nolima", "niah"])
def test_seeds(real, data):
    def load(seed):
        return probes.load(data, real, num_trials=8, seed=seed, **GRID)

    again = load(1)
    assert load(1) == again
    assert [p.id for p in load(2)[0]] != [p.id for p in again[0]]


def test_detection_shares_nothing_with_evaluation_and_calibration(real, tokenizer):
    """Needles, characters and books; against the documents themselves, not the split."""
    found, _ = probes.load("nolima", real, num_trials=54, **GRID)
    evaluated = nolima.load(tokenizer=real, lengths=[1500], depths=[50])["test"]
    bench = load_benchmark("needle_set.json")
    keys = {entry.id: bench.keys[entry.needle] for entry in bench.entries}
    for fact in ("character", "book"):
        used = {probe.facts[fact] for probe in found}
        assert used
        assert not used & set(evaluated[fact])
    assert not {keys[p.facts["cluster"]] for p in found} & {keys[c] for c in evaluated["cluster"]}
    calibration, _ = calibration_prompts("nolima", tokenizer=tokenizer, count=50)
    for probe in found:
        assert not any(probe.facts["needle"] in prompt for prompt in calibration)


def test_a_shared_book_is_found_by_its_hash(real, monkeypatch):
    bench = load_benchmark("needle_set.json")
    detection, evaluation = bench.part("detection").books, bench.part("evaluation").books
    text = next(iter(detection.values()))
    books = bench.books | {next(iter(evaluation)): text}
    mixed = replace(bench, books=books)
    monkeypatch.setattr(nolima, "load_benchmark", lambda _: mixed)
    with pytest.raises(DataError, match=r"detection and evaluation share .* \(sha256"):
        probes.load("nolima", real, num_trials=1, **GRID)
    with pytest.raises(DataError, match="evaluation and detection share"):
        nolima.load(tokenizer=real, lengths=[1500])


def test_more_trials_than_there_are(real):
    with pytest.raises(DataError, match=r"9999 trials were asked .* has 54 on 2 lengths and 3"):
        probes.load("nolima", real, num_trials=9999, **GRID)
    assert len(probes.load("nolima", real, num_trials=54, **GRID)[0]) == 54


@pytest.mark.parametrize("count", [0, -3])
def test_no_trials(real, count):
    with pytest.raises(DataError, match=f"num_trials={count}"):
        probes.load("niah", real, num_trials=count)


def test_unknown_data(real):
    with pytest.raises(DataError, match="data=nolimo: expected nolima, niah, or the path"):
        probes.load("nolimo", real)


# -- a user's file --------------------------------------------------------------------------------

ROW = {
    "context": "It rained. Yuki lives next to the Louvre. Nobody came.",
    "needle": "Yuki lives next to the Louvre.",
    "question": "Who lives in Paris?",
    "answer": "Yuki",
}
HAYSTACK = ROW | {"context": "It rained all day. Nobody came by. The end was near. " * 4}


def written(path, *rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_a_needle_in_place(real, tmp_path):
    path = written(tmp_path / "p.jsonl", ROW, "", ROW | {"id": "b", "answer": "Zoé 👩‍🚀"})
    found, source = probes.load(str(path), real)
    assert sorted(probe.id for probe in found) == ["b", "line1"]
    for probe in found:
        assert shown(real, probe).strip() == ROW["needle"]
        assert "rained. Yuki" in real.decode(probe.trial.ids)
    assert (source["dataset"], source["split"]) == ("p.jsonl", "as given")


def test_a_needle_to_place(real, tmp_path):
    path = written(tmp_path / "p.jsonl", HAYSTACK)
    found, _ = probes.load(str(path), real, num_trials=6, lengths=(100, 200), depths=(0, 50, 100))
    assert {(p.facts["length"], p.facts["depth"]) for p in found} == {
        (length, depth) for length in (100, 200) for depth in (0, 50, 100)
    }
    for probe in found:
        assert shown(real, probe).strip() == ROW["needle"]
    (whole,), _ = probes.load(str(path), real)
    assert real.decode(whole.trial.ids).count("rained") == 4


def test_rows_and_trials(real, tmp_path):
    path = written(tmp_path / "p.jsonl", ROW, HAYSTACK)
    assert len(probes.load(str(path), real, num_trials=2)[0]) == 2
    with pytest.raises(DataError, match=r"3 trials were asked for, and .* gives 2"):
        probes.load(str(path), real, num_trials=3)
    with pytest.raises(DataError, match="row line1 has its needle in its context"):
        probes.load(str(path), real, lengths=(100,))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["{"], "line 1: not JSON"),
        (["[1]"], "line 1: expected an object"),
        ([ROW, {**ROW, "answer": ""}], "line 2: answer is ''"),
        ([{**ROW, "needle": None}], "line 1: needle is 'None'"),
        ([{"ctx": "a"}], "line 1: context is 'None', expected text. Columns: .* found: ctx"),
        ([ROW | {"context": ROW["context"] * 2}], "line 1: the context has the needle 2 times"),
        ([ROW | {"id": "a"}, ROW | {"id": "a"}], "two rows have the same id"),
        ([""], "no rows"),
    ],
)
def test_wrong_rows(tmp_path, rows, message):
    with pytest.raises(DataError, match=message):
        jsonl.read(written(tmp_path / "p.jsonl", *rows))


def test_not_text(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        jsonl.read(tmp_path / "p.jsonl")


def test_grids_of_the_command_line():
    assert numbers("lengths", "1000:16000:5") == (1000, 4750, 8500, 12250, 16000)
    assert numbers("depths", "0:100:3") == (0, 50, 100)
