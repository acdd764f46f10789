"""NoLiMa tasks: documents, grids, order, held-out parts, scores."""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from conftest import REPOSITORY

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import calibration_prompts, grids, nolima, tokenizers
from lm_eval_locos.families.documents import sha256_of
from lm_eval_locos.families.tokenizers import ruler_for
from lm_eval_locos.sources import needles
from lm_eval_locos.sources.rulers import WORDS

LENGTHS = {
    "250": 250,
    "500": 500,
    "1k": 1000,
    "2k": 2000,
    "4k": 4000,
    "8k": 8000,
    "16k": 16000,
    "32k": 32000,
}
NAMES = ("nolima", "nolima_full", "nolima_twohop", "nolima_hard", "nolima_direct")


def options(task: str) -> dict:
    """The loader's arguments in a task's YAML file."""
    text = (REPOSITORY / "tasks" / "nolima" / f"{task}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text).get("dataset_kwargs", {})


@pytest.fixture
def bundled(monkeypatch):
    monkeypatch.setenv("LOCOS_DATA", "bundled")


PEOPLE = [f"Person{n}" for n in range(12)]
CITIES = [
    ("the Louvre", "Paris", "France"),
    ("the Prado", "Madrid", "Spain"),
    ("the Forum", "Rome", "Italy"),
    ("Big Ben", "London", "England"),
]


@pytest.fixture
def local(tmp_path, monkeypatch):
    """A folder in NoLiMa's layout: 6 needles with 2 tests, 12 people, 5 long books."""
    rows = [
        {
            "id": f"04{n:02d}",
            "needle": f"On day {n}, {{CHAR}} saw {{1}}.",
            "questions": {"onehop": "Who was in {2}?", "twohop": "Who was in {3}?"},
            "character_set": PEOPLE,
            "tests": {f"T{t}": {"input_args": list(CITIES[(n + t) % 4])} for t in range(2)},
        }
        for n in range(6)
    ]
    shelf = tmp_path / "nolima" / "haystack" / "rand_shuffle"
    shelf.mkdir(parents=True)
    for book in range(1, 6):
        lines = [
            " ".join(f"In book {book} the rain of day {n * 3 + s} fell." for s in range(3))
            for n in range(300)
        ]
        (shelf / f"rand_book_{book}.txt").write_text("\n".join(lines), encoding="utf-8")
    path = tmp_path / "nolima" / "needle_set.json"

    def write(change=None):
        changed = [change(dict(row)) for row in rows] if change else rows
        path.write_text(json.dumps(changed), encoding="utf-8")
        monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path))
        needles._load.cache_clear()

    write()
    yield write
    needles._load.cache_clear()


def check(documents, *, count=None):
    rows = list(documents["test"])
    assert len({row["id"] for row in rows}) == len(rows) == documents.provenance["documents"]
    assert count is None or len(rows) == count
    assert documents.provenance["sha256"] == sha256_of(rows)
    for row in rows:
        assert row["family"] == "nolima"
        assert row["prompt"].count(row["needle"]) == 1
        assert row["question"] in row["prompt"]
        assert row["answers"] == [row["character"]]
        assert row["character"] in row["needle"]
        assert row["character"] not in row["question"]
        assert "{" not in row["needle"] + row["question"]
    return rows


@pytest.mark.parametrize("task", NAMES)
def test_tasks_of_the_paper_s_grid_on_the_bundled_sample(bundled, task):
    documents = nolima.load(**options(task))
    rows = check(documents)
    assert len(rows) >= 100
    assert documents.provenance["source"] == "bundled"
    assert documents.provenance["grid"]["lengths"] == list(nolima.BUNDLED_LENGTHS)
    assert documents.provenance["grid"]["unit"] == "words"
    held_out = task != "nolima_full"
    assert (documents.provenance["split"] == "evaluation") == held_out
    kinds = {row["question_type"] for row in rows}
    assert kinds == ({"twohop"} if task == "nolima_twohop" else {"onehop"})
    for row in rows:
        assert row["length"] - 20 < row["context_tokens"] <= row["length"]
        assert abs(row["needle_depth"] - row["depth"]) / 100 * row["length"] < 25


@pytest.mark.parametrize("name", ["250", "1k", "4k"])
def test_tasks_with_a_length_in_their_name(bundled, name):
    tokens = LENGTHS[name]
    rows = check(nolima.load(**options(f"nolima_{name}")))
    assert {row["length"] for row in rows} == {tokens}
    assert {row["depth"] for row in rows} == set(np.linspace(0, 100, 26))
    for row in rows:
        needle = WORDS.count(row["needle"])
        assert row["context_tokens"] - needle == pytest.approx(tokens, abs=1)
        assert row["needle_depth"] == pytest.approx(row["depth"], abs=100 * 8 / tokens)


