"""Hostile files: each loads, or is refused by a message that names it and says what to do.

Valid files are damaged at random, in their values, in their text and in their bytes. Whatever the
damage, no other exception comes out, no command shows a traceback, and nothing is half written.
LOCOS_FUZZ=20 draws twenty times as many.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import math
import os
import re
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_files import binary, write_ranking, write_run

from lm_eval_locos import probes
from lm_eval_locos.architecture import Head
from lm_eval_locos.cli import main
from lm_eval_locos.errors import DataError, LocosError, RankingError
from lm_eval_locos.families import arithmetic, babilong, musique, nolima, parametric
from lm_eval_locos.gates.config import read_gates
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.sources import needles

FINGERPRINT = {"architecture": "llama", "num_layers": 3, "num_heads": 4, "hidden_size": 32}
NEXT_STEP = re.compile(
    r"\b([Ee]xpected|[Gg]ive|[Uu]se|[Rr]emove|[Rr]un|[Cc]opy|[Ww]rite|[Cc]hoose|[Ss]ave|[Aa]dd|Ask"
    r"|Keep|[Ll]eave|Name|Put|Was|Known|Compare|largest k)\b"
)


def fuzzed(examples):
    return settings(
        max_examples=examples * int(os.environ.get("LOCOS_FUZZ", "1")),
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


# -- damage ------------------------------------------------------------------------------------

RAW = {
    # What json.dumps cannot write; these marks are replaced in its text.
    "@digits": "1" * 5000,
    "@overflow": "1e999",
    "@large": "9" * 400,
    "@nested": "[" * 400 + "]" * 400,
    "@deep": '{"a":' * 3000 + "1" + "}" * 3000,
    "@half": '"\\ud83d"',
    "@zero": '"\\u0000"',
}
VALUES = st.one_of(
    st.sampled_from([*RAW, None, True, 0, -1, 0.5, 2**64, -(2**63), "", " ", "x", [], {}, [[]]]),
    st.sampled_from([math.nan, math.inf, -math.inf, 1.7e308, 5e-324, -0.0]),
    st.sampled_from(["\x1b[2J", "\u2028", "\u202e", "{CHAR}", "{9}", "{haystack}", "<s>", "٣"]),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.sampled_from([None, 1, "a", math.nan, [1], {}]), max_size=3),
    st.dictionaries(st.sampled_from(["0-0", "a", "id"]), st.none() | st.integers(), max_size=2),
)
KEYS = st.sampled_from(
    ["1--2", "-1-3", "٣-٤", "0-0", "00-0", " 0-1 ", "1-2-3", "1", "", "0-" + "9" * 5000, "x", "½-1"]
)


def places(content, path=()):
    """The paths of every value inside."""
    children = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in children:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@st.composite
def damaged(draw, content, keys=KEYS):
    """JSON text of ``content`` with a few of its values and keys replaced."""
    content = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 2))):
        if not (paths := list(places(content))):
            break
        *path, last = draw(st.sampled_from(paths))
        parent = content
        for key in path:
            parent = parent[key]
        how = draw(st.sampled_from(["value", "value", "value", "drop", "key"]))
        if how == "value":
            parent[last] = copy.deepcopy(draw(VALUES))
        elif how == "drop":
            del parent[last]
        elif isinstance(parent, dict):
            parent[draw(keys)] = parent.pop(last)
    text = json.dumps(content, ensure_ascii=draw(st.booleans()))
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    if draw(st.integers(0, 9)) == 0:  # a key twice
        text = re.sub(r'("[^"]+"): ', r"\1: 1, \1: ", text, count=1)
    return text


@st.composite
def in_bytes(draw, text):
    """The text's bytes, some of them damaged too."""
    data = draw(text).encode("utf-8", "surrogatepass")
    how = draw(st.sampled_from([*["whole"] * 6, "cut", "bom", "insert", "utf-16", "flip"]))
    at = draw(st.integers(0, len(data)))
    if how == "cut":
        return data[:at]
    if how == "bom":
        return b"\xef\xbb\xbf" + data
    if how == "insert":
        return data[:at] + draw(st.sampled_from([b"\0", b"\xff", b"\xe2\x80", b"\n"])) + data[at:]
    if how == "utf-16":
        return data.decode("utf-8", "replace").encode("utf-16")
    if how == "flip" and at < len(data):
        return data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
    return data


