"""Capture: what it keeps, and that the model computes and stays exactly what it was."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from tiny import SCORED, padded, random_ids, tiny_model
from transformers import DynamicCache, StaticCache

from lm_eval_locos.architecture import describe
from lm_eval_locos.detection import prefix, scores
from lm_eval_locos.detection.batches import Batch, Trial
from lm_eval_locos.detection.capture import capturing
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.errors import ModelError

WINDOW = 12
PROMPT = 40
NEW = 5


@pytest.fixture(params=SCORED)
def model(request):
    return tiny_model(request.param)


def decode(model, capture, cache, ids, chunks):
    """Feeds ``ids`` in pieces of the given sizes; the logits of each one's last row."""
    logits, done = [], 0
    for size in chunks:
        if capture is not None:
            capture.release()
        out = prefix.forward(model, cache, input_ids=ids[:, done : done + size])
        logits.append(out.logits[:, -1])
        done += size
    return torch.stack(logits)


def kept(capture):
    return [
        (layer.queries(), layer.outputs(), *layer.keys_values(), list(layer.columns))
        for layer in capture.layers.values()
    ]


def same(left, right, windows):
    """The same rows, and the same keys and values wherever a row looks."""
    for (q, z, k, v, first, at), (q2, z2, k2, v2, first2, at2), window in zip(
        left, right, windows, strict=True
    ):
        assert at == at2
        torch.testing.assert_close(q, q2, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(z, z2, atol=5e-5, rtol=1e-5)
        low = 0 if window is None else max(0, at[0] - window + 1)
        assert max(first, first2) <= low
        torch.testing.assert_close(
            k[:, :, low - first :], k2[:, :, low - first2 :], atol=5e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            v[:, :, low - first :], v2[:, :, low - first2 :], atol=5e-5, rtol=1e-5
        )


@pytest.mark.parametrize("side", ["left", "none"])
def test_generation_is_bitwise_that_of_plain_sdpa(model, side):
    batch = padded(random_ids(*((20, 13, 17) if side == "left" else (20, 20))), "left")
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_scores": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
    }
    plain = model.generate(**batch, **options)
    with capturing(model, first_row=12):
        captured = model.generate(**batch, **options)
    assert captured.sequences.tolist() == plain.sequences.tolist()
    assert all(torch.equal(a, b) for a, b in zip(captured.scores, plain.scores, strict=True))


@torch.inference_mode()
def test_rows_hold_the_models_own_queries_and_outputs(model):
    """The captured output is the o_proj input, and queries times keys give the same output."""
    architecture = describe(model)
    ids = torch.tensor(random_ids(PROMPT + NEW, PROMPT + NEW))
    inputs = []
    number = list(architecture.layers)[1]
    hook = architecture.layers[number].output.register_forward_pre_hook(
        lambda module, args: inputs.append(args[0])
    )
    first = PROMPT - 8
    with capturing(model, architecture, first_row=first) as capture:
        decode(model, capture, prefix.empty(model, architecture), ids, [PROMPT] + [1] * NEW)
    hook.remove()
    layer = capture.layers[number]
    size = architecture.output_slices.size
    assert layer.columns == range(first, PROMPT + NEW)
    z = torch.cat(inputs, 1)[:, first:].unflatten(-1, (4, size)).transpose(1, 2)
    assert torch.equal(layer.outputs(), z)
    keys, values, start = layer.keys_values()
    groups = 4 // keys.shape[1]
    logits = layer.scaling * layer.queries() @ keys.repeat_interleave(groups, 1).mT
    if layer.softcap is not None:
        logits = layer.softcap * (logits / layer.softcap).tanh()
    low, high = (
        torch.tensor(x) for x in scores.visible_columns(layer.columns, 0, layer.kind, layer.window)
    )
    at = start + torch.arange(keys.shape[2])
    logits.masked_fill_((at < low[:, None]) | (at >= high[:, None]), float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks[None, :, None, None].expand(2, -1, logits.shape[2], -1)
        logits = torch.cat([logits, sinks], -1)
    again = logits.softmax(-1)[..., : keys.shape[2]] @ values.repeat_interleave(groups, 1)
    if layer.gates() is not None:
        again = again * layer.gates()
    torch.testing.assert_close(again, z, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [[9, 9, 9, 9, 4], [36, 4], [37, 1, 1, 1]])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_chunks_and_kinds_of_cache_keep_the_same(model, chunks, kind):
    architecture = describe(model)
    windows = [layer.window for layer in architecture.layers.values()]
    ids = torch.tensor(random_ids(PROMPT + NEW, PROMPT + NEW))
    caches = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=64),
    }
    found = []
    for cache, pieces in ((caches["dynamic"](), [PROMPT]), (caches[kind](), chunks)):
        with capturing(model, architecture, first_row=PROMPT - 8) as capture:
            decode(model, capture, cache, ids, pieces + [1] * NEW)
        found.append(kept(capture))
    same(*found, windows)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "llama"])
