"""Head scores: every method against loops over eager attention, and the equations by themselves."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_reference import SlowScores, first_occurrence, generate
from tiny import SCORED, attention_of, random_ids, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_locos.architecture import describe
from lm_eval_locos.detection import reader, scores
from lm_eval_locos.detection.batches import Batch, Trial
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.errors import DataError, LocosError

METHODS = scores.METHODS + scores.VARIANTS
STOP = {2, 4}  # </s> and the newline of the test tokenizer
# With a window of 12: seen whole, left of it, cut by its edge (which moves while decoding).
NEEDLES = {40: (31, 36), 37: (4, 9), 36: (20, 28)}


def relative(got, expected) -> float:
    return float(np.abs(np.asarray(got) - expected).max() / max(np.abs(expected).max(), 1e-12))


def make_trial(eager, tokenizer, prompt, needle, family="llama"):
    """A trial whose gold answer is what the model generates, and its slow scores."""
    generated, stopped = generate(eager, prompt, STOP, 8)
    plain = [t for t in range(len(generated)) if generated[t] > 4]  # no special tokens
    pairs = [[a, b] for a, b in pairwise(plain) if b == a + 1]
    answer = [generated[t] for t in (pairs[-1] if pairs else plain[-1:])]
    steps = first_occurrence(generated, answer)
    trial = Trial(tuple(prompt), needle, tokenizer.decode(answer))
    return trial, SlowScores(eager, prompt, needle, generated, stopped, steps, family)


def speaking_prompts(eager):
    """Random prompts, one a length of NEEDLES, after which the model says something."""
    for length in NEEDLES:
        candidates = (random_ids(length, seed=seed)[0] for seed in range(3, 30))
        yield next(p for p in candidates if any(t > 4 for t in generate(eager, p, STOP, 8)[0]))


def check(result, slow, tolerance=1e-4):
    assert list(result.ids) == slow.generated
    assert list(result.steps) == slow.steps
    assert result.passed
    for method in METHODS:
        expected = slow.all_heads(method)
        assert result.scores[method].shape == expected.shape
        assert relative(result.scores[method], expected) < tolerance, method


@pytest.mark.parametrize("family", SCORED)
def test_every_method_equals_the_slow_reference(family, tokenizer):
    eager = tiny_model(family, attn="eager")
    made = [
        make_trial(eager, tokenizer, prompt, NEEDLES[len(prompt)], family)
        for prompt in speaking_prompts(eager)
    ]
    trials = [trial for trial, _ in made]
    engine = Engine(tiny_model(family), tokenizer, methods=METHODS, max_new_tokens=8)
    alone = [engine.run(trials, Batch((i,)))[0] for i in range(3)]
    padded = engine.run(trials, Batch((0, 1, 2)))
    for results in (alone, padded):
        for result, (_, slow) in zip(results, made, strict=True):
            check(result, slow)
    for method in ("locos", "dla", "attention_spatial", "contrastive", "headkv"):
        assert any(np.abs(slow.all_heads(method)).max() > 1e-3 for _, slow in made), method


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_matrices_are_formed_in_pieces(family, tokenizer, monkeypatch):
    """Families without a kernel that forms none never have a whole prompt's at a time."""
    eager = tiny_model(family)
    prompt = next(speaking_prompts(eager))
    trial, slow = make_trial(eager, tokenizer, prompt, (31, 36), family)
    monkeypatch.setattr("lm_eval_locos.detection.generate._PIECE_CPU", 7)
    rows = []
    hook = attention_of(eager, family, 0).register_forward_hook(
        lambda module, args, output: rows.append(output[0].shape[1])
    )
    (result,) = Engine(eager, tokenizer, methods=METHODS, max_new_tokens=8).run(
        [trial], Batch((0,))
    )
    hook.remove()
    assert rows[:6] == [7, 7, 7, 7, 7, 5]
    check(result, slow)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_prompt_shorter_than_the_anchor_rows_in_a_padded_batch(family, tokenizer):
    eager = tiny_model(family, attn="eager")
    made = [
        make_trial(eager, tokenizer, prompt, needle, family)
        for prompt, needle in zip(random_ids(5, 20, seed=1), [(1, 3), (0, 20)], strict=True)
    ]
    engine = Engine(tiny_model(family), tokenizer, methods=METHODS, max_new_tokens=8)
    results = engine.run([trial for trial, _ in made], Batch((0, 1)))
    for result, (_, slow) in zip(results, made, strict=True):
        check(result, slow)


