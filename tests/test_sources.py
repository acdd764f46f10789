"""Where data is found (local folder, hub, bundled sample), and NoLiMa's files with their parts."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_locos.errors import DataError
from lm_eval_locos.sources import lookup, needles
from lm_eval_locos.sources.lookup import Found, locate, table

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No memory of earlier look-ups, no settings, and a hub that is not there."""
    lookup._locate.cache_clear()
    monkeypatch.setattr(lookup, "_unreachable", None)
    for key in ("LOCOS_DATA", "LOCOS_DATA_DIR", "LOCOS_REVISION_NOLIMA"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    yield
    lookup._locate.cache_clear()


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """Empty caches of the hub's libraries."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.fixture
def hub(monkeypatch):
    """A hub whose answers a test sets; records the questions."""
    state = SimpleNamespace(asked=[], downloaded=[], answer=SimpleNamespace(sha=COMMIT), path="/s")

    def dataset_info(self, repo, *, revision=None, timeout=None):
        assert timeout is not None
        state.asked.append((repo, revision))
        if isinstance(state.answer, Exception):
            raise state.answer
        return state.answer

    def snapshot_download(repo, **options):
        state.downloaded.append((repo, options))
        if options.get("local_files_only"):
            raise FileNotFoundError("nothing cached")
        return state.path

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return state


def test_the_local_folder_comes_first(monkeypatch, tmp_path, hub):
    (tmp_path / "musique").mkdir()
    monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path))
    found = locate("musique")
    assert (found.kind, found.path, found.revision) == ("local", tmp_path / "musique", None)
    assert str(tmp_path) in found.reason
    assert hub.asked == []


def test_then_the_hub_at_its_resolved_commit(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path))  # has no folder for it
    assert locate("musique") == Found("hub", None, COMMIT, f"bdsaglam/musique at {COMMIT}")
    found = locate("nolima", ["needlesets/*.json"])
    assert (found.kind, str(found.path), found.revision) == ("hub", "/s", COMMIT)
    assert hub.asked == [("bdsaglam/musique", "main"), ("amodaresi/NoLiMa", "main")]
    (downloaded,) = hub.downloaded
    assert downloaded[0] == "amodaresi/NoLiMa"
    assert downloaded[1] == {
        "repo_type": "dataset",
        "revision": COMMIT,
        "allow_patterns": ["needlesets/*.json"],
    }


def test_a_revision_can_be_given(hub, monkeypatch):
    monkeypatch.setenv("LOCOS_REVISION_NOLIMA", "v1")
    locate("nolima", ["*.json"])
    assert hub.asked == [("amodaresi/NoLiMa", "v1")]


def test_without_network_the_bundled_sample_with_one_warning_each(hub, no_cache, caplog):
    hub.answer = OSError("Name or service not known\nmore lines")
    with caplog.at_level(logging.WARNING, logger=lookup.__name__):
        found = [locate(name) for name in lookup.HUB_IDS]
        assert [locate(name) for name in lookup.HUB_IDS] == found
    assert {f.kind for f in found} == {"bundled"}
    assert [f.path.name for f in found] == list(lookup.HUB_IDS)
    assert len(hub.asked) == 1  # five tasks do not wait five times
    assert len(caplog.records) == len(lookup.HUB_IDS)
    assert "NOT the benchmark" in caplog.text
    assert "cannot reach the hub (OSError: Name or service not known)" in caplog.text
    assert "more lines" not in caplog.text


def test_an_answer_of_the_hub_concerns_one_dataset_only(hub, no_cache):
    # The HTTP library behind the hub's client differs between versions; it only needs headers.
    response = SimpleNamespace(headers={}, request=None, status_code=404)
    hub.answer = huggingface_hub.errors.HfHubHTTPError("404 no such dataset", response=response)
    assert locate("musique").kind == "bundled"
    hub.answer = SimpleNamespace(sha=COMMIT)
    assert locate("babilong").kind == "hub"


def test_a_download_that_breaks_falls_back_with_the_reason(hub, no_cache, monkeypatch, caplog):
    def broken(repo, **options):
        raise RuntimeError("disk full")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", broken)
    with caplog.at_level(logging.WARNING, logger=lookup.__name__):
        assert locate("nolima", ["*.json"]).kind == "bundled"
    assert "RuntimeError: disk full" in caplog.text


def test_offline_the_cached_snapshot_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "datasets--amodaresi--NoLiMa"
    snapshot = folder / "snapshots" / COMMIT / "needlesets"
    snapshot.mkdir(parents=True)
    (snapshot / "needle_set.json").write_text("[]", encoding="utf-8")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    found = locate("nolima", ["needlesets/*.json"])
    assert (found.kind, found.path, found.revision) == ("hub", snapshot.parent, COMMIT)
    assert "HF_HUB_OFFLINE" in found.reason
    # A snapshot that holds other files only is none.
    assert locate("nolima", ["books/*.txt"]).kind == "bundled"


def test_offline_a_cached_table_is_used(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    assert locate("musique").kind == "bundled"
    lookup._locate.cache_clear()
    (tmp_path / "bdsaglam___musique").mkdir()
    assert locate("musique").kind == "hub"


def test_a_forced_source_is_taken_or_an_error(hub, no_cache, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("LOCOS_DATA", "bundled")
    found = locate("nolima", ["*.json"])
    assert (found.kind, hub.asked, caplog.records) == ("bundled", [], [])
    assert (found.path / "needlesets" / "needle_set.json").is_file()
    monkeypatch.setenv("LOCOS_DATA", "local")
    with pytest.raises(DataError, match="LOCOS_DATA_DIR is not set"):
        locate("nolima")
    monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path))
    with pytest.raises(DataError, match="has no folder nolima"):
        locate("nolima")
    monkeypatch.setenv("LOCOS_DATA", "hub")
    (tmp_path / "musique").mkdir()
    assert locate("musique").kind == "hub"
    hub.answer = OSError("no route")
    with pytest.raises(DataError, match="LOCOS_DATA=hub, but RMT-team/babilong is not available"):
        locate("babilong")


def test_wrong_settings_say_what_is_expected(monkeypatch, tmp_path):
    with pytest.raises(DataError, match="no data called 'squad'"):
        locate("squad")
    monkeypatch.setenv("LOCOS_DATA", "cloud")
    with pytest.raises(DataError, match="expected hub, local or bundled"):
        locate("nolima")
    monkeypatch.delenv("LOCOS_DATA")
    monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path / "absent"))
    with pytest.raises(DataError, match="not a folder"):
        locate("nolima")


ROWS = [{"question": f"q{n}", "answer": str(n)} for n in range(3)]


def _jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize("layout", ["jsonl", "csv", "parquet", "shards", "repository", "flat"])
def test_tables_of_every_layout(layout, tmp_path):
    folder, config = tmp_path / layout, "answerable"
    rows = datasets.Dataset.from_list(ROWS)
    base = folder / config
    base.mkdir(parents=True)
    if layout == "jsonl":
        _jsonl(base / "qa1.jsonl")
    elif layout == "csv":
        rows.to_csv(base / "qa1.csv")
    elif layout == "parquet":
        rows.to_parquet(base / "qa1.parquet")
    elif layout == "shards":
        rows.select([0, 1]).to_parquet(base / "qa1-00000-of-00002.parquet")
        rows.select([2]).to_parquet(base / "qa1-00001-of-00002.parquet")
    elif layout == "repository":
        _jsonl(folder / "files" / "a.jsonl")
        (folder / "README.md").write_text(
            "---\nconfigs:\n- config_name: answerable\n  data_files:\n  - split: qa1\n"
            "    path: files/a.jsonl\n---\n",
            encoding="utf-8",
        )
    else:
        _jsonl(folder / "qa1.jsonl")
        config = None
    found = Found("local", folder, None, "test")
    got = table("musique", found, config, split="qa1", columns=["question", "answer"])
    assert got["question"] == ["q0", "q1", "q2"]


def test_a_hub_table_is_loaded_by_its_id_at_the_commit(monkeypatch):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = Found("hub", None, COMMIT, "test")
    table("musique", found, "answerable", split="validation", columns=["question"])
    assert calls == [
        (("bdsaglam/musique", "answerable"), {"split": "validation", "revision": COMMIT})
    ]


def test_tables_that_do_not_fit_say_what_was_seen(tmp_path):
    found = Found("local", tmp_path, None, "test")
    _jsonl(tmp_path / "c" / "test.jsonl")
    with pytest.raises(DataError, match=r"no column target.*Seen: question, answer; expected: tar"):
        table("babilong", found, "c", split="test", columns=["target"])
    with pytest.raises(DataError, match=r"cannot load .*config c, split qa9"):
        table("babilong", found, "c", split="qa9", columns=["target"])
    (tmp_path / "c" / "broken.jsonl").write_text("{not json", encoding="utf-8")
    with pytest.raises(DataError, match="cannot load"):
        table("babilong", found, "c", split="broken", columns=["target"])


def test_progress_bars_are_as_before(tmp_path):
    _jsonl(tmp_path / "test.jsonl")
    found = Found("local", tmp_path, None, "test")
    before = datasets.are_progress_bars_disabled()
    table("babilong", found, split="test", columns=["question"])
    assert datasets.are_progress_bars_disabled() == before


# -- NoLiMa's files ---------------------------------------------------------------------------


def entry(number=1, **changes):
    names = [f"Name{number}x{n}" for n in range(10)]
    row = {
        "id": f"{number:04d}",
        "reasoning_type": "world_knowledge",
        "system_prompt": "",
        "needle": f"{{CHAR}} lives at {{1}}, number {number}.",
        "questions": {"onehop": "Who lives in {2}?", "twohop": "Who lives in {3}?"},
        "character_set": names,
        "tests": {"T1": {"input_args": ["the Louvre", "Paris", "France"]}},
    }
    return {key: value for key, value in (row | changes).items() if value is not None}


def write(folder, books=5, nested=True, **sets):
    base = folder / "needlesets" if nested else folder
    base.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        (base / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
    shelf = folder / "haystack" / "rand_shuffle"
    shelf.mkdir(parents=True, exist_ok=True)
    for n in range(1, books + 1):
        (shelf / f"rand_book_{n}.txt").write_text(f"Book {n} it is. The end.\n", encoding="utf-8")
    return folder


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a needle set written to a local folder."""

    def loaded(name="needle_set.json", **options):
        write(tmp_path / "nolima", **options)
        monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path))
        needles._load.cache_clear()
        return needles.load_benchmark(name)

    yield loaded
    needles._load.cache_clear()