def test_every_length_of_the_benchmark_has_its_task():
    for name, tokens in LENGTHS.items():
        assert options(f"nolima_{name}") == {
            "placement": "line",
            "questions": ["onehop", "twohop"],
            "tokens": tokens,
        }


def test_the_paper_s_grid_is_the_default_outside_the_sample(local):
    documents = nolima.load()
    # Parts of 6 needles, 5 books, 12 people: 4, 3 and 7 are evaluation's.
    rows = check(documents, count=4 * 2 * 25)
    assert {row["length"] for row in rows} == {1000, 4750, 8500, 12250, 16000}
    assert {row["depth"] for row in rows} == {0, 25, 50, 75, 100}
    assert len({row["book"] for row in rows}) == 3
    assert len({row["character"] for row in rows}) == 7
    assert documents.provenance["source"] == "local"


def test_nolima_full_takes_everything(local):
    rows = check(nolima.load(**options("nolima_full"), lengths=[300]), count=6 * 2 * 5)
    assert len({row["cluster"] for row in rows}) == 6
    assert len({row["book"] for row in rows}) == 5


def test_the_benchmark_s_design_is_complete(local):
    rows = check(nolima.load(**options("nolima_250")), count=3 * 4 * 2 * 2 * 26)
    cells = {
        (r["book"], r["cluster"], r["id"].split("_")[1], r["question_type"], r["depth"])
        for r in rows
    }
    assert len(cells) == len(rows)


def test_characters_are_drawn_as_the_benchmark_draws_them(local):
    bench = needles.load_benchmark("needle_set.json")
    rows = nolima.load(**options("nolima_250"), held_out=False)["test"]
    books = sorted(bench.books)
    expected = {}
    for entry in bench.entries:
        for number, book in enumerate(books):
            np.random.seed(42 + int(entry.id) + number)
            for depth in np.linspace(0, 100, 26):
                expected[entry.id, book, depth] = str(np.random.choice(PEOPLE))
    assert len(rows) == 5 * 6 * 2 * 2 * 26
    for row in rows:
        assert row["character"] == expected[row["cluster"], row["book"], row["depth"]]


@pytest.mark.parametrize("task", ["nolima", "nolima_250", "nolima_twohop"])
def test_a_limit_is_balanced(bundled, task):
    rows = nolima.load(**options(task))["test"]
    for column in ("length", "depth", "cluster", "book"):
        everything = collections.Counter(rows[column])
        for limit in (10, 20, 50, 100, 200):
            counts = collections.Counter(rows[column][:limit])
            fair = limit / len(everything)
            assert max(counts.values()) <= 2 * fair + 1, (column, limit)
            if fair >= 3:
                assert set(counts) == set(everything), (column, limit)


def test_few_documents_spread_over_all_depths(bundled):
    depths = nolima.load(**options("nolima_500"))["test"]["depth"][:8]
    assert min(depths) <= 10
    assert max(depths) >= 90
    assert max(b - a for a, b in itertools.pairwise(sorted(depths))) <= 30


@pytest.mark.parametrize("sizes", [(1, 1), (1, 26), (3, 1, 26), (5, 5), (2, 3), (4, 2, 2), (7, 6)])
def test_cells_are_every_combination_once(sizes):
    axes = [range(size) for size in sizes]
    assert sorted(grids._cells(*axes)) == list(itertools.product(*axes))


def test_no_cell_of_the_grid_depends_on_one_character(bundled):
    rows = nolima.load()["test"]
    cells = collections.defaultdict(set)
    for row in rows:
        cells[row["length"], row["depth"]].add(row["character"])
    assert min(map(len, cells.values())) >= 8
    books = collections.defaultdict(set)
    for row in rows:
        books[row["length"], row["depth"]].add(row["book"])
    assert min(map(len, books.values())) == 3


def test_loading_twice_gives_the_same_documents(bundled):
    first, second = nolima.load(), nolima.load()
    assert first.provenance == second.provenance
    assert list(first["test"]) == list(second["test"])


def test_a_grid_from_metadata(local):
    documents = nolima.load(lengths=[300, 600], depths="0:100:3", batch_size=4, revision=7)
    rows = check(documents, count=4 * 2 * 6)
    assert {(row["length"], row["depth"]) for row in rows} == set(
        itertools.product((300, 600), (0, 50, 100))
    )
    assert documents.provenance["grid"]["lengths"] == [300, 600]
    rows = check(nolima.load(**options("nolima_500"), lengths=700, depths=50))
    assert {(row["length"], row["depth"]) for row in rows} == {(700, 50)}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (500, (500,)),
        ([500, 1000], (500, 1000)),
        ("500", (500,)),
        ("500,1000", (500, 1000)),
        ("1000:16000:5", (1000, 4750, 8500, 12250, 16000)),
        (None, None),
    ],
)
def test_numbers(value, expected):
    assert grids.numbers("lengths", value, least=1) == expected


