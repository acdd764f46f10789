"""Scores of single answers, each against what the benchmark's rule says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from lm_eval_locos.families import scoring

ROOMS = ["bathroom", "bedroom", "garden", "hallway", "kitchen", "office"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("<think>why</think>Paris", "Paris"),
        ("<think>a</think> x <think>b</think> y", "x  y"),
        ("<think>never ends", ""),
        ("Paris <think>never ends", "Paris"),
        ("opened in the prompt</think>\nParis", "Paris"),
        ("", ""),
    ],
)
def test_thinking_is_no_answer(text, expected):
    assert scoring.strip_thinking(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>Paris</answer>", ("Paris", True)),
        ("<answer>a</answer> no, <answer> b </answer>", ("b", True)),
        ("so <answer>cut off", ("cut off", True)),
        ("<ANSWER>x</ANSWER>", ("x", True)),
        ("<answer>a <answer>b</answer>", ("b", True)),
        ("<answer></answer>", ("", True)),
        (" none ", ("none", False)),
        ("", ("", False)),
    ],
)
def test_last_answer_tag(text, expected):
    assert scoring.last_answer_tag(text) == expected


def test_musique_rules():
    assert scoring.normalize("  The  U.S.A.'s «best» a/an apple! ") == "usas best aan apple"
    assert scoring.exact_match(["Paris", "City of Light"], "the Paris.") == 1
    assert scoring.exact_match(["Paris"], "Paris, France") == 0
    assert scoring.sub_span(["Paris"], "It is in Paris, France.") == 1
    assert scoring.sub_span(["London", "paris"], "PARIS") == 1
    assert scoring.sub_span(["Paris"], "") == 0
    assert scoring.sub_span(["?!"], "no") == 0
    assert scoring.sub_span(["?!"], "what?!") == 1
    assert scoring.sub_span(["", " "], "anything") == 0
    assert scoring.sub_span(["art"], "a party") == 1  # a sub-string, as in the paper
    assert scoring.token_f1(["red green"], "green blue") == pytest.approx(0.5)
    assert scoring.token_f1(["the"], "a") == 1  # both empty
    assert scoring.token_f1(["x"], "") == 0
    assert scoring.token_f1(["x", "y z"], "y z") == 1


ascii_text = st.text(st.sampled_from("abcdefgh runnings'.,-!0123 _"), max_size=40)


@given(ascii_text, ascii_text)
def test_ascii_text_scores_as_rouge_score_does(gold, text):
    expected = RougeScorer(["rouge1", "rougeL"], use_stemmer=True).score(gold, text)
    assert scoring.rouge_l(gold, text) == expected["rougeL"].fmeasure
    assert scoring.rouge_1_recall(gold, text) == expected["rouge1"].recall


@pytest.mark.parametrize("text", ["東京", "Москва", "القاهرة", "Αθήνα", "서울", "São Paulo", "🍎"])
def test_every_script_matches_itself(text):
    assert scoring.rouge_l(text, text) == 1
    assert scoring.rouge_1_recall(text, f"{text} !") == 1
    assert scoring.rouge_l(text, "x") == 0
    assert scoring.exact_match([text], text) == 1


def test_rouge_of_nothing_is_zero():
    assert (
        scoring.rouge_l("Yuki", "") == scoring.rouge_l("", "") == scoring.rouge_l("...", "?") == 0
    )
    assert scoring.rouge_l("Yuki", "Yuki lives there.") == 0.5
    assert scoring.rouge_l("runner", "Runners") == 1  # stemmed


def test_contains_is_case_sensitive():
    assert scoring.contains(["Yuki"], "It is Yuki.") == 1
    assert scoring.contains(["Yuki"], "yuki") == 0


@pytest.mark.parametrize(
    ("target", "text", "question", "labels", "expected"),
    [
        ("kitchen", "The kitchen.", "Where is the apple?", ROOMS, 1),
        ("kitchen", "KITCHEN", "", ROOMS, 1),
        ("kitchen", "kitchen or office", "", ROOMS, 0),
        ("kitchen", "The kitchenette.", "", ROOMS, 0),
        ("kitchen", "", "", ROOMS, 0),
        ("kitchen", "She left the office for the kitchen", "before the office?", ROOMS, 1),
        ("office", "the office", "before the office?", ROOMS, 1),
        ("one", "none", "", ["none", "one", "two", "three"], 0),
        ("none", "none", "", ["none", "one", "two", "three"], 1),
        ("no", "unknown", "", ["no", "yes"], 0),
        ("apple", "pineapple", "", ["apple", "football", "milk", "nothing"], 0),
        ("apple,milk", "milk and apple", "", ["apple", "football", "milk", "nothing"], 1),
        ("apple,milk", "apple", "", ["apple", "football", "milk", "nothing"], 0),
        ("s,e", "s,e", "", ["n", "e", "s", "w"], 1),
        ("s,e", "south, then east", "", ["n", "e", "s", "w"], 1),
        ("s,e", "east and south", "", ["n", "e", "s", "w"], 0),
        ("s,e", "It's south, then east.", "", ["n", "e", "s", "w"], 1),
        ("s,e", "S, E", "", ["n", "e", "s", "w"], 1),
        ("s,e", "", "", ["n", "e", "s", "w"], 0),
    ],
)
def test_babilong_labels(target, text, question, labels, expected):
    assert scoring.label_match(target, text, question, labels) == expected
