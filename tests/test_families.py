"""MuSiQue, BABILong, parametric recall and arithmetic: data of the hub's shape, prompts, scores."""

from __future__ import annotations

import json
import shutil

import pytest

from lm_eval_locos.errors import DataError
from lm_eval_locos.families import (
    FAMILIES,
    arithmetic,
    babilong,
    calibration_prompts,
    musique,
    parametric,
)
from lm_eval_locos.sources.lookup import SAMPLE


@pytest.fixture
def local(tmp_path, monkeypatch):
    """Writes rows where a local copy of the hub's data would lie."""
    monkeypatch.setenv("LOCOS_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("LOCOS_DATA", "local")

    def write(name, rows):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")

    return write


def question(number, hops, **changes):
    return {
        "id": f"{hops}hop__{number}_77",
        "paragraphs": [
            {"idx": i, "title": f"Title {i}", "paragraph_text": f"Text {{x}} {i}."}
            for i in range(3)
        ],
        "question": f"Where is {number}?",
        "answer": "New York City",
        "answer_aliases": ["NYC"],
        "answerable": True,
    } | changes


def test_musique_documents(local):
    made = [question(1, 2), question(2, 3), question(3, 4), question(4, 2, answerable=False)]
    local("musique/answerable/validation", made)
    documents = musique.load()["test"]
    assert [doc["id"] for doc in documents] == ["2hop__1_77", "3hop__2_77", "4hop__3_77"]
    assert "[1] Title 0\nText {x} 0.\n\n[2] Title 1" in documents[0]["prompt"]
    assert documents[0]["prompt"].endswith("Question: Where is 1?\nAnswer:")
    assert documents[0]["answers"] == ["New York City", "NYC"]
    assert [doc["hops"] for doc in musique.load(hops=3)["test"]] == [3]
    assert musique.load().provenance["source"] == "local"
    with pytest.raises(DataError, match=r"hops=5: none of 3 MuSiQue questions .* one of: 2"):
        musique.load(hops=5)


def test_musique_scores():
    doc = {"answers": ["New York City", "NYC"]}
    right = musique.score(doc, "Step one.\n<answer>the NYC")
    assert right == {"acc": 1, "f1": 1, "em": 1, "tag_present": 1}
    inside = musique.score(doc, "It is in New York City, I think")
    assert (inside["acc"], inside["em"], inside["tag_present"]) == (1, 0, 0)
    assert 0 < inside["f1"] < 1
    wrong = musique.score(doc, "New York City <answer>Boston</answer>")
    assert (wrong["acc"], wrong["f1"]) == (0, 0)
    assert musique.score(doc, "") == {"acc": 0, "f1": 0, "em": 0, "tag_present": 0}


@pytest.mark.parametrize(
    ("family", "name", "arguments", "expected"),
    [
        (musique, "musique/answerable/validation", {}, "id, paragraphs"),
        (babilong, "babilong/0k/qa1", {"task": "qa1", "length": "0k"}, "input, question, target"),
        (parametric, "parametric/train", {}, "question, answer, source"),
    ],
)
def test_wrong_columns_name_seen_and_expected(local, family, name, arguments, expected):
    local(name, [{"question": "a", "text": "b"}])
    with pytest.raises(DataError, match=rf"Seen: question, text; expected: {expected}"):
        family.load(**arguments)


def test_missing_length_is_a_data_error(local):
    local("babilong/0k/qa1", [{"input": "a", "question": "b", "target": "kitchen"}])
    with pytest.raises(DataError, match=r"config 8k, split qa1"):
        babilong.load(task="qa1", length="8k")


def test_babilong_documents_and_scores(local):
    row = {"input": "Bob went to the office. ", "question": "Where is Bob? ", "target": "office"}
    local("babilong/0k/qa1", [row])
    (doc,) = babilong.load(task="qa1", length="0k")["test"]
    assert "Choose from: bathroom, bedroom" in doc["prompt"]
    assert doc["prompt"].endswith("Question: Where is Bob?\nAnswer:")
    assert babilong.score(doc, "<answer>the office</answer>") == {"acc": 1, "tag_present": 1}
    assert babilong.score(doc, "In the office.") == {"acc": 1, "tag_present": 0}
    assert babilong.score(doc, "office or kitchen")["acc"] == 0
    assert babilong.score(doc, "kitchen, no <answer>office")["acc"] == 1


def test_parametric_documents_take_sources_in_turn(local):
    kinds = ["city_country"] * 3 + ["popqa"] * 2 + ["arithmetic"]
    made = [
        {"question": f"q{i}?", "answer": f"A{i}", "source": kind, "index": i}
        for i, kind in enumerate(kinds)
    ]
    local("parametric/train", made)
    documents = parametric.load()["test"]
    assert [doc["answers"][0] for doc in documents] == ["A0", "A3", "A1", "A4", "A2"]
    assert {doc["family"] for doc in documents} == {"parametric"}
    (only,) = arithmetic.load()["test"]
    assert (only["answers"], only["family"]) == (["A5"], "arithmetic")
    with pytest.raises(
        DataError, match=r"no questions of source x. Expected some of: arithmetic, city_country"
    ):
        parametric.load(sources=("x",))


@pytest.mark.parametrize(
    ("text", "exact", "tolerant"),
    [
        ("France", 1, 1),
        (" france.", 1, 1),
        ("The answer is France.", 0, 1),
        ("Answer: France", 0, 1),
        ("I think so.\nFrance!", 0, 1),
        ("French", 0, 0),
        ("France and Spain", 0, 0),
        ("République", 0, 0),
        ("", 0, 0),
        ("...", 0, 0),
    ],
)
def test_parametric_scores(text, exact, tolerant):
    found = parametric.score({"answers": ["France"]}, text)
    assert found == {"exact_match": exact, "exact_match_tolerant": tolerant}


@pytest.mark.parametrize(
    "row",
    [{"answer": "U.S.", "aliases": ["USA"]}, {"answer": ["U.S.", "USA"]}],
)
def test_parametric_accepts_aliases(local, row):
    local("parametric/train", [{"question": "Which?", "source": "popqa", **row}])
    (doc,) = parametric.load()["test"]
    assert doc["answers"] == ["U.S.", "USA"]
    assert parametric.score(doc, "usa") == {"exact_match": 1, "exact_match_tolerant": 1}
    assert parametric.score(doc, "U.S.") == {"exact_match": 1, "exact_match_tolerant": 1}


def test_a_row_without_aliases(local):
    rows = [
        {"question": "Which?", "source": "popqa", "answer": "1", "aliases": None},
        {"question": "What?", "source": "popqa", "answer": "2", "aliases": []},
    ]
    local("parametric/train", rows)
    assert [doc["answers"] for doc in parametric.load()["test"]] == [["1"], ["2"]]
    local("musique/answerable/validation", [question(1, 2, answer_aliases=None)])
    assert musique.load()["test"][0]["answers"] == ["New York City"]


@pytest.mark.parametrize("row", [{"answer": " "}, {"answer": []}, {"answer": ["1", ""]}])
def test_a_row_with_an_empty_answer_is_refused(local, row):
    local("parametric/train", [{"question": "Which?", "source": "popqa", **row}])
    with pytest.raises(DataError, match=r"parametric train, row 1: answer is .*, expected text"):
        parametric.load()


def test_empty_aliases_are_left_out(local):
    """An empty alias would be found in any response."""
    local("musique/answerable/validation", [question(1, 2, answer_aliases=["", "NYC", " "])])
    assert musique.load()["test"][0]["answers"] == ["New York City", "NYC"]
    local("parametric/train", [{"question": "?", "source": "popqa", "answer": 1, "aliases": [""]}])
    with pytest.raises(DataError, match=r"row 1: aliases is \"\[''\]\", expected"):
        parametric.load()


@pytest.mark.parametrize("answers", [[], [""], ["a", " "]])
def test_no_document_has_an_empty_answer(answers):
    from lm_eval_locos.families.documents import package

    document = {"id": "d1", "family": "f", "cluster": "c", "prompt": "p", "answers": answers}
    with pytest.raises(DataError, match=r"document 'd1' has the answers .* would match anything"):
        package([document], {"source": "local"}, split="test")


@pytest.mark.parametrize(
    ("text", "exact", "tolerant"),
    [
        ("18", 1, 1),
        ("18.", 1, 1),
        ("(4 + 2) * 3 = 18", 0, 1),
        ("6 * 3 is\nThe answer is 18.", 0, 1),
        ("18 or 19", 0, 0),
        ("-18", 0, 0),
        ("−18", 0, 0),
        ("180", 0, 0),
        ("", 0, 0),
    ],
)
def test_arithmetic_scores(text, exact, tolerant):
    found = arithmetic.score({"answers": ["18"]}, text)
    assert found == {"exact_match": exact, "exact_match_tolerant": tolerant}


@pytest.mark.parametrize("digits", [2, 3])
def test_additions_are_different_seeded_and_right(digits):
    documents = arithmetic.load(digits=digits)["test"]
    assert len(documents) == len(set(documents["question"])) == 200
    for doc in documents:
        a, b = (int(part) for part in doc["question"].strip("?").split(" is ")[1].split(" + "))
        assert len(str(a)) == len(str(b)) == digits
        assert doc["answers"] == [str(a + b)]
    assert list(arithmetic.load(digits=digits)["test"]) == list(documents)
    assert arithmetic.additions(digits, 200, seed=1) != arithmetic.additions(digits, 200)


def test_a_model_s_seed_does_not_change_what_is_asked():
    """Loaders receive the model's arguments too, such as seed=7 of random heads."""
    plain = arithmetic.load(digits=2)
    assert arithmetic.load(digits=2, seed=7, pretrained="x").provenance == plain.provenance


def test_calibration_drops_what_the_evaluation_asks(local, tokenizer):
    rows = (SAMPLE / "parametric" / "calibration.jsonl").read_text().splitlines()
    asked = json.loads(rows[0])["question"]
    pool = [
        {"question": asked, "answer": "z", "source": "city_country"},
        {"question": "x?", "answer": "y", "source": "popqa"},
    ]
    local("parametric/train", pool)
    turns, source = calibration_prompts("parametric", tokenizer=tokenizer, count=100)
    assert source["split"] == "calibration"
    assert len(turns) > 40
    assert not any(asked in turn for turn in turns)


def test_calibration_on_evaluated_prompts_is_refused(local, tokenizer, tmp_path, monkeypatch):
    rows = [question(i, 2) for i in range(4)]
    local("musique/answerable/validation", rows[:2])
    local("musique/answerable/train", [*rows[2:], question(5, 2, answerable=False)])
    turns, _ = calibration_prompts("musique", tokenizer=tokenizer)
    assert len(turns) == 2  # none of the unanswerable
    local("musique/answerable/train", rows[1:])
    with pytest.raises(DataError, match="musique: 1 calibration prompts are also evaluated"):
        calibration_prompts("musique", tokenizer=tokenizer)

    shutil.copytree(SAMPLE / "babilong", tmp_path / "sample" / "babilong")
    monkeypatch.setattr(babilong, "SAMPLE", tmp_path / "sample")
    calibration_prompts("babilong", tokenizer=tokenizer)
    stories = tmp_path / "sample" / "babilong"
    shutil.copy(stories / "0k" / "qa1.jsonl", stories / "calibration" / "qa1.jsonl")
    with pytest.raises(DataError, match="babilong: 120 calibration prompts are also evaluated"):
        calibration_prompts("babilong", tokenizer=tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
def test_calibration_prompts_are_seeded(monkeypatch, tokenizer, family):
    monkeypatch.setenv("LOCOS_DATA", "bundled")
    first, source = calibration_prompts(family, tokenizer=tokenizer, count=20, seed=1)
    assert first == calibration_prompts(family, tokenizer=tokenizer, count=20, seed=1)[0]
    assert first != calibration_prompts(family, tokenizer=tokenizer, count=20, seed=2)[0]
    assert len(first) == 20
    assert source["prompts"] == 20