def test_wu_counts_copied_tokens_of_the_needle(tokenizer):
    # A tied Gemma repeats its last token: put it in the needle, and some heads do copy it.
    eager = tiny_model("gemma3_text", attn="eager")
    prompt = random_ids(30, seed=8)[0]
    generated, _ = generate(eager, prompt, STOP, 1)
    prompt[20:26] = [generated[0]] * 4 + prompt[24:26]
    trial, slow = make_trial(eager, tokenizer, prompt, (20, 26), "gemma3_text")
    engine = Engine(tiny_model("gemma3_text"), tokenizer, methods=METHODS, max_new_tokens=8)
    (result,) = engine.run([trial], Batch((0,)))
    assert result.scores["wu"].max() > 0
    check(result, slow)


def test_a_failing_trial_has_headkv_only(tokenizer):
    eager = tiny_model("llama", attn="eager")
    trial, slow = make_trial(eager, tokenizer, random_ids(30, seed=4)[0], (5, 9))
    engine = Engine(tiny_model("llama"), tokenizer, max_new_tokens=8)
    wrong = Trial(trial.ids, trial.needle, "w91 w90 w89")
    passed, failed = engine.run([trial, wrong], Batch((0, 1)))
    assert passed.passed
    assert not failed.passed
    assert failed.steps == ()
    assert set(failed.scores) == {"headkv"}
    assert relative(failed.scores["headkv"], slow.all_heads("headkv")) < 1e-4


def test_some_methods_alone_give_the_same_scores(tokenizer):
    eager = tiny_model("qwen3", attn="eager")
    trial, slow = make_trial(eager, tokenizer, random_ids(30, seed=4)[0], (5, 9))
    for method in METHODS:
        engine = Engine(tiny_model("qwen3"), tokenizer, methods=[method], max_new_tokens=8)
        (result,) = engine.run([trial], Batch((0,)))
        assert list(result.scores) == [method]
        assert relative(result.scores[method], slow.all_heads(method)) < 1e-4


def test_unknown_method_and_impossible_needle_are_refused(tokenizer):
    with pytest.raises(LocosError, match="'lcos' is not known"):
        Engine(tiny_model("llama"), tokenizer, methods=["lcos"])
    with pytest.raises(DataError, match=r"needle=\[3, 3\] in a prompt of 9 tokens"):
        Trial(tuple(range(9)), (3, 3), "w1")


# -- the equations by themselves ---------------------------------------------------------------

floats = st.floats(-5, 5, width=32)