def test_what_is_kept_does_not_change_when_a_static_cache_is_reused(kind):
    model = tiny_model(kind)
    architecture = describe(model)
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    ids = torch.tensor(random_ids(PROMPT + NEW))
    with capturing(model, architecture, first_row=PROMPT - 8) as capture:
        decode(model, capture, cache, ids, [PROMPT] + [1] * NEW)
    before = [
        (layer.queries().clone(), layer.outputs().clone())
        for layer in capture.layers.values()
        if layer.window is not None or kind == "llama"
    ]
    sliding = [layer for layer in capture.layers.values() if layer.window is not None]
    keys = [layer.keys_values()[0].clone() for layer in sliding]
    cache.reset()
    decode(model, None, cache, torch.flip(ids, [1]), [PROMPT] + [1] * NEW)
    for layer, (q, z) in zip(
        (x for x in capture.layers.values() if x.window is not None or kind == "llama"),
        before,
        strict=True,
    ):
        assert torch.equal(layer.queries(), q)
        assert torch.equal(layer.outputs(), z)
    for layer, key in zip(sliding, keys, strict=True):
        assert torch.equal(layer.keys_values()[0], key)


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama"])
def test_static_cache_gives_the_same_scores(family, tokenizer):
    model = tiny_model(family)
    prompts = random_ids(PROMPT, PROMPT, seed=2)
    plain = Engine(model, tokenizer, max_new_tokens=6)
    static = Engine(
        model,
        tokenizer,
        max_new_tokens=6,
        make_cache=lambda: StaticCache(config=model.config, max_cache_len=64),
    )
    trials = [Trial(tuple(prompt), (28, 33), "w1") for prompt in prompts]
    generated = plain.run(trials, Batch((0, 1)))
    trials = [
        Trial(trial.ids, trial.needle, tokenizer.decode(result.ids[1:2]))
        for trial, result in zip(trials, generated, strict=True)
    ]
    results = [engine.run(trials, Batch((0, 1))) for engine in (plain, static)]
    for one, other in zip(*results, strict=True):
        assert one.passed
        assert one.ids == other.ids
        for method, expected in one.scores.items():
            torch.testing.assert_close(other.scores[method], expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_memory_beyond_the_cache_does_not_grow_with_the_context(model):
    """Rows are the same number at any length; a sliding layer keeps its window and the rows."""
    architecture = describe(model)
    sizes = []
    for length in (50, 200):
        ids = torch.tensor(random_ids(length + NEW))
        cache = prefix.empty(model, architecture)
        with capturing(model, architecture, first_row=length - 8) as capture:
            decode(model, capture, cache, ids, [length] + [1] * NEW)
        total = 0
        for number, layer in capture.layers.items():
            cached = cache.layers[number]
            owned = [layer.queries(), layer.outputs()]
            keys, values, _ = layer.keys_values()
            if layer._latent is not None:
                assert not layer._keys
            elif layer.window is None:  # the cache's own tensors, not copies
                assert keys.data_ptr() == cached.keys.data_ptr()
                assert values.data_ptr() == cached.values.data_ptr()
            else:
                assert keys.shape[2] <= layer.window + 8 + NEW
                owned += [keys, values]
            total += sum(tensor.untyped_storage().nbytes() for tensor in owned)
            # References into the prompt's activations would keep all of it alive.
            total += sum(
                part.untyped_storage().nbytes()
                for part in (*layer._queries, *layer._outputs, *layer._gates)
            )
        sizes.append(total)
    assert sizes[0] == sizes[1]


@torch.inference_mode()
def test_nothing_is_held_of_the_cache_while_it_grows():
    model = tiny_model("llama")
    ids = torch.tensor(random_ids(20))
    with capturing(model, first_row=12) as capture:
        decode(model, capture, prefix.empty(model, describe(model)), ids, [19, 1])
        capture.release()
        assert all(not layer._keys for layer in capture.layers.values())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_former_attention_is_back_after_an_exception(family):
    for attn in ("sdpa", "eager"):
        model = tiny_model(family, attn=attn)
        with suppress(KeyError), capturing(model, first_row=0):
            assert model.config._attn_implementation != attn
            raise KeyError
        assert model.config._attn_implementation == attn
        assert all(
            layer.self_attn.config._attn_implementation == attn for layer in model.model.layers
        )


def test_captures_do_not_nest_and_the_outer_one_survives():
    model = tiny_model("llama")
    ids = torch.tensor(random_ids(9))
    with capturing(model, first_row=0) as capture:
        with pytest.raises(ModelError, match="do not nest"), capturing(model, first_row=0):
            pass
        model(input_ids=ids)
    assert capture.layers[0].columns == range(9)
    with capturing(model, first_row=3) as capture:
        model(input_ids=ids)
    assert capture.layers[0].columns == range(3, 9)


def test_a_compiled_model_and_a_leaked_implementation_are_refused():
    model = tiny_model("llama")
    model.config._attn_implementation = "locos_capture_sdpa"
    with pytest.raises(ModelError, match="outside a capture"):
        model(input_ids=torch.tensor([[5, 6]]))
    model = tiny_model("llama")
    model.model.layers[1].compile()
    with pytest.raises(ModelError, match="compiled"), capturing(model, first_row=0):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_peft_models_are_captured_with_their_adapter():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model("qwen3"), config).eval()
    ids = torch.tensor(random_ids(9))
    with torch.inference_mode(), capturing(model, first_row=0) as capture:
        model(input_ids=ids)
        adapted = capture.layers[0].queries()
    with torch.inference_mode(), model.disable_adapter(), capturing(model, first_row=0) as capture:
        model(input_ids=ids)
    assert (capture.layers[0].queries() - adapted).abs().max() > 1e-3
