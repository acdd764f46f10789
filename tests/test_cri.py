"""Causal patching against one plain forward pass a head."""

from __future__ import annotations

import pytest
import torch
from slow_reference import generate
from tiny import FAMILIES, HEADS, SCORED, attention_of, random_ids, tiny_model

from lm_eval_locos.architecture import describe
from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.cri import cri, haystack_filler
from lm_eval_locos.errors import DataError

FILLER = [70, 71, 72, 73]


@pytest.fixture(params=SCORED)
def family(request):
    return request.param


@pytest.fixture
def made(family):
    """(eager model, sdpa model, trial, generated tokens)"""
    eager = tiny_model(family, attn="eager")
    prompt = random_ids(30, seed=6)[0]
    generated, _ = generate(eager, prompt, set(), 4)
    return eager, tiny_model(family), Trial(tuple(prompt), (20, 24), "w1"), generated


def slow_gain(model, family, trial, generated, steps, layer, head):
    """Whole sequences, no cache: head outputs are replaced by wrapping o_proj's forward."""
    prompt = list(trial.ids)
    s, e = trial.needle
    clean, corrupted = prompt + generated, prompt[:s] + FILLER + prompt[e:] + generated
    projection = getattr(attention_of(model, family, layer), FAMILIES[family].output)
    plain = projection.forward
    weight = projection.weight if hasattr(projection, "nf") else projection.weight.T
    size = len(weight) // HEADS
    seen = []

    def log_p(ids):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
        rows = logits.log_softmax(-1)
        picked = [rows[len(prompt) - 1 + t, generated[t]] for t in steps]
        return float(sum(picked)) / len(steps)

    def watch(z):
        seen.append(z.clone())
        return plain(z)

    def restore(z):
        z = z.clone()
        for i in range(head * size, (head + 1) * size):
            z[0, :, i] = seen[0][0, :, i]
        return plain(z)

    try:
        projection.forward = watch
        log_p(clean)
        projection.forward = plain
        floor = log_p(corrupted)
        projection.forward = restore
        return log_p(corrupted) - floor
    finally:
        projection.forward = plain


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_cri_equals_one_pass_a_head(made, family, batch_size):
    eager, model, trial, generated = made
    steps = [1, 2]
    got = cri(model, trial, generated, steps, filler=FILLER, batch_size=batch_size)
    expected = torch.tensor(
        [
            [
                slow_gain(eager, family, trial, generated[:3], steps, layer, head)
                for head in range(HEADS)
            ]
            for layer in FAMILIES[family].layers
        ],
        dtype=torch.float64,
    )
    assert expected.abs().max() > 1e-3
    assert (got - expected).abs().max() < 1e-4 * expected.abs().max() + 1e-6


def test_no_corruption_means_no_gain(made):
    _, model, trial, generated = made
    start, end = trial.needle
    gains = cri(model, trial, generated, [0], filler=trial.ids[start:end])
    assert gains.abs().max() < 1e-5


def test_number_of_passes_and_hooks(made, family):
    _, model, trial, generated = made
    rows = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: rows.append(args[0].shape)
    )
    cri(model, trial, generated, [0, 1], filler=FILLER, batch_size=4)
    fed = [shape[0] for shape in rows if shape[1] > 0]
    architecture = describe(model)
    windows = any(layer.window for layer in architecture.layers.values())
    prefills = 0 if windows or architecture.hybrid else 1
    assert sum(fed) == HEADS * len(FAMILIES[family].layers) + 2 + prefills
    layers = describe(model).decoder.modules()
    embeddings = model.get_input_embeddings()  # which has the hook of this test
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in layers if m is not embeddings)


def test_needle_at_the_very_start():
    model = tiny_model("llama")
    trial = Trial(tuple(random_ids(12, seed=2)[0]), (0, 4), "w1")
    assert haystack_filler(trial) == trial.ids[4:8]
    assert cri(model, trial, [9, 8], [1]).shape == (3, 4)


def test_filler_comes_from_the_haystack_and_fits():
    trial = Trial(tuple(range(10, 22)), (5, 8), "w1")
    assert haystack_filler(trial) == (12, 13, 14)
    assert haystack_filler(Trial((1, 2, 3, 4, 5), (0, 4), "w1")) == (5, 5, 5, 5)
    with pytest.raises(DataError, match="nothing but the needle"):
        haystack_filler(Trial((1, 2), (0, 2), "w1"))


def test_wrong_filler_and_no_answer_are_refused(made):
    _, model, trial, generated = made
    with pytest.raises(DataError, match="2 filler tokens for a needle of 4"):
        cri(model, trial, generated, [0], filler=[5, 6])
    with pytest.raises(DataError, match="no answer step"):
        cri(model, trial, generated, [])


def test_out_of_memory_halves_the_heads(made):
    _, model, trial, generated = made
    expected = cri(model, trial, generated, [0], filler=FILLER)

    def fail(module, args):
        if args[0].shape[0] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.get_input_embeddings().register_forward_pre_hook(fail)
    got = cri(model, trial, generated, [0], filler=FILLER, batch_size=4)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