def explained(load, *names):
    """What ``load`` gives, or None where it refuses; the message names one of ``names``."""
    try:
        return load()
    except LocosError as error:
        said = str(error)
    assert any(name in said for name in names), said
    assert NEXT_STEP.search(said), said
    return None


def command(*words):
    """Exit status, standard output and standard error of ``locos``; both as strict as a file."""
    out, err = (
        io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors)
        for errors in ("strict", "backslashreplace")
    )
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main([str(word) for word in words])
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return ended.value.code, *texts


def unharmed(status, out, err):
    """Asserts that a command did its work or said what is wrong with its input."""
    assert status in (0, 1, 2)
    assert "Traceback" not in err
    lines = err.replace("\r", "\n").splitlines()  # of progress bars too
    assert (status == 2) == any(line.startswith("locos: ") for line in lines), err
    if status == 2:
        assert NEXT_STEP.search(err), err


def snapshot(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- rankings ----------------------------------------------------------------------------------

SCORES = {
    f"{layer}-{head}": [0.1 * layer, 0.2 * head, 1.0] for layer in range(3) for head in (0, 3)
}
FORMS = {
    "wu": SCORES | {"1-1": []},
    "envelope": {
        "meta": {"method": "dla", "model": "org/m", "fingerprint": FINGERPRINT, "seed": 3},
        "scores": SCORES,
        "trial_ids": ["a", "b", "c"],
        "confidence_intervals": {"0-0": [0.0, 1.0]},
    },
    "ours": {
        "meta": {"method": "locos", "fingerprint": FINGERPRINT, "num_trials_passed": 3, "k": 2},
        "scores": SCORES,
        "trial_ids": ["a", "b", "c"],
        "answer_steps": [1, 3, 2],
    },
}
RANKINGS = st.sampled_from([*FORMS.values()]).flatmap(damaged)


@given(in_bytes(RANKINGS))
@fuzzed(150)
def test_a_damaged_ranking(tmp_path, data):
    path = tmp_path / "damaged.json"
    path.write_bytes(data)
    ranking = explained(lambda: HeadRanking.load(path), f"heads={path}")
    if ranking is None:
        return
    assert all(map(math.isfinite, ranking.pooled.values()))
    assert ranking.top(len(ranking.order)) == ranking.order
    again = HeadRanking.from_bytes(ranking.to_json().encode())
    assert (again.scores, again.meta) == (ranking.scores, ranking.meta)
    assert again.confidence_intervals == ranking.confidence_intervals
    with contextlib.suppress(RankingError):
        ranking.check_fits(FINGERPRINT)


@given(in_bytes(RANKINGS), st.sampled_from([(), ("--json",)]))
@fuzzed(80)
def test_a_damaged_ranking_on_the_command_line(tmp_path, data, form):
    path, good = tmp_path / "damaged.json", tmp_path / "good.json"
    path.write_bytes(data)
    good.write_text(json.dumps(FORMS["ours"]))
    before = snapshot(tmp_path)
    few = ("--resamples", 20, *form)
    for words in (("show", path, *few), ("compare", good, path, "--k", 2, *few)):
        status, out, err = command("heads", *words)
        unharmed(status, out, err)
        if status == 0 and form:
            json.loads(out, parse_constant=pytest.fail)
        assert "\x1b" not in out
    assert snapshot(tmp_path) == before


def wrong(key="0-0", value="[1]"):
    return f'{{"{key}": {value}, "0-1": [2]}}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (wrong("1--2"), "the key '1--2' is no head"),
        (wrong("-1-3"), "the key '-1-3' is no head"),
        (wrong("٣-٤"), "the key '٣-٤' is no head"),
        (wrong("0-" + "1" * 5000), "the key '0-1111"),
        (wrong(value="[" + "1" * 5000 + "]"), r"not JSON \(Exceeds the limit"),
        (wrong(value="[" * 900 + "]" * 900), "head 0-0 has '.*, not a list of numbers"),
        (wrong(value="[" * 9000 + "]" * 9000), "not JSON .maximum recursion depth"),
        (wrong(value='{"a": 1}'), "not a list of numbers"),
        (wrong() + "\0", "not JSON"),
        (wrong()[:-1], "not JSON"),
        ('{"scores": {"0-0": [1]}, "answer_steps": [1e3]}', "not a list of counts"),
        (f'{{"scores": {{"0-0": [1]}}, "answer_steps": [{2**63}]}}', "not a list of counts"),
        (
            '{"scores": {"0-0": [1]}, "confidence_intervals": {"0-0": [0, Infinity]}}',
            r"interval of head 0-0 is \[0.0, inf\]",
        ),
    ],
)
def test_rankings_that_are_refused(tmp_path, text, said):
    path = tmp_path / "wrong.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RankingError, match=said) as error:
        HeadRanking.load(path)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("data", [b"\xff\xfe{}", b'{"0-\xe2": [1]}', b'{"0-0": [1], "0-1\xc3'])