@pytest.mark.parametrize(
    "value",
    ["", "a", "1:2", "1:x:3", [], [0], [-5], [5, 5], ["a"], {"a": 1}, float("inf"), float("nan")],
)
def test_wrong_numbers(value):
    with pytest.raises(DataError, match="lengths="):
        grids.numbers("lengths", value, least=1)


def test_wrong_depths_and_lengths_reach_the_user(bundled):
    with pytest.raises(DataError, match="depths=120"):
        nolima.load(depths=120)
    with pytest.raises(DataError, match="has no room"):
        nolima.load(lengths=20)


def test_every_context_of_the_sample_has_many_candidates(bundled):
    """Guessing a name, or always the first or the last one named, is right for at most a fifth."""
    for task in ("nolima", "nolima_twohop", "nolima_250"):
        rows = list(nolima.load(**options(task))["test"])
        everybody = {row["character"] for row in rows}
        right = collections.Counter()
        for row in rows:
            context = row["prompt"].rsplit("Question:", 1)[0]
            named = [word for word in context.replace(".", " ").split() if word in everybody]
            assert len(set(named)) == len(named) == 7
            right["guess"] += 1 / len(named)
            right["first"] += named[0] == row["character"]
            right["last"] += named[-1] == row["character"]
        assert all(share / len(rows) <= 0.2 for share in right.values()), (task, right)


def test_no_distractor_answers_the_question(bundled):
    bench = needles.load_benchmark("needle_set.json")
    arguments = {args[0]: args for args in bench.places}
    for row in nolima.load(**options("nolima"))["test"].select(range(100)):
        gold = arguments[next(place for place in arguments if place in row["needle"])]
        others = [args for place, args in arguments.items() if place in row["prompt"]]
        assert gold in others
        for args in others:
            assert args == gold or not set(args) & set(gold)


def test_too_few_candidates_for_the_distractors(local):
    local(lambda row: row | {"distractors": {"count": 40}})
    with pytest.raises(DataError, match="asks for 40 distractors"):
        nolima.load(lengths=600)


def test_a_template_and_a_system_prompt_of_the_entry(local):
    local(
        lambda row: (
            row | {"task_template": "T {haystack} / {question} ?!", "system_prompt": "Be brief."}
        )
    )
    for row in nolima.load(lengths=300, depths=50)["test"]:
        assert row["prompt"].startswith("Be brief.\n\nT In book")
        assert row["prompt"].endswith(f"/ {row['question']} ?!")


def test_the_default_prompt_ends_where_a_base_model_goes_on(local):
    for row in nolima.load(lengths=300, depths=50)["test"]:
        assert row["prompt"].endswith(f"Question: {row['question']}\nAnswer:")


def test_a_needle_without_a_character_has_gold_answers(local):
    def change(row):
        row["needle"] = f"On day {row['id']} nobody saw {{1}}."
        row["questions"] = {"onehop": "Did anybody see {1}?"}
        row["tests"] = {
            "T0": {"input_args": ["the Louvre"], "gold_answers": ["Nobody at all", "No"]}
        }
        return row if row["id"] == "0401" else row | {"needle": row["needle"]}

    local(change)
    rows = nolima.load(lengths=300, depths=50, held_out=False)["test"]
    assert all(row["answers"] == ["Nobody at all", "No"] for row in rows)


def test_questions_may_name_the_character(local):
    local(
        lambda row: (
            row | {"questions": {"onehop": "Where was {CHAR}?"}, "character_set": PEOPLE[:12]}
        )
    )
    for row in nolima.load(lengths=300, depths=50)["test"]:
        assert row["question"] == f"Where was {row['character']}?"


def test_no_question_of_the_type(local):
    local(lambda row: row | {"questions": {"onehop": "Who was in {2}?"}})
    assert len(nolima.load(**options("nolima_250"))["test"]) == 3 * 4 * 2 * 26
    with pytest.raises(DataError, match="no needle has a question of type twohop"):
        nolima.load(**options("nolima_twohop"))