@given(st.integers(0, 2**20), st.integers(1, 4), st.integers(2, 30), st.data())
@settings(max_examples=60, deadline=None)
def test_attention_of_the_needle_equals_a_softmax(seed, rows, count, data):
    generator = torch.Generator().manual_seed(seed)
    query, keys, values = (
        torch.randn(h, n, 8, generator=generator) for h, n in ((4, rows), (2, count), (2, count))
    )
    low = [data.draw(st.integers(0, count - 1)) for _ in range(rows)]
    high = [data.draw(st.integers(edge + 1, count)) for edge in low]
    start = data.draw(st.integers(0, count))
    end = data.draw(st.integers(start, count))
    softcap = data.draw(st.sampled_from([None, 1.5]))
    sinks = data.draw(st.sampled_from([None, torch.tensor([0.5, -1.0, 2.0, 0.0])]))
    logits = scores.attention_logits(query, keys, low, high, scaling=0.3, softcap=softcap)
    weights, total = scores.needle_weights(logits, (start, end), sinks)
    output = scores.weighted_values(weights, values[:, start:end])
    best, overlap = scores.most_attended(logits, (start, end))
    for r in range(rows):
        inside = [j for j in range(low[r], high[r]) if start <= j < end]
        for h in range(4):
            raw = 0.3 * keys[h // 2].double() @ query[h, r].double()
            if softcap is not None:
                raw = softcap * torch.tanh(raw / softcap)
            seen = raw[low[r] : high[r]]
            extra = seen.new_empty(0) if sinks is None else sinks[h : h + 1].double()
            expected = torch.zeros(count, dtype=torch.float64)
            expected[low[r] : high[r]] = torch.cat([seen, extra]).softmax(0)[: len(seen)]
            torch.testing.assert_close(
                weights[h, r].double(), expected[start:end], atol=1e-5, rtol=1e-4
            )
            assert total[h, r] == pytest.approx(float(expected.sum()), abs=1e-5)
            written = (expected[inside, None] * values[h // 2][inside]).sum(0)
            torch.testing.assert_close(output[h, r].double(), written, atol=1e-5, rtol=1e-4)
            ranked = sorted(range(low[r], high[r]), key=lambda j: -float(raw[j]))
            assert best[h, r] == (ranked[0] - start if ranked[0] in inside else -1)
            share = sum(j in inside for j in ranked[:10]) / len(ranked[:10])
            assert overlap[h, r] == pytest.approx(share, abs=1e-6)


def test_bfloat16_is_cast_before_the_arithmetic():
    query, keys, values = (torch.randn(2, n, 8).bfloat16() for n in (3, 9, 9))
    low = scores.attention_logits(query, keys, [0] * 3, [9] * 3, scaling=0.4)
    exact = scores.attention_logits(query.float(), keys.float(), [0] * 3, [9] * 3, scaling=0.4)
    assert torch.equal(low, exact)
    weights, _ = scores.needle_weights(low, (2, 5))
    part = values[:, 2:5]
    assert torch.equal(
        scores.weighted_values(weights, part), scores.weighted_values(weights, part.float())
    )


def test_strong_sinks_and_far_logits_do_not_overflow():
    logits = torch.tensor([[[0.0, -300.0, 200.0]], [[0.0, -300.0, -200.0]]])
    weights, total = scores.needle_weights(logits, (0, 2), torch.tensor([-1e4, 1e4]))
    assert weights.isfinite().all()
    assert total.flatten().tolist() == [1.0, 0.0]


@given(st.lists(floats, min_size=2, max_size=12), st.data())
def test_contrast_equals_its_definition(phi, data):
    count = len(phi)
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start, count))
    inside = phi[start:end]
    outside = phi[:start] + phi[end:]
    n = len(inside)
    expected = 0.0
    if n:
        expected = sum(inside) - (n / (count - n) * sum(outside) if outside else 0.0)
    got = scores.contrast(
        torch.tensor([[sum(inside)]]),
        torch.tensor([[sum(phi)]]),
        torch.tensor([[n]]),
        torch.tensor([[count]]),
    )
    assert float(got) == pytest.approx(expected, abs=1e-3)


@given(st.integers(1, 20), st.integers(1, 20), floats, floats)
def test_contrast_invariants(n, off, phi, factor):
    """A head that writes the same from every key scores 0; scores scale with phi."""
    counts = (torch.tensor([[n]]), torch.tensor([[n + off]]))
    even = scores.contrast(torch.tensor([[n * phi]]), torch.tensor([[(n + off) * phi]]), *counts)
    assert float(even) == pytest.approx(0, abs=1e-4 * (1 + abs(phi) * n))
    needle, total = torch.tensor([[phi, 1.0]]), torch.tensor([[1.0, phi]])
    one = scores.contrast(needle, total, *counts)
    scaled = scores.contrast(factor * needle, factor * total, *counts)
    torch.testing.assert_close(scaled, factor * one, atol=1e-4, rtol=1e-4)


def test_contrast_edges():
    needle, total = torch.tensor([[3.0], [3.0]]), torch.tensor([[5.0], [3.0]])
    got = scores.contrast(needle, total, torch.tensor([[0], [4]]), torch.tensor([[9], [4]]))
    assert got.flatten().tolist() == [0.0, 3.0]


tokens = st.lists(st.integers(0, 5), min_size=1, max_size=6)


@given(tokens, tokens, st.data())
def test_wu_equals_its_definition(needle, generated, data):
    place = st.tuples(*[st.integers(-1, len(needle) - 1)] * 2)
    best = data.draw(st.lists(place, min_size=len(generated), max_size=len(generated)))
    got = scores.wu(torch.tensor(best), torch.tensor(generated), torch.tensor(needle))
    for head in range(2):
        copied = {
            token
            for row, token in zip(best, generated, strict=True)
            if row[head] >= 0 and needle[row[head]] == token
        }
        assert float(got[head]) == len(copied) / len(set(needle))


def test_contrastive_without_other_steps_is_the_mean_over_answer_steps():
    signal = torch.tensor([[0.2, 0.4], [0.4, 0.0]])
    only = scores.contrastive(signal, torch.tensor([True, True]))
    both = scores.contrastive(signal, torch.tensor([True, False]))
    torch.testing.assert_close(only, torch.tensor([0.3, 0.2]).double())
    torch.testing.assert_close(both, torch.tensor([-0.2, 0.4]).double())


@given(st.integers(0, 30), st.integers(0, 9), st.integers(1, 8))
def test_visible_columns_equals_the_mask(column, padding, window):
    column += padding
    masks = {
        "global": lambda j: True,
        "sliding": lambda j: j > column - window,
        "chunked": lambda j: (j - padding) // window == (column - padding) // window,
    }
    for kind, mask in masks.items():
        limit = None if kind == "global" else window
        (low,), (high,) = scores.visible_columns([column], padding, kind, limit)
        expected = [j for j in range(50) if padding <= j <= column and mask(j)]
        assert list(range(low, high)) == expected


def test_scores_in_chunks_of_rows_are_the_same(tokenizer, monkeypatch):
    eager = tiny_model("gemma3_text", attn="eager")
    trial, slow = make_trial(eager, tokenizer, random_ids(30, seed=4)[0], (17, 22), "gemma3_text")
    engine = Engine(tiny_model("gemma3_text"), tokenizer, methods=METHODS, max_new_tokens=8)
    for limit in (1, 3 * 4 * 30):
        monkeypatch.setattr(reader, "_CHUNK", limit)
        (result,) = engine.run([trial], Batch((0,)))
        check(result, slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_direct_effect_is_the_transposed_projection(dtype):
    projection = torch.nn.Linear(12, 6).to(dtype)
    u = torch.randn(3, 6).to(dtype).float()
    expected = u @ projection.weight.detach().float()
    torch.testing.assert_close(scores.direct_effect(projection, u), expected)


def test_direct_effect_sees_an_adapter():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_model("llama"),
        LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False, lora_dropout=0.5),
    ).eval()
    layer = describe(model).layers[1]
    u = torch.randn(3, 32)
    with torch.inference_mode():
        identity = layer.output(torch.eye(32))  # rows of the adapted transposed weight
        torch.testing.assert_close(scores.direct_effect(layer.output, u), u @ identity.T)