def test_bytes_that_are_no_text(tmp_path, data):
    (tmp_path / "r.json").write_bytes(data)
    with pytest.raises(RankingError, match=r"r.json: not JSON \('utf-8' codec can't decode"):
        HeadRanking.load(tmp_path / "r.json")


def test_a_byte_order_mark_is_no_damage(tmp_path):
    (tmp_path / "r.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(FORMS["ours"]).encode())
    assert HeadRanking.load(tmp_path / "r.json").top(1) == (Head(2, 3),)


def test_what_no_file_can_hold_is_not_kept_of_the_meta_data():
    """Half a character, and numbers that are not finite: they would stop a run at its end."""
    text = (
        '{"meta": {"method": "a\\ud800b", "rate": NaN, "all": [1e999, {"x": -Infinity}], "\\udc00":'
        ' 1}, "scores": {"0-0": [1.5], "0-1": []}, "trial_ids": ["\\ud83d"],'
        ' "confidence_intervals": {"0-1": [NaN, NaN]}}'
    )
    ranking = HeadRanking.from_bytes(text.encode())
    assert ranking.meta == {
        "method": "a\ufffdb",
        "rate": None,
        "all": [None, {"x": None}],
        "\ufffd": 1,
    }
    assert ranking.trial_ids == ("\ufffd",)
    assert ranking.confidence_intervals == {}
    assert HeadRanking.from_bytes(ranking.to_json().encode()).meta == ranking.meta


@pytest.mark.parametrize("recorded", ["num_layers", ["num_layers"], 7, True])
def test_a_fingerprint_of_another_form_decides_nothing(recorded):
    content = {"meta": {"fingerprint": recorded}, "scores": {"0-0": [1], "2-3": [2]}}
    ranking = HeadRanking.from_bytes(json.dumps(content).encode())
    ranking.check_fits(FINGERPRINT)
    with pytest.raises(RankingError, match="names head 2-3"):
        ranking.check_fits(FINGERPRINT | {"num_layers": 2})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("~nobody-of-that-name/r.json", "cannot be read"),
        ("a\0b.json", "cannot be read .embedded null byte"),
        ("x" * 5000, "cannot be read .File name too long"),
        ("hf://a b/c d/r.json", "cannot be fetched .HFValidationError"),
        ("hf://", "not understood"),
    ],
)
def test_names_of_rankings(monkeypatch, name, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RankingError, match=said):
        HeadRanking.load(name)


def test_a_folder_is_no_ranking(tmp_path):
    status, _, err = command("heads", "show", tmp_path)
    assert (status, err.startswith(f"locos: heads={tmp_path}: cannot be read (Is a dir")) == (2, 1)


def test_a_damaged_ranking_leaves_the_old_figure(tmp_path):
    (tmp_path / "bad.json").write_text(wrong("٣-٤"))
    (tmp_path / "heads.png").write_bytes(b"old")
    before = snapshot(tmp_path)
    status, _, err = command(
        "heads", "show", tmp_path / "bad.json", "--heatmap", tmp_path / "heads.png"
    )
    unharmed(status, "", err)
    assert (status, snapshot(tmp_path)) == (2, before)


