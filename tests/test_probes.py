"""Probes: from NoLiMa's detection part, literal needles, and a user's file."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
        *(
            ([ROW, ROW | {"context": change(ROW["context"])}], "line 2: .* Copy the needle exactly")
            for change in (
                str.upper,
                str.swapcase,
                lambda text: text.replace(" ", "  "),
                lambda text: text.replace("next to ", "next\nto\u00a0"),
                lambda text: text.replace("Yuki lives", "yuki\tlives"),
            )
        ),
        ([ROW | {"needle": " Yuki lives  next to the Louvre. "}], "line 1: .* Copy the needle"),
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


@st.composite
def plans(draw):
    rows = draw(st.integers(1, 12))
    lengths = draw(st.lists(st.integers(1, 10**5), min_size=1, max_size=5, unique=True))
    depths = draw(st.lists(st.integers(0, 100), min_size=1, max_size=10, unique=True))
    count = draw(st.none() | st.integers(1, rows * len(lengths) * len(depths)))
    return rows, lengths, depths, count, draw(st.integers(0, 9))


@given(plan=plans())
@settings(max_examples=150, deadline=None)
def test_any_number_of_a_files_trials_is_balanced(tmp_path_factory, plan):
    """Over cells, lengths, depths and rows; no row meets a cell twice."""
    rows, lengths, depths, count, seed = plan
    path = tmp_path_factory.getbasetemp() / "balanced.jsonl"
    written(path, *(HAYSTACK | {"id": f"r{i}"} for i in range(rows)))

    def planned():
        return jsonl.plan(path, count, seed, lengths=lengths, depths=depths)

    found = [(row["id"], *cell) for row, cell in planned()]
    assert found == [(row["id"], *cell) for row, cell in planned()]
    assert len(set(found)) == len(found) == (count or rows)

    def spread(take, values):
        times = Counter(map(take, found))
        return max(times.values()) - min(times[value] for value in values)

    assert spread(lambda one: one[0], {f"r{i}" for i in range(rows)}) <= 1
    assert spread(lambda one: one[1:], {(n, d) for n in lengths for d in depths}) <= 1
    assert spread(lambda one: one[1], lengths) <= 1
    assert spread(lambda one: one[2], depths) <= 1


def test_a_files_trials_meet_every_length_and_depth_alike(real, tmp_path):
    path = written(tmp_path / "p.jsonl", *(HAYSTACK | {"id": f"r{i}"} for i in range(20)))
    grid = {"lengths": "100:260:5", "depths": "0:90:10"}
    found, source = probes.load(path, real, num_trials=100, **grid)
    assert Counter(p.facts["length"] for p in found) == dict.fromkeys((100, 140, 180, 220, 260), 20)
    assert Counter(p.facts["depth"] for p in found) == dict.fromkeys(range(0, 100, 10), 10)
    assert source["lengths"] == [100, 140, 180, 220, 260]
    assert source["depths"] == list(range(0, 100, 10))
    met = Counter((p.id.split("_")[0], p.facts["length"]) for p in found)
    assert set(met.values()) == {1}  # every row meets every length
    (few, _), (other, _) = (probes.load(path, real, seed=seed, **grid) for seed in (1, 2))
    assert Counter(p.facts["length"] for p in few) == dict.fromkeys(source["lengths"], 4)
    assert [p.id for p in few] != [p.id for p in other]


def test_what_the_record_says_of_a_files_grid(real, tmp_path):
    """Depths where needles are placed, lengths where they are asked for."""
    _, source = probes.load(written(tmp_path / "h.jsonl", HAYSTACK), real)
    assert source["depths"] == list(nolima.PAPER_DEPTHS)
    assert "lengths" not in source
    _, source = probes.load(written(tmp_path / "p.jsonl", ROW), real)
    assert not {"lengths", "depths"} & set(source)


def test_how_many_names_a_guess_has(real):
    """The number in the record is that of the names in each context, counted."""
    found, source = probes.load("nolima", real, num_trials=20, **GRID)
    bench = load_benchmark("needle_set.json").part("detection")
    people = {name for entry in bench.entries for name in entry.characters}
    for probe in found:
        words = real.decode(probe.trial.ids).rsplit("Question:", 1)[0].replace(".", " ").split()
        assert len(people & set(words)) == source["candidates"] == 7
    assert "candidates" not in probes.load("niah", real, num_trials=1, **GRID)[1]


@pytest.mark.parametrize("data", ["nolima", "niah", "file"])
@pytest.mark.parametrize(
    ("lengths", "rounded"),
    [("1500:1502:3", [1500, 1501, 1502]), ("1500.4,2000.6", [1500, 2001]), (1500.2, [1500])],
)
def test_lengths_are_whole(real, tmp_path, data, lengths, rounded):
    if data == "file":
        data = written(tmp_path / "p.jsonl", *(HAYSTACK | {"id": f"r{i}"} for i in range(3)))
    found, source = probes.load(data, real, num_trials=3, lengths=lengths, depths=(0, 50))
    assert source["lengths"] == rounded
    assert {type(n) for n in source["lengths"]} == {int}
    assert {probe.facts["length"] for probe in found} <= set(rounded)


@pytest.mark.parametrize("lengths", ["300:301:3", "300,300.2", [299.9, 300], [5, 5.0]])
@pytest.mark.parametrize("data", ["nolima", "niah", "file"])
def test_lengths_that_are_the_same_when_rounded(real, tmp_path, data, lengths):
    if data == "file":
        data = written(tmp_path / "p.jsonl", HAYSTACK)
    with pytest.raises(DataError, match=r"^lengths=.*: expected different numbers from 1, .*round"):
        probes.load(data, real, lengths=lengths)
    with pytest.raises(DataError, match=r"^lengths="):
        nolima.detection_part("needle_set.json", lengths, None)
    with pytest.raises(DataError, match=r"^lengths="):
        nolima.load(tokenizer=real, lengths=lengths)


def test_grids_of_the_command_line():
    assert numbers("lengths", "1000:16000:5") == (1000, 4750, 8500, 12250, 16000)
    assert numbers("depths", "0:100:3") == (0, 50, 100)