# -- golden numbers ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(goldens, smollm2):
    model = AutoModelForCausalLM.from_pretrained(
        smollm2["pretrained"], gguf_file=smollm2["gguf_file"], dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2["pretrained"], gguf_file=smollm2["gguf_file"])
    records = json.loads((goldens / "trials" / "trials.json").read_text(encoding="utf-8"))
    arrays = np.load(goldens / "trials" / "trials.npz")
    trials = [
        Trial(tuple(arrays[f"t{i}_input_ids"].tolist()), tuple(r["needle_span"]), r["gold"])
        for i, r in enumerate(records)
    ]
    return Engine(model, tokenizer, max_new_tokens=10), trials, records, arrays


@pytest.mark.real_model
@pytest.mark.parametrize("batch_size", [1, 5])
def test_golden_trials(golden, batch_size):
    engine, trials, records, arrays = golden
    seen = []
    for i, result in engine.run_all(trials, batch_size=batch_size, share=False):
        assert list(result.ids) == records[i]["generated_ids"]
        assert result.text == records[i]["generated_text"].strip()
        assert list(result.steps) == records[i]["answer_steps"]
        assert result.passed
        names = {"locos": "S_ref", "dla": "dla_own", "attention_spatial": "attention_spatial_own"}
        for method, name in names.items():
            assert relative(result.scores[method], arrays[f"t{i}_{name}"]) < 1e-3, method
        got = result.scores["locos"].flatten().topk(10).indices.tolist()
        assert got == np.argsort(-arrays[f"t{i}_S_ref"].ravel())[:10].tolist()
        assert not math.isnan(float(result.scores["contrastive"].sum()))
        seen.append(i)
    assert sorted(seen) == [0, 1, 2, 3, 4]