@pytest.mark.parametrize("nested", [True, False])
def test_needle_sets_lie_in_needlesets_or_directly(load, nested):
    bench = load(nested=nested, needle_set=[entry(n) for n in range(4)])
    assert [e.id for e in bench.entries] == ["0000", "0001", "0002", "0003"]
    assert list(bench.books) == [f"rand_book_{n}.txt" for n in range(1, 6)]
    first = bench.entries[1]
    assert first.fill(first.needle, "T1", "Yuki") == "Yuki lives at the Louvre, number 1."
    assert first.fill(first.questions["twohop"], "T1", "Yuki") == "Who lives in France?"


def test_what_an_entry_may_lack(load):
    bench = load(
        needle_set=[
            entry(questions={"onehop": "Who?", "twohop": ""}, system_prompt=None),
            entry(
                2,
                needle="Nobody lives at {1}.",
                character_set=None,
                tests={
                    "T1": {"input_args": ["x"], "gold_answers": "Nobody"},
                    "T2": {"input_args": ["y"], "gold_answers": ["Nobody", "No one"]},
                },
                questions={"onehop": "Who lives at {1}?"},
            ),
        ]
    )
    first, second = bench.entries
    assert list(first.questions) == ["onehop"]
    assert (first.system_prompt, first.template) == ("", None)
    assert second.characters == ()
    assert second.golds == {"T1": ("Nobody",), "T2": ("Nobody", "No one")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": 7}, "id is '7'"),
        ({"needle": None}, "needle is 'None'"),
        ({"questions": ["a"]}, "questions is"),
        ({"questions": {}}, "no questions"),
        ({"tests": {}}, "no tests"),
        ({"tests": {"T1": ["Paris"]}}, "input_args of test T1 is 'None'"),
        ({"tests": {"T1": {"input_args": ["a", 2, "c"]}}}, "input_args of test T1 is"),
        ({"tests": {"T1": {"input_args": ["a"]}}}, r"nothing for \{2\} in test T1 \(1 input_args"),
        ({"character_set": None}, "nothing for {CHAR}"),
        ({"character_set": "Yuki"}, "character_set is 'Yuki', expected a list"),
        ({"needle": "Someone lives at {1}."}, "gold_answers of test T1 is 'None'"),
        ({"task_template": "{haystack}"}, "task_template has no {question}"),
        ({"task_template": 3}, "task_template is '3'"),
        ({"system_prompt": ["a"]}, "system_prompt is"),
        ({"distractors": {"onehop": "x"}}, "take needle_set.json"),
        ({"distractors": {"count": -1}}, "distractors is"),
    ],
)
def test_wrong_entries_are_named_with_file_and_key(tmp_path, changes, message):
    path = tmp_path / "needle_set.json"
    path.write_text(json.dumps([entry(1), entry(2, **changes)]), encoding="utf-8")
    if "id" not in changes:
        message = rf"needle_set.json, needle 2.*{message}"
    with pytest.raises(DataError, match=message):
        needles.read_entries(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "expected a list of needles, found dict"),
        ("[]", "expected a list"),
        ("[3]", "expected an object, found int"),
    ],
)
def test_files_that_are_no_needle_set(tmp_path, text, message):
    path = tmp_path / "needle_set.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        needles.read_entries(path)