def test_a_huge_ranking_selects_the_right_heads(tmp_path):
    """100 layers of 128 heads with 20 trials each: against a sort of the means."""
    steps = [1 + trial % 3 for trial in range(20)]
    scores = {
        (layer, head): [math.sin(1 + 7919 * layer + 104729 * head + trial) for trial in range(20)]
        for layer in range(100)
        for head in range(128)
    }
    content = {
        "meta": {},
        "scores": {f"{layer}-{head}": values for (layer, head), values in scores.items()},
        "answer_steps": steps,
    }
    (tmp_path / "huge.json").write_text(json.dumps(content))
    ranking = HeadRanking.load(tmp_path / "huge.json")
    pooled = {
        head: sum(n * s for n, s in zip(steps, values, strict=True)) / sum(steps)
        for head, values in scores.items()
    }
    expected = sorted(pooled, key=pooled.get, reverse=True)
    assert ranking.top(200) == tuple(Head(*head) for head in expected[:200])
    assert ranking.bottom(50) == tuple(Head(*head) for head in expected[:-51:-1])
    assert len(ranking.order) == 12_800
    ranking.check_fits(FINGERPRINT | {"num_layers": 100, "num_heads": 128})


# -- probes ------------------------------------------------------------------------------------


PROBES = [
    {
        "id": "a",
        "context": "It rained. Yuki lives next to the Louvre. Nobody came.",
        "needle": "Yuki lives next to the Louvre.",
        "question": "Who lives in Paris?",
        "answer": "Yuki",
    },
    {
        "context": "It rained all day. Nobody came by. The end was near. " * 3,
        "needle": "Leon 👩‍🚀 flew.",
        "question": "Who flew?",
        "answer": "Leon",
    },
]


@given(
    in_bytes(
        st.sampled_from(PROBES)
        .flatmap(lambda row: damaged(row, st.sampled_from(["context", "id", "Needle", ""])))
        .map(lambda line: f"{json.dumps(PROBES[0] | {'id': 'first'})}\n{line}\n")
    )
)
@fuzzed(150)
def test_damaged_probes(tmp_path, bytewise, data):
    path = tmp_path / "probes.jsonl"
    path.write_bytes(data)
    found = explained(lambda: probes.load(str(path), bytewise), str(path), "trial ")
    for probe in found[0] if found else ():
        shown = bytewise.decode(probe.trial.ids[slice(*probe.trial.needle)])
        assert shown == probe.facts["needle"]
        json.dumps(probe.facts, ensure_ascii=False).encode()


def test_line_separators_inside_text_end_no_line(tmp_path, bytewise):
    rows = [
        PROBES[0] | {"context": f"It{mark}rained. {PROBES[0]['needle']}"} for mark in "\u2028\x85"
    ]
    lines = [json.dumps(row | {"id": i}, ensure_ascii=False) for i, row in enumerate(rows)]
    (tmp_path / "p.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    found, _ = probes.load(str(tmp_path / "p.jsonl"), bytewise)
    prompts = {probe.id: bytewise.decode(probe.trial.ids) for probe in found}
    assert "It\u2028rained." in prompts["0"]
    assert "It\x85rained." in prompts["1"]


@pytest.mark.parametrize("data", ["x" * 5000, "a\0b", "/"])
def test_names_of_probes(bytewise, data):
    with pytest.raises(DataError, match="expected nolima, niah, or the path") as error:
        probes.load(data, bytewise)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"context": "\\ud83d"', "line 2: not JSON"),
        (json.dumps(PROBES[0]).replace("Yuki", "\\ud83d"), "line 2: context has '\\ud83d', half"),
        (json.dumps(PROBES[0] | {"id": "@"}).replace("@", "\\udc00"), "line 2: id has '\\udc00'"),
        (json.dumps(PROBES[0] | {"id": ["a"]}), "line 2: id is a list, expected text"),
        (json.dumps(PROBES[0] | {"answer": 7}), "line 2: answer is '7', expected text"),
        ('{"a": ' + "1" * 5000 + "}", "line 2: not JSON (Exceeds the limit"),
        ("[" * 9000, "line 2: not JSON (maximum recursion"),
        ('"context"', "line 2: expected an object with context"),
    ],
)
def test_detect_refuses_probes_before_anything_is_written(folder, line, said):
    path = folder / "probes.jsonl"
    path.write_text(json.dumps(PROBES[0] | {"id": "first"}) + "\n" + line + "\n")
    before = snapshot(folder)
    status, out, err = command(
        *("detect", "--model", folder / "model", "--data", path, "--output", folder / "out"),
        *("--device", "cpu"),
    )
    unharmed(status, out, err)
    assert status == 2
    assert f"{path}, {said}" in err
    assert snapshot(folder) == before
    assert not (folder / "out").exists()


