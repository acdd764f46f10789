"""The bundled sample: reproducible, in the hub's shapes, held apart, and not to be guessed."""

from __future__ import annotations

import json
from collections import Counter
from itertools import combinations, islice

import pytest

from lm_eval_locos.families import babilong, musique, nolima, parametric
from lm_eval_locos.families.babilong import LABELS
from lm_eval_locos.sources import generate
from lm_eval_locos.sources.lookup import SAMPLE
from lm_eval_locos.sources.world import WORLD


@pytest.fixture(autouse=True)
def bundled(monkeypatch):
    monkeypatch.setenv("LOCOS_DATA", "bundled")


def rows(name):
    text = (SAMPLE / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_script_writes_what_is_shipped(tmp_path):
    written = generate.write_sample(tmp_path)
    shipped = sorted(path.relative_to(SAMPLE) for path in SAMPLE.rglob("*") if path.is_file())
    assert [path.relative_to(tmp_path) for path in written] == shipped
    for path in written:
        assert path.read_bytes() == (SAMPLE / path.relative_to(tmp_path)).read_bytes(), path


def test_the_world_is_consistent():
    assert len(set(WORLD.people)) == len(WORLD.people) >= 60
    landmarks = [name for city in WORLD.cities for name in city.landmarks]
    assert len(set(landmarks)) == len(landmarks)
    countries = {country.name for country in WORLD.countries}
    assert {city.country for city in WORLD.cities} <= countries
    words = [*WORLD.nouns, *WORLD.verbs, *WORLD.adjectives, *WORLD.adverbs]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("name", ["babilong/0k/qa1", "babilong/0k/qa2"])
def test_the_main_stories_are_at_least_100(name):
    assert len(rows(name)) >= 100
    assert len(rows("musique/answerable/validation")) >= 100


@pytest.mark.parametrize("task", ["qa1", "qa2"])
def test_rooms_cannot_be_guessed(task):
    found = rows(f"babilong/0k/{task}")
    last = 0
    for row in found:
        named = [w.strip(".") for w in row["input"].split() if w.strip(".") in WORLD.rooms]
        assert set(named) == set(WORLD.rooms)  # a uniform guess is right in one of six
        last += named[-1] == row["target"]
    assert last / len(found) <= 0.2
    assert max(Counter(row["target"] for row in found).values()) / len(found) <= 0.3


def test_cities_cannot_be_guessed():
    cities = {city.name for city in WORLD.cities}
    last = total = 0
    for row in rows("musique/answerable/validation"):
        text = " ".join(p["paragraph_text"] for p in row["paragraphs"])
        named = [word.strip(".") for word in text.split() if word.strip(".") in cities]
        assert len(set(named)) >= 5
        assert row["answer"] in named
        last += named[-1] == row["answer"]
        total += 1
    assert last / total <= 0.2


def test_names_cannot_be_guessed():
    documents = nolima.load()["test"]
    last = 0
    for doc in documents:
        context = doc["prompt"].partition("Answer the question")[0]
        named = [w.strip(".,") for w in context.split() if w.strip(".,") in WORLD.people]
        assert len(set(named)) == 7
        last += named[-1] == doc["answers"][0]
    assert last / len(documents) <= 0.2
    assert len(documents) >= 100


def test_stories_are_answered_by_following_them():
    """An independent reading of the facts gives the target."""
    for task in ("qa1", "qa2", "qa3"):
        for row in rows(f"babilong/0k/{task}"):
            at, holder, history = {}, {}, {}
            for sentence in row["input"].split(". "):
                words = sentence.strip(".").split()
                if words[0] in WORLD.people and words[1] in ("went", "moved", "travelled"):
                    at[words[0]] = words[-1]
                    for thing, person in holder.items():
                        if person == words[0]:
                            history[thing].append(words[-1])
                elif words[0] in WORLD.people:
                    holder[words[-1]] = words[0]
                    history[words[-1]] = [at[words[0]]]
            asked = row["question"].strip("?").split()
            if task == "qa1":
                assert at[asked[-1]] == row["target"]
            elif task == "qa2":
                assert at[holder[asked[-1]]] == row["target"]
            else:
                places = history[asked[3]]
                assert places[places.index(asked[-1]) - 1] == row["target"]


def test_chains_are_answered_by_following_them():
    for row in rows("musique/answerable/validation"):
        facts = {p["title"]: p["paragraph_text"].split(".")[0] for p in row["paragraphs"]}
        person = row["question"].split("of ")[-1].split(" live")[0]
        for _ in range(int(row["id"][0]) - 1):
            person = facts[person].split()[-1]
        assert facts[person] == f"{person} lives in {row['answer']}"
        supporting = [p for p in row["paragraphs"] if p["is_supporting"]]
        assert len(supporting) == int(row["id"][0])
        assert len(row["paragraphs"]) == 20


def fillers(texts):
    starts = ("The ", "A ", "An ", "Then the ")
    return {
        s.strip(" .")
        for text in texts
        for s in text.split(". ")
        if s.startswith(starts) and s.split()[-1].strip(".") in WORLD.nouns
    }


def test_parts_share_no_combination_and_no_filler():
    made = {
        part: {
            "babilong": list(generate.babilong(60, "qa2", part)),
            "musique": list(generate.musique(60, 2, part)),
        }
        for part in generate.PARTS
    }
    for a, b in combinations(generate.PARTS, 2):
        texts = [
            [row["input"] for row in made[part]["babilong"]]
            + [p["paragraph_text"] for row in made[part]["musique"] for p in row["paragraphs"]]
            for part in (a, b)
        ]
        first, second = map(fillers, texts)
        assert len(first) > 100
        assert not first & second
        answers = []
        for part in (a, b):
            asked = set()
            for row in made[part]["musique"]:
                last = [p for p in row["paragraphs"] if p["is_supporting"]]
                asked |= {
                    p["paragraph_text"].split(".")[0]
                    for p in last
                    if f"lives in {row['answer']}" in p["paragraph_text"]
                }
            answers.append(asked)
        assert answers[0]
        assert not answers[0] & answers[1]


def test_books_share_no_sentence():
    books = [
        set(filter(None, path.read_text().replace("\n", " ").split(". ")))
        for path in sorted((SAMPLE / "nolima/haystack/rand_shuffle").glob("*.txt"))
    ]
    assert len(books) == 5
    for a, b in combinations(books, 2):
        assert len(a) > 300
        assert not a & b


def test_calibration_and_evaluation_share_no_prompt(tokenizer):
    for family in (nolima, musique, babilong, parametric):
        kwargs = {"task": "qa2", "length": "0k"} if family is babilong else {}
        evaluated = set(family.load(**kwargs)["test"]["prompt"])
        turns, _ = family.calibration(tokenizer, 50, 42)
        assert len(set(turns)) == 50
        assert not set(turns) & evaluated


def test_other_worlds_and_sizes():
    import dataclasses

    small = dataclasses.replace(WORLD, people=WORLD.people[:30], cities=WORLD.cities[:10])
    training = list(islice(generate.musique(500, 2, "training", world=small), 500))
    assert len({json.dumps(row["paragraphs"]) for row in training}) == 500
    assert {row["answer"] for row in training} <= {city.name for city in small.cities}


@pytest.mark.parametrize("task", ["qa1", "qa2", "qa3", "qa4", "qa5"])
def test_targets_are_labels(task):
    assert {row["target"] for row in rows(f"babilong/0k/{task}")} <= set(LABELS[task])