def test_calibration_shares_nothing_with_evaluation(bundled):
    turns, provenance = calibration_prompts("nolima", tokenizer=None, count=50, seed=1)
    assert len(turns) == len(set(turns)) == 50
    assert provenance["source"] == "bundled"
    assert provenance["split"] == "calibration"
    again, _ = calibration_prompts("nolima", tokenizer=None, count=50, seed=1)
    other, _ = calibration_prompts("nolima", tokenizer=None, count=50, seed=2)
    assert turns == again != other
    for task in ("nolima", "nolima_twohop", "nolima_hard", "nolima_direct", "nolima_250"):
        rows = nolima.load(**options(task))["test"]
        people, needle_texts = set(rows["character"]), set(rows["needle"])
        for turn in turns:
            assert not people & set(turn.replace(".", " ").split())
            assert not any(needle in turn for needle in needle_texts)


def test_calibration_is_refused_where_two_books_are_the_same(local, tmp_path):
    shelf = tmp_path / "nolima" / "haystack" / "rand_shuffle"
    for book in shelf.iterdir():
        book.write_text("The same book. It rains.\nAlways.", encoding="utf-8")
    needles._load.cache_clear()
    with pytest.raises(DataError, match="share a needle, a character or a book"):
        nolima.calibration(None, 5, 1)
    same = hashlib.sha256(b"The same book. It rains.\nAlways.").hexdigest()
    with pytest.raises(DataError, match=same):
        nolima.calibration(None, 5, 1)


@pytest.mark.parametrize(
    ("response", "rouge_l", "recall", "contains"),
    [
        ("Yuki", 1, 1, 1),
        ("Yuki lives there.", 0.5, 1, 1),
        ("yuki", 1, 1, 0),
        ("Megan", 0, 0, 0),
        ("", 0, 0, 0),
        ("...", 0, 0, 0),
    ],
)
def test_scores(response, rouge_l, recall, contains):
    scores = nolima.score({"answers": ["Yuki"]}, response)
    assert scores == {"rouge_l": rouge_l, "rouge_1_recall": recall, "contains": contains}


def test_scores_take_the_best_gold_answer_and_any_script():
    assert nolima.score({"answers": ["Nobody at all", "No"]}, "No")["rouge_l"] == 1
    assert nolima.score({"answers": ["雪"]}, "雪")["rouge_l"] == 1


def test_golden_data_loads(goldens, monkeypatch):
    monkeypatch.setenv("LOCOS_DATA_DIR", str(goldens))
    needles._load.cache_clear()
    check(nolima.load(lengths="300:900:3"), count=6 * 3 * 15)
    check(nolima.load(**options("nolima_hard"), lengths=300))
    check(nolima.load(**options("nolima_250")))


def test_the_ruler_is_the_evaluated_model_s_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    text = "w1 w2, w3 unknown"
    for arguments in (
        {"tokenizer": tokenizer},
        {"pretrained": str(tmp_path), "batch_size": 4},
        {"tokenizer": str(tmp_path), "pretrained": "elsewhere", "gguf_file": "of-the-model"},
        {"pretrained": SimpleNamespace(name_or_path=str(tmp_path))},
    ):
        ruler = ruler_for(arguments)
        assert (ruler.unit, ruler.starts(text).tolist()) == ("tokens", [0, 3, 7, 10])
    # Tokenised once in a run: the same arguments give the same ruler.
    assert ruler_for({"pretrained": str(tmp_path)}) is ruler_for({"pretrained": str(tmp_path)})


def test_without_a_tokenizer_words_are_counted_with_one_warning(caplog, tmp_path):
    tokenizers._loaded.cache_clear()
    for _ in range(3):
        assert ruler_for({"base_url": "http://localhost"}) is WORDS
    assert len(caplog.records) == 1
    assert "counted in words" in caplog.text
    empty = tmp_path / "empty"
    empty.mkdir()
    assert ruler_for({"pretrained": str(empty)}) is WORDS
    with pytest.raises(DataError, match="cannot be loaded"):
        ruler_for({"tokenizer": str(empty)})


@pytest.mark.real_model
def test_lengths_are_in_the_model_s_own_tokens(bundled, smollm2):
    ruler = ruler_for(smollm2)
    documents = nolima.load(**smollm2)
    assert documents.provenance["grid"]["unit"] == "tokens"
    for row in documents["test"].select(range(50)):
        start = row["prompt"].index(row["needle"])
        end = start + len(row["needle"])
        before = ruler.count(row["prompt"][:start])
        after = ruler.count(row["prompt"][end:])
        extra = ruler.count(row["prompt"]) - row["context_tokens"]
        assert 0 < extra < 80  # the template with the question
        assert row["length"] - 25 < row["context_tokens"] <= row["length"]
        assert before + after < ruler.count(row["prompt"])