def test_a_file_in_the_place_of_the_output_folder(folder):
    (folder / "probes.jsonl").write_text(json.dumps(PROBES[0]))
    (folder / "out").write_text("mine")
    model = ("--model", folder / "model", "--device", "cpu", "--output", folder / "out")
    for words in (
        ("demo", "--output", folder / "out"),
        ("detect", *model, "--data", folder / "probes.jsonl"),
        (
            "sweep",
            *model,
            "--heads",
            folder / "heads.json",
            "--k",
            1,
            "--tasks",
            "locos_parametric",
        ),
    ):
        status, _, err = command(*words)
        assert (status, "out is a file, and --output is a folder" in err) == (2, True), err
    assert (folder / "out").read_text() == "mine"


def test_names_that_are_no_text(folder):
    """A detection must not fail at its end because of how a file is called."""
    words = [f"w{n}" for n in range(20, 40)]
    row = {"context": " ".join(words), "needle": "w25 w26", "question": "w3", "answer": "w1"}
    data, output = folder / os.fsdecode(b"p\xff.jsonl"), folder / os.fsdecode(b"o\xff")
    try:
        data.write_text(json.dumps(row))
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    status, out, err = command(
        *("detect", "--model", folder / "model", "--methods", "headkv"),
        *("--data", data, "--output", output, "--device", "cpu"),
    )
    unharmed(status, out, err)
    assert status == 0
    assert HeadRanking.load(output / "headkv.json").meta["dataset"] == "p\ufffd.jsonl"
    shown = command("heads", "show", output / "headkv.json")
    assert (shown[0], "o\ufffd" in shown[1]) == (0, True)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"meta": {}}', '{"meta": 3, "trials": []}', "\0"])
def test_a_damaged_record_of_a_finished_detection(folder, text):
    (folder / "probes.jsonl").write_text(json.dumps(PROBES[0]))
    (folder / "out").mkdir()
    (folder / "out" / "detect.json").write_text(text)
    status, out, err = command(
        *("detect", "--model", folder / "model", "--data", folder / "probes.jsonl"),
        *("--device", "cpu", "--output", folder / "out", "--resume"),
    )
    unharmed(status, out, err)
    assert "detect.json is not what a detection writes" in err


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 9000])
def test_damaged_records_of_unfinished_runs(folder, text):
    (folder / "probes.jsonl").write_text(json.dumps(PROBES[0]))
    (folder / "out" / "checkpoint").mkdir(parents=True)
    for name in ("checkpoint/run.json", "sweep.json"):
        (folder / "out" / name).write_text(text)
    model = ("--model", folder / "model", "--device", "cpu", "--output", folder / "out")
    for words, record in (
        (("detect", *model, "--data", folder / "probes.jsonl", "--resume"), "run.json"),
        (
            *[("sweep", *model, "--heads", folder / "heads.json", "--k", 1, "--resume")],
            "sweep.json",
        ),
    ):
        more = ("--tasks", "locos_parametric") if record == "sweep.json" else ()
        status, out, err = command(*words, *more)
        unharmed(status, out, err)
        assert f"{record} cannot be read" in err