def test_ids_occur_once(tmp_path):
    path = tmp_path / "needle_set.json"
    path.write_text(json.dumps([entry(1), entry(1)]), encoding="utf-8")
    with pytest.raises(DataError, match="two needles have the id 0001"):
        needles.read_entries(path)


def test_missing_files_are_named(load, tmp_path):
    with pytest.raises(DataError, match=r"no needle_set_hard\.json in"):
        load("needle_set_hard.json", needle_set=[entry(n) for n in range(4)])
    for book in (tmp_path / "nolima" / "haystack" / "rand_shuffle").iterdir():
        book.unlink()
    needles._load.cache_clear()
    with pytest.raises(DataError, match="no books in"):
        needles.load_benchmark("needle_set.json")


def contents(bench):
    return (
        {e.needle for e in bench.entries},
        {name for e in bench.entries for name in e.characters},
        set(bench.books),
    )


def check_parts(bench):
    """Three parts, none empty, none sharing anything, together everything."""
    parts = [contents(bench.part(part)) for part in needles.PARTS]
    for kinds in zip(*parts, strict=True):
        assert all(kinds)
        assert sum(map(len, kinds)) == len(set().union(*kinds))
    assert set().union(*(part[0] for part in parts)) == contents(bench)[0]
    assert set().union(*(part[2] for part in parts)) == contents(bench)[2]


