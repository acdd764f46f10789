"""Batches, shared prefixes, and running out of memory."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FAMILIES, SCORED, random_ids, tiny_model
from transformers import StaticCache

from lm_eval_locos.architecture import describe
from lm_eval_locos.detection import prefix
from lm_eval_locos.detection.batches import Batch, Trial, plan, reusable
from lm_eval_locos.detection.cri import cri
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.errors import DataError

BOOK, QUESTION = random_ids(90, 7, seed=11)
FULL = [
    name
    for name in SCORED
    if not {"sliding_window", "attention_chunk_size", "layer_types"} & set(FAMILIES[name].config)
]
assert set(FULL) < set(FAMILIES)


def grid(depths, needles, book=BOOK, gold="w1"):
    """A grid over depths and needles of one haystack, as token ids."""
    trials = []
    for depth in depths:
        for length, seed in needles:
            needle = random_ids(length, seed=seed)[0]
            ids = [1, 5, *book[:depth], *needle, *book[depth:], *QUESTION]
            trials.append(Trial(tuple(ids), (depth + 2, depth + 2 + length), gold))
    return trials


def answered(engine, trials):
    """The trials that generate something, with a token of it as the gold answer."""
    found = dict(engine.run_all(trials, batch_size=1, share=False))
    plain = {i: [token for token in found[i].ids if token > 4][:2] for i in range(len(trials))}
    made = [
        Trial(trials[i].ids, trials[i].needle, engine.tokenizer.decode(tokens[-1:]))
        for i, tokens in plain.items()
        if tokens
    ]
    assert len(made) >= 0.6 * len(trials)
    return made


def fed_tokens(model):
    """A list that grows by the number of tokens of each forward pass."""
    counts = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: counts.append(args[0].numel())
    )
    return counts


@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_sharing_gives_the_same_tokens_and_scores(family, batch_size, tokenizer):
    model = tiny_model(family)
    engine = Engine(model, tokenizer, max_new_tokens=6)
    needles = [(6, 21), (5, 22), (6, 23)]
    other_book = random_ids(60, seed=12)[0]
    trials = grid([0, 30, 60, 90], needles) + grid([10, 50], needles, other_book)
    trials = answered(engine, trials)
    alone = dict(engine.run_all(trials, batch_size=1, share=False))
    counts = fed_tokens(model)
    shared = dict(engine.run_all(trials, batch_size=batch_size, share=True))
    assert set(shared) == set(alone) == set(range(len(trials)))
    assert sum(counts) < 0.75 * sum(len(trial.ids) for trial in trials) + 6 * len(trials)
    for i, expected in alone.items():
        assert expected.passed
        assert shared[i].ids == expected.ids
        assert shared[i].steps == expected.steps
        for method, score in expected.scores.items():
            error = (shared[i].scores[method] - score).abs().max()
            assert error < 1e-4 * score.abs().max() + 1e-9, method


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("size", [1, 7, 30])
def test_prefill_in_pieces_gives_the_same(family, size, tokenizer, monkeypatch):
    engine = Engine(tiny_model(family), tokenizer, max_new_tokens=6)
    trials = answered(engine, grid([20, 80], [(3, 21), (9, 22)]))
    batches = [Batch((0, 1, 2, 3))]
    if family == "qwen3":
        batches.append(Batch((0, 1), shared=trials[2].ids[:82]))
    for batch in batches:
        whole = engine.run(trials, batch)
        monkeypatch.setattr("lm_eval_locos.detection.generate._PIECE_CPU", size)
        pieces = engine.run(trials, batch)
        monkeypatch.undo()
        for one, other in zip(whole, pieces, strict=True):
            assert one.passed
            assert one.ids == other.ids
            for method, score in one.scores.items():
                error = (other.scores[method] - score).abs().max()
                assert error < 1e-4 * score.abs().max() + 1e-9, method


def test_ragged_members_of_a_shared_batch(tokenizer):
    """Rows of different lengths and different shares of the prefix in one padded batch."""
    engine = Engine(tiny_model("qwen3"), tokenizer, max_new_tokens=6)
    trials = grid([20, 80], [(3, 21), (9, 22)])
    short = Trial(trials[0].ids[:15], (12, 15), "w1")  # shorter than what the others are fed
    trials = answered(engine, [*trials, short])
    alone = [engine.run(trials, Batch((i,)))[0] for i in range(5)]
    together = engine.run(trials, Batch((0, 1, 2, 3, 4), shared=tuple(trials[2].ids[:82])))
    for one, other in zip(alone, together, strict=True):
        assert one.passed
        assert one.ids == other.ids
        for method, score in one.scores.items():
            error = (other.scores[method] - score).abs().max()
            assert error < 1e-4 * score.abs().max() + 1e-9, method


def test_the_prefix_is_prefilled_once_for_all_its_batches(tokenizer):
    model = tiny_model("llama")
    engine = Engine(model, tokenizer, max_new_tokens=1)
    trials = grid([90], [(6, s) for s in range(20, 26)])
    counts = fed_tokens(model)
    list(engine.run_all(trials, batch_size=2))
    suffix = 6 + len(QUESTION)
    assert counts == [92, 2 * suffix, 2 * suffix, 2 * suffix]
    engine.release()
    counts.clear()
    list(engine.run_all(trials, batch_size=2))
    assert counts[0] == 92


@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_sliding_layers_fall_back_and_say_so(family, tokenizer, caplog):
    engine = Engine(tiny_model(family), tokenizer, max_new_tokens=2)
    trials = grid([30, 90], [(6, 21), (6, 22)])
    with caplog.at_level(logging.WARNING):
        batches = engine.plan(trials, batch_size=2)
    assert all(batch.shared == () for batch in batches)
    assert "layer with a window keeps its last 12 tokens" in caplog.text
    short = [Trial(trial.ids[:12], (2, 4), "w1") for trial in trials]
    assert engine.cannot_share(short) is None  # nothing leaves a window of 12


def test_sliding_layers_share_what_fits_their_window(tokenizer):
    model = tiny_model("mistral")
    model.config.sliding_window = 120
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 120
    engine = Engine(model, tokenizer, max_new_tokens=6)
    trials = answered(engine, grid([30, 90], [(6, 21), (6, 22)]))
    assert engine.cannot_share(trials) is None
    alone = dict(engine.run_all(trials, batch_size=1, share=False))
    batches = engine.plan(trials, batch_size=2)
    assert any(batch.shared for batch in batches)
    for batch in batches:
        for i, result in zip(batch.members, engine.run(trials, batch), strict=True):
            assert result.ids == alone[i].ids
            for method, score in alone[i].scores.items():
                torch.testing.assert_close(result.scores[method], score, rtol=1e-4, atol=1e-5)


def test_other_caches_fall_back_and_say_so(tokenizer, caplog):
    model = tiny_model("llama")
    engine = Engine(
        model,
        tokenizer,
        max_new_tokens=2,
        make_cache=lambda: StaticCache(config=model.config, max_cache_len=128),
    )
    with caplog.at_level(logging.WARNING):
        batches = engine.plan(grid([30, 90], [(6, 21)]), batch_size=1)
    assert all(batch.shared == () for batch in batches)
    assert "StaticCache" in caplog.text


def test_out_of_memory_halves_the_batch(tokenizer, caplog):
    model = tiny_model("llama")
    engine = Engine(model, tokenizer, max_new_tokens=3)
    trials = [Trial(tuple(ids), (2, 5), "w1") for ids in random_ids(*[20] * 5)]
    expected = engine.run(trials, Batch(tuple(range(5))))
    rows = []

    def fail(module, args):
        rows.append(args[0].shape[0])
        if args[0].shape[0] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = model.get_input_embeddings().register_forward_pre_hook(fail)
    with caplog.at_level(logging.WARNING):
        got = engine.run(trials, Batch(tuple(range(5))))
    assert [result.ids for result in got] == [result.ids for result in expected]
    assert max(rows[1:]) <= 3
    assert "halved" in caplog.text
    assert model.config._attn_implementation == "sdpa"
    hook.remove()

    def always(module, args):
        raise RuntimeError("CUDA out of memory.")

    model.get_input_embeddings().register_forward_pre_hook(always)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.run(trials, Batch((0, 1)))


def test_automatic_batch_size_follows_the_free_memory(tokenizer, monkeypatch):
    engine = Engine(tiny_model("llama"), tokenizer)
    plenty = engine.batch_size(100)
    assert plenty >= 1
    memory = type("Memory", (), {"available": 0})
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert engine.batch_size(100) == 1
    memory.available = 2**40
    assert engine.batch_size(100) == plenty
    assert engine.batch_size(2**31) == 1


# -- the plan ------------------------------------------------------------------------------------


@st.composite
def trial_sets(draw):
    books = draw(st.lists(st.integers(0, 50), min_size=1, max_size=3, unique=True))
    trials = []
    for _ in range(draw(st.integers(1, 12))):
        book = random_ids(60, seed=draw(st.sampled_from(books)))[0]
        depth = draw(st.integers(0, 60))
        needle = random_ids(draw(st.integers(1, 9)), seed=draw(st.integers(0, 4)))[0]
        ids = (1, *book[:depth], *needle, *book[depth:], *QUESTION[: draw(st.integers(0, 7))])
        trials.append(Trial(ids, (depth + 1, depth + 1 + len(needle)), "w1"))
    return trials


@given(trial_sets(), st.integers(1, 5), st.booleans())
@settings(max_examples=80, deadline=None)
def test_plan_invariants(trials, batch_size, share):
    batches = plan(trials, batch_size=batch_size, share=share)
    assert batches == plan(trials, batch_size=batch_size, share=share)
    members = [i for batch in batches for i in batch.members]
    assert sorted(members) == list(range(len(trials)))
    cost = sum(len(shared) for shared in {batch.shared for batch in batches})
    for batch in batches:
        assert 1 <= len(batch.members) <= batch_size
        left = []
        for i in batch.members:
            same = reusable(trials[i].ids, batch.shared)
            assert trials[i].ids[:same] == batch.shared[:same]
            left.append(len(trials[i].ids) - same)
            if batch.shared:  # it really shares its haystack
                assert same >= 0.9 * trials[i].needle[0]
                assert same >= 0.1 * len(trials[i].ids)
        assert max(left) <= 1.15 * min(left)
        cost += sum(left)
    assert cost <= sum(len(trial.ids) for trial in trials)
    if not share:
        assert all(batch.shared == () for batch in batches)


def test_batches_of_one_prefix_are_neighbours():
    trials = grid([30, 60, 90], [(6, 21), (6, 22)]) + grid(
        [20, 60], [(6, 21), (6, 22)], random_ids(60, seed=12)[0]
    )
    shared = [batch.shared for batch in plan(trials, batch_size=1)]
    changes = sum(a != b for a, b in pairwise(shared))
    assert len(set(shared)) == 2
    assert changes == 1


def test_reusable_leaves_the_scored_rows():
    assert reusable(range(20), range(20)) == 12
    assert reusable(range(20), range(5)) == 5
    assert reusable(range(5), range(5)) == 0
    assert reusable(range(20), ()) == 0


def test_impossible_batch_size_is_refused():
    with pytest.raises(DataError, match="batch_size=0"):
        plan([], batch_size=0)


@torch.inference_mode()
def test_continued_caches_are_those_of_a_full_prefill():
    model = tiny_model("qwen3")
    ids = random_ids(30, seed=5)[0]
    architecture = describe(model)
    whole = prefix.prefill(model, architecture, ids)
    cut = prefix.continued(model, architecture, whole, [30, 30], 20)
    assert cut.get_seq_length() == 20
    for part, full in zip(cut.layers, whole.layers, strict=True):
        for row in range(2):
            assert torch.equal(part.keys[row], full.keys[0, :, :20])
    ragged = prefix.continued(model, architecture, whole, [30, 24], 20)  # six columns of padding
    for part, full in zip(ragged.layers, whole.layers, strict=True):
        assert torch.equal(part.values[1, :, 6:], full.values[0, :, :14])
    assert whole.get_seq_length() == 30


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "gemma2"])
def test_no_matrix_of_a_whole_prompt_is_formed(family, tokenizer, monkeypatch):
    """However the model was loaded: not before the needle, and not where heads are patched."""
    formed = []
    softmax = torch.nn.functional.softmax

    def watched(x, *args, **kwargs):
        formed.append(tuple(x.shape[-2:]))
        return softmax(x, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "softmax", watched)
    monkeypatch.setattr("lm_eval_locos.detection.generate._PIECE_CPU", 32)
    model = tiny_model(family, attn="eager")
    model(torch.tensor([BOOK]))
    assert (90, 90) in formed
    formed.clear()
    engine = Engine(model, tokenizer, max_new_tokens=2)
    shared = (1, 5, *BOOK[:60])
    trials = grid([60], [(6, 21), (6, 22)])
    engine.run(trials, Batch((0, 1), shared=shared))
    assert all(rows <= 32 for rows, _ in formed)
    assert (not formed) == (family != "gemma2")
    assert model.config._attn_implementation == "eager"
    if family != "gemma2":
        cri(model, trials[0], [7, 8], [0])
        assert not formed