# -- the benchmarks' files ---------------------------------------------------------------------


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A local data folder; tables of `datasets` are cached beside it."""
    import datasets

    monkeypatch.setenv("LOCOS_DATA", "local")
    monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    yield tmp_path
    needles._load.cache_clear()


def needle(number, **changes):
    return {
        "id": f"{number:04d}",
        "system_prompt": "",
        "needle": f"{{CHAR}} lives at {{1}}, number {number}.",
        "questions": {"onehop": "Who lives in {2}?"},
        "character_set": [f"Name{number}x{n}" for n in range(4)],
        "tests": {"T1": {"input_args": ["the Louvre", "Paris"]}},
        "task_template": "{haystack} {question}",
    } | changes


@given(in_bytes(damaged([needle(n) for n in range(4)], st.sampled_from(["id", "tests", "T1", ""]))))
@fuzzed(100)
def test_damaged_needle_sets(local, bytewise, data):
    shelf = local / "nolima" / "haystack" / "rand_shuffle"
    shelf.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        (shelf / f"rand_book_{number}.txt").write_text(f"Book {number} it is.\nThe end.\n" * 9)
    (local / "nolima" / "needle_set.json").write_bytes(data)
    needles._load.cache_clear()
    found = explained(
        lambda: nolima.load(tokenizer=bytewise, lengths=[150], depths=[50]),
        *("needle_set.json", "needle", "needles", "characters", "question of type"),
    )
    for document in found["test"] if found else ():
        span = document["prompt"][document["needle_start"] : document["needle_end"]]
        assert span == document["needle"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"caf\xe9 \xff", r"rand_book_1.txt: cannot be read .*utf-8.*Save the book as UTF-8"),
        (b" \n", "rand_book_1.txt: the book is empty"),
        (None, "rand_book_1.txt: cannot be read .*Is a directory"),
    ],
)
def test_damaged_books(local, data, said):
    shelf = local / "nolima" / "haystack" / "rand_shuffle"
    shelf.mkdir(parents=True)
    (local / "nolima" / "needle_set.json").write_text(json.dumps([needle(n) for n in range(4)]))
    if data is None:
        (shelf / "rand_book_1.txt").mkdir()
    else:
        (shelf / "rand_book_1.txt").write_bytes(data)
    needles._load.cache_clear()
    with pytest.raises(DataError, match=said):
        needles.load_benchmark("needle_set.json")


def test_a_question_may_hold_the_marks_of_a_template():
    from lm_eval_locos.sources.haystack import Placement

    placed = Placement("a {question} NEEDLE b", 13, 19, 5, 50.0)
    prompt, start = nolima.prompt_of(
        "{question} | {haystack} | {question}", "", placed, "{haystack}?"
    )
    assert prompt == "{haystack}? | a {question} NEEDLE b | {haystack}?"
    assert prompt[start : start + 6] == "NEEDLE"


TABLES = {
    "musique/answerable/validation": (
        {
            "id": "2hop__1_77",
            "paragraphs": [{"idx": 0, "title": "A", "paragraph_text": "B"}],
            "question": "Where?",
            "answer": "Here",
            "answer_aliases": ["There"],
            "answerable": True,
        },
        musique.load,
    ),
    "babilong/0k/qa1": (
        {"input": "Bob went to the office.", "question": "Where is Bob?", "target": "office"},
        lambda: babilong.load(task="qa1", length="0k"),
    ),
    "parametric/train": (
        {"question": "1 + 1?", "answer": "2", "source": "arithmetic", "aliases": ["two"]},
        arithmetic.load,
    ),
}


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
@fuzzed(30)
def test_damaged_tables(local, name, data):
    row, load = TABLES[name]
    other = row | {"id": "2hop__2_77"} if "id" in row else row
    keys = st.sampled_from([*row, "text", ""])
    text = damaged(row, keys).map(lambda line: f"{json.dumps(other)}\n{line}\n")
    path = local / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.draw(in_bytes(text)))
    family = name.split("/")[0]
    found = explained(load, str(local), family, "MuSiQue id", "two documents have the id", "source")
    for document in found["test"] if found else ():
        assert document["prompt"].strip()
        assert document["answers"]
        assert all(isinstance(answer, str) and answer.strip() for answer in document["answers"])


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("musique/answerable/validation", {"id": 7}, "musique validation, row 2: id is '7'"),
        ("musique/answerable/validation", {"paragraphs": "text"}, "row 2: paragraphs is 'text'"),
        ("musique/answerable/validation", {"paragraphs": [{"title": "A"}]}, "row 2: paragraphs is"),
        ("musique/answerable/validation", {"answer": None}, "row 2: answer is 'None'"),
        ("musique/answerable/validation", {"answer_aliases": "NYC"}, "row 2: answer_aliases is"),
        ("babilong/0k/qa1", {"target": 3}, "babilong 0k qa1, row 2: target is '3', expected text"),
        ("babilong/0k/qa1", {"input": None}, "babilong 0k qa1, row 2: input is 'None'"),
        ("parametric/train", {"question": ["a"]}, "parametric train, row 2: question is"),
        ("parametric/train", {"answer": None}, "parametric train, row 2: answer is 'None'"),
        ("parametric/train", {"answer": []}, "parametric train, row 2: answer is"),
        ("parametric/train", {"aliases": "two"}, "parametric train, row 2: aliases is 'two'"),
    ],
)
def test_rows_of_other_types(local, name, changes, said):
    row, load = TABLES[name]
    path = local / f"{name}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(json.dumps(line) for line in (row, row | changes)))
    # Early releases of datasets refuse a column of two types themselves.
    said = rf"{re.escape(said)}|cannot load .*Column\(/\w+\) changed from .*Expected rows with"
    with pytest.raises(DataError, match=said):
        load()


def test_a_table_that_is_no_json_says_what_is_wrong_with_it(local):
    path = local / "parametric" / "train.jsonl"
    path.parent.mkdir()
    path.write_text('{"question": ')
    with pytest.raises(DataError, match=r"JSON parse error.*Expected rows with question, answer"):
        parametric.load()


# -- gates, reports ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A baseline and one ablation of six documents a family."""
    folder = tmp_path_factory.mktemp("study")
    ranking = write_ranking(folder / "locos.json")
    for number, (condition, share) in enumerate(((None, 0.8), ("top:5", 0.3))):
        tasks = {family: binary(family, 6, share) for family in ("nolima", "parametric")}
        write_run(folder / "out", tasks, condition=condition, ranking=ranking, number=number)
    return folder / "out"