def test_the_parts_are_disjoint_and_depend_on_names_only(load):
    names = [f"Person{n}" for n in range(30)]
    rows = [entry(n, character_set=names) for n in range(20)]
    bench = load(needle_set=rows)
    check_parts(bench)
    sizes = [len(bench.part(part).entries) for part in needles.PARTS]
    assert sizes == [12, 5, 3]
    before = [contents(bench.part(part)) for part in needles.PARTS]
    reordered = load(needle_set=rows[::-1])
    assert [contents(reordered.part(part)) for part in needles.PARTS] == before


@given(st.sets(st.text(min_size=1), min_size=3, max_size=40))
@settings(max_examples=100, deadline=None)
def test_every_part_has_something_from_three_names_on(names):
    shares = [needles._share(sorted(names), part, "names") for part in needles.PARTS]
    assert all(shares)
    assert sorted(name for share in shares for name in share) == sorted(names)


def test_two_names_cannot_be_divided(load):
    with pytest.raises(DataError, match="2 needles cannot be divided"):
        load(needle_set=[entry(1), entry(2)]).part("evaluation")


def test_a_needle_of_two_sets_is_in_one_part(load):
    """The hard set repeats some needles under other ids; an inverted needle follows its number."""
    names = [f"Person{n}" for n in range(30)]
    main = [entry(n, character_set=names) for n in range(20)]
    hard = [row | {"id": f"hard{n}"} for n, row in enumerate(main[:10])]
    hard += [
        entry(n, character_set=names, id=f"{n:04d}Inv", needle=f"At {{1}} lives {{CHAR}}, {n}.")
        for n in range(10, 20)
    ]
    where = {}
    for name in ("needle_set.json", "needle_set_hard.json"):
        bench = load(name, needle_set=main, needle_set_hard=hard)
        for part in needles.PARTS:
            for e in bench.part(part).entries:
                where.setdefault(e.needle.rsplit(" ", 1)[1], set()).add(part)
    assert len(where) == 20
    assert all(len(parts) == 1 for parts in where.values())


def test_a_set_without_a_needle_in_the_part_says_so(load):
    names = [f"Person{n}" for n in range(30)]
    main = [entry(n, character_set=names) for n in range(20)]
    held = load(needle_set=main).part("calibration").entries[0]
    bench = load("needle_set_hard.json", needle_set=main, needle_set_hard=[main[int(held.id)]])
    assert len(bench.part("calibration").entries) == 1
    with pytest.raises(DataError, match="none of the 1 needles of this set is in the evaluation"):
        bench.part("evaluation")


def test_new_needles_of_a_further_set_are_divided_too(load):
    names = [f"Person{n}" for n in range(30)]
    sets = {
        "needle_set": [entry(n, character_set=names) for n in range(6)],
        "needle_set_hard": [entry(n, character_set=names) for n in range(50, 59)],
    }
    check_parts(load("needle_set_hard.json", **sets))


@pytest.mark.parametrize("name", needles._SETS)
def test_the_bundled_sample_has_three_parts(monkeypatch, name):
    monkeypatch.setenv("LOCOS_DATA", "bundled")
    check_parts(needles.load_benchmark(name))


def test_the_parts_of_golden_data(goldens, monkeypatch):
    monkeypatch.setenv("LOCOS_DATA_DIR", str(goldens))
    for name in ("needle_set.json", "needle_set_hard.json"):
        check_parts(needles.load_benchmark(name))
