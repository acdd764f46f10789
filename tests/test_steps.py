"""Where a generation stops, which steps are answer steps, which trials pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from lm_eval_locos.detection.steps import (
    Stopping,
    answer_steps,
    eos_tokens,
    generated_text,
    passes,
    token_spans,
)


def byte_tokenizer(*words: str) -> PreTrainedTokenizerFast:
    """One token a byte, and merges that make each of ``words`` one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    merges = []
    for word in words:
        symbols = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(word)[0][0]
        whole = symbols[0]
        for symbol in symbols[1:]:
            merges.append((whole, symbol))
            whole += symbol
            vocabulary.setdefault(whole, len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(" Yuki", " Leon", "Leon", "ardo", " Diana", " was", " met", "東京")


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def stepped(tokenizer, text, gold, start=0):
    """The text of the answer steps' tokens."""
    ids = ids_of(tokenizer, text)
    steps = answer_steps(ids, gold, tokenizer, start)
    assert steps == sorted(set(steps))
    return tokenizer.decode([ids[step] for step in steps])


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (" Yuki was", "Yuki", " Yuki"),
        ("Yuki was", "Yuki", "Yuki"),  # bytes, other tokens than after a blank
        ("it was Yuki", "Yuki", " Yuki"),
        (" Diana met Yuki and Yuki", "Yuki", " Yuki"),
        ("YUKI!", "Yuki", "YUKI"),  # no token in common
        ('"Yuki"', "Yuki", "Yuki"),
        (" Leonardo met Leon", "Leon", " Leon"),  # the second one
        (" Leonardo", "Leon", " Leon"),  # nothing better
        (" Leons", "Leon", " Leon"),
        ("in 東京都", "東京", "東京"),
        (" Diana", "Yuki", ""),
        ("", "Yuki", ""),
        (" Yuki", "", ""),
        (" Yuki", " Yuki ", " Yuki"),
        (" two words here", "Two Words", "two words"),
    ],
)
def test_answer_steps(tokenizer, text, gold, expected):
    assert stepped(tokenizer, text, gold) == expected


def test_the_second_leon_is_the_answer_and_not_the_start_of_a_longer_name(tokenizer):
    ids = ids_of(tokenizer, " Leonardo met Leon")
    assert answer_steps(ids, "Leon", tokenizer) == [len(ids) - 1]


def test_steps_count_from_the_start_of_the_generation(tokenizer):
    ids = ids_of(tokenizer, "<think> Yuki</think> Yuki")
    assert answer_steps(ids, "Yuki", tokenizer, 3) == [3]
    assert answer_steps(ids, "Yuki", tokenizer) == [1]


def test_a_character_of_several_tokens_belongs_to_all_of_them():
    tokenizer = byte_tokenizer()
    ids = ids_of(tokenizer, "a京b")
    text, spans = token_spans(ids, tokenizer)
    assert text == "a京b"
    assert spans == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3)]
    assert answer_steps(ids, "京", tokenizer) == [1, 2, 3]


@given(st.text(alphabet="abc éß京🎉\n", max_size=12))
def test_spans_cover_the_text(text):
    tokenizer = byte_tokenizer("ab", "京")
    decoded, spans = token_spans(ids_of(tokenizer, text), tokenizer)
    assert decoded == text
    covered = {i for low, high in spans for i in range(low, high)}
    assert covered == set(range(len(text)))
    assert all(a[0] <= b[0] for a, b in pairwise(spans))


def run(tokenizer, text, *, eos=(), limit=50, prompt=""):
    rule = Stopping(tokenizer, eos, limit)
    generation = rule.start(ids_of(tokenizer, prompt))
    for token in ids_of(tokenizer, text):
        generation.add(token)
    content = generation.ids[generation.content :]
    return generation, generated_text(content, tokenizer)


@pytest.mark.parametrize(
    ("text", "prompt", "content", "stopped"),
    [
        (" Yuki\nmore", "", "Yuki", True),
        ("\n Yuki", "", "", True),
        (" Yuki", "", "Yuki", False),
        ("<think>a\nb</think>\n\n Yuki\nmore", "", "Yuki", True),
        ("a\nb</think> Yuki\nmore", "<think>", "Yuki", True),  # opened by the chat template
        (" Yuki\nmore", "<think></think>", "Yuki", True),  # closed by it: thinking is off
        ("<think>a\nb", "", "", False),
        ("so <think>a</think> Yuki", "", "Yuki", False),
    ],
)
def test_newline_and_thinking(tokenizer, text, prompt, content, stopped):
    generation, got = run(tokenizer, text, prompt=prompt)
    assert got == content
    assert generation.stopped == stopped
    assert generation.ended == stopped


def test_any_eos_and_the_limit_end_a_generation(tokenizer):
    yuki, was = ids_of(tokenizer, " Yuki was")
    generation, text = run(tokenizer, " Yuki was Yuki", eos=[was, 5])
    assert (generation.ids, text, generation.stopped) == ([yuki], "Yuki", True)
    generation, text = run(tokenizer, " Yuki was Yuki", limit=2)
    assert (generation.ids, generation.ended, generation.stopped) == ([yuki, was], True, False)


def test_eos_of_tokenizer_and_generation_config(tokenizer):
    class Model:
        generation_config = GenerationConfig(eos_token_id=[7, 9])

    assert eos_tokens(Model(), tokenizer) == {7, 9, tokenizer.eos_token_id}
    Model.generation_config = GenerationConfig(eos_token_id=7)
    assert eos_tokens(Model(), tokenizer) == {7, tokenizer.eos_token_id}
    assert eos_tokens(object(), tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("gold", "text", "steps", "expected"),
    [
        ("Yuki", "It was Yuki.", [3], True),
        ("Yuki", "It was Yuki.", [], False),
        ("Yuki Sato", "Yuki", [0], False),  # recall .5 is not above .5
        ("Yuki Sato Ito", "Sato Yuki", [0], True),
        ("Leon", "Leonardo", [0], False),
        ("東京", "東京", [0], True),
    ],
)
def test_passes(gold, text, steps, expected):
    assert passes(gold, text, steps) is expected