GATES = """
[[gate]]
metric = "specificity"
min = 0.3
k = 5

[[gate]]
metric = "nolima_drop"
max = 1.0
"""
NUMBERS = {
    "hex": "0x" + "f" * 5000,
    "binary": "-0b1" + "0" * 30_000,
    "date": "1979-05-27T07:32:00Z",
    "nested": "[" * 300 + "]" * 300,
    "deep": "[" * 5000,
    "tables": "{a = " * 200 + "1" + "}" * 200,
    "not a number": "nan",
    "infinite": "-inf",
}


@given(st.data())
@fuzzed(100)
def test_damaged_gates(tmp_path, data):
    text = GATES
    for _ in range(data.draw(st.integers(1, 2))):
        lines = text.splitlines()
        at = data.draw(st.integers(0, len(lines) - 1))
        key = data.draw(st.sampled_from(["k", "min", "metric", "name", "x", ".".join("a" * 1200)]))
        value = data.draw(st.sampled_from([*NUMBERS.values(), '""', "'\x7f'", "'''", "true"]))
        lines[at : at + data.draw(st.integers(0, 1))] = [f"{key} = {value}"]
        text = "\n".join(lines)
    path = tmp_path / "gates.toml"
    path.write_bytes(data.draw(in_bytes(st.just(text))))
    found = explained(lambda: read_gates(path), str(path))
    assert found is None or all(gate.name for gate in found.gates)


@pytest.mark.parametrize("key", ["k", "min", "level", "name", "x", "gate.x", ".".join("a" * 1200)])
@pytest.mark.parametrize("value", NUMBERS)
def test_values_that_no_gate_can_have(tmp_path, study, key, value):
    path, junit = tmp_path / "gates.toml", tmp_path / "j.xml"
    path.write_text(f'[[gate]]\nmetric = "specificity"\n{key} = {NUMBERS[value]}\n')
    status, out, err = command("check", study, "--config", path, "--junit", junit)
    unharmed(status, out, err)
    assert (status, junit.exists()) == (2, False)
    assert str(path) in err
    assert len(err) < 1500


def test_a_folder_is_no_gates_file(tmp_path, study):
    status, _, err = command("check", study, "--config", tmp_path)
    assert (status, err.startswith(f"locos: {tmp_path}: cannot be read (Is a dir")) == (2, True)


@given(data=st.data())
@fuzzed(15)
def test_damaged_results(tmp_path_factory, study, data):
    folder = tmp_path_factory.mktemp("damaged")
    files = sorted(path for path in study.rglob("*") if path.is_file())
    wrong_one = data.draw(st.sampled_from(files))
    content = wrong_one.read_text()
    keys = st.sampled_from(["results", "config", "acc,none", "doc", "filter", ""])
    if wrong_one.suffix == ".jsonl":
        first, _, rest = content.partition("\n")
        text = damaged(json.loads(first), keys).map(lambda line: f"{line}\n{rest}")
    else:
        text = damaged(json.loads(content), keys)
    for path in files:
        target = folder / path.relative_to(study)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.draw(in_bytes(text)) if path == wrong_one else path.read_bytes())
    (folder / "gates.toml").write_text(GATES)
    (folder / "old.html").write_text("old")
    results = sorted(folder.rglob("results_*.json"))
    before = snapshot(folder)
    few = ("--resamples", 100)
    kind = data.draw(st.sampled_from(["terminal", "markdown", "latex", "csv", "json"]))
    for words in (
        ("report", folder, *few, "--format", kind),
        ("report", folder, *few, "--format", "html", "--output", folder / "old.html"),
        ("check", folder, "--config", folder / "gates.toml", *few),
        ("compare", *results, *few, *data.draw(st.sampled_from([(), ("--json",)]))),
    ):
        status, out, err = command(*words)
        if "--output" in words and status == 0:
            assert err == f"{folder}/old.html\n"
            assert (folder / "old.html").read_text().rstrip().endswith("</html>")
            (folder / "old.html").write_text("old")
        else:
            unharmed(status, out, err)
        assert snapshot(folder) == before


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-that-name/out", "a\0b"])
@pytest.mark.parametrize("action", ["report", "check", "compare"])
def test_names_of_results(study, name, action):
    more = {"report": (), "check": ("--config", study / "none.toml"), "compare": (study,)}[action]
    if action == "check":
        more = ("--config", os.devnull)
    status, out, err = command(action, name, *more)
    unharmed(status, out, err)
    assert status == 2


# -- real processes ------------------------------------------------------------------------------

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "LOCOS_DATA": "bundled",
}


def process(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", *map(str, words)],
        cwd=cwd,
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
    )


def test_commands_as_processes(tmp_path):
    (tmp_path / "digits.json").write_text(wrong(value="[" + "1" * 5000 + "]"))
    half = {"meta": {"method": "@", "model": "m\x1b[31m"}, "scores": {"0-0": [1], "0-1": [2]}}
    (tmp_path / "half.json").write_text(json.dumps(half).replace("@", "\\ud800"))
    refused = process("lm_eval_locos.cli", "heads", "show", "digits.json", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("locos: heads=digits.json: not JSON (Exceeds the limit")
    shown = process("lm_eval_locos.cli", "heads", "show", "half.json", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "\x1b" not in shown.stdout


def test_the_harness_with_a_damaged_ranking(folder):
    (folder / "deep.json").write_text('{"0-0": ' + "[" * 9000)
    done = process(
        *("lm_eval", "--model", "locos-ablated", "--model_args"),
        *("pretrained=model,heads=deep.json", "--tasks", "locos_arithmetic_2da"),
        *("--output_path", "out"),
        cwd=folder,
    )
    assert done.returncode == 1
    assert "lm_eval: heads=deep.json: not JSON (maximum recursion" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "out").exists()


def test_damage_reaches_what_it_should():
    """The strategies find both sides: else the properties above would say nothing."""
    seen = set()

    @given(in_bytes(RANKINGS))
    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    def collect(data):
        try:
            HeadRanking.from_bytes(data)
        except RankingError as error:
            seen.add(re.sub(r"heads=\S+ ", "", str(error))[:10])
        else:
            seen.add("loads")

    collect()
    assert {"loads", "not JSON (", "head 0-0 h", "no head ha"} & seen >= {"loads", "not JSON ("}
    assert len(seen) > 6
