"""Ablation against the same change made in the weights, without hooks."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, folded, padded, random_ids, tiny_model

from lm_eval_locos.ablation import ablate
from lm_eval_locos.architecture import Head, describe
from lm_eval_locos.errors import ModelError

HEADS = [Head(0, 0), Head(0, 3), Head(1, 2), Head(2, 1)]


def make_values(model, heads=None, seed=5, site="query"):
    architecture = describe(model)
    if heads is None:
        layers = list(architecture.layers)
        heads = [Head(layers[min(layer, len(layers) - 1)], head) for layer, head in HEADS]
    size = architecture.slices(site).size
    generator = torch.Generator().manual_seed(seed)
    return {head: torch.randn(size, generator=generator) for head in heads}


def hook_count(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    return tiny_model(family)


@pytest.mark.parametrize("site", ["query", "output"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_equals_ablation_in_the_weights(model, family, site, side):
    values = make_values(model, site=site)
    batch = padded(random_ids(20, 7, 13), side)
    with torch.inference_mode():
        plain = model(**batch).logits
        expected = folded(model, values, site, family)(**batch).logits
        with ablate(model, values, site=site) as ablation:
            got = model(**batch).logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=1e-5)
    assert (got[real] - plain[real]).abs().max() > 0.01  # the ablation does something
    assert ablation.fired == len(FAMILIES[family].layers)


@pytest.mark.parametrize("site", ["query", "output"])
def test_generation_with_cache_equals_ablation_in_the_weights(model, family, site):
    values = make_values(model, site=site)
    batch = padded(random_ids(20, 7, 13), "left")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = folded(model, values, site, family).generate(**batch, **options)
    with ablate(model, values, site=site):
        got = model.generate(**batch, **options)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("site", ["query", "output"])
def test_batch_with_padding_equals_one_at_a_time(model, site):
    values = make_values(model, site=site)
    rows = random_ids(20, 7, 13, 2)
    batch = padded(rows, "left")
    # GPT-2 does not find its positions in the mask.
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode(), ablate(model, values, site=site):
        together = model(**batch, position_ids=positions).logits[:, -1]
        alone = [model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("site", ["query", "output"])
def test_low_precision_changes_only_the_heads_slices(dtype, site):
    model = tiny_model("llama").to(dtype)
    values = make_values(model)
    layer = describe(model).layers[0]
    seen = []
    module = layer.query if site == "query" else layer.output
    grab = (
        (lambda m, a, out: seen.append(out.clone()))
        if site == "query"
        else (lambda m, a, out: seen.append(a[0].clone()))
    )
    batch = padded(random_ids(9), "left")
    with torch.inference_mode():
        handle = module.register_forward_hook(grab)
        model(**batch)
        handle.remove()
        with ablate(model, values, site=site):
            handle = module.register_forward_hook(grab)
            model(**batch)
            handle.remove()
    plain, ablated = (x.view(1, 9, 4, -1) for x in seen)
    for head in range(4):
        value = values.get(Head(0, head))
        expected = plain[:, :, head] if value is None else value.to(dtype).expand(1, 9, -1)
        assert torch.equal(ablated[:, :, head], expected), head


def test_no_heads_is_bit_equal_and_adds_no_hook(model):
    batch = padded(random_ids(15, 6), "left")
    with torch.inference_mode():
        plain = model(**batch).logits
        with ablate(model, {}):
            assert hook_count(model) == 0
            assert torch.equal(model(**batch).logits, plain)


def test_hooks_are_gone_after_the_block_and_after_an_exception():
    model = tiny_model("llama")
    batch = padded(random_ids(15), "left")
    with torch.inference_mode():
        plain = model(**batch).logits
        counts = []

        def fail():
            counts.append(hook_count(model))
            raise KeyError

        with pytest.raises(KeyError), ablate(model, make_values(model)):
            fail()
        assert counts == [3]
        assert hook_count(model) == 0
        assert torch.equal(model(**batch).logits, plain)


def test_wrong_last_head_leaves_no_hook_behind():
    model = tiny_model("llama")
    values = make_values(model) | {Head(2, 2): torch.zeros(3)}
    with pytest.raises(ModelError, match=r"head 2-2 has shape \(3,\); expected \(8,\)"):  # noqa: SIM117
        with ablate(model, values):
            pass
    assert hook_count(model) == 0


@pytest.mark.parametrize("head", [Head(3, 0), Head(0, 4), Head(-1, 0)])
def test_head_outside_the_model_is_named(head):
    model = tiny_model("llama")
    with (
        pytest.raises(ModelError, match=rf"head {head} is outside .* layers 0-2 and heads 0-3"),
        ablate(model, {head: torch.zeros(8)}),
    ):
        pass


def test_lora_adapter_is_ablated_after_it_is_applied():
    from peft import LoraConfig, get_peft_model

    base = tiny_model("llama")
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(base, config).eval()
    values = make_values(model)
    merged = get_peft_model(tiny_model("llama"), config)
    merged.load_state_dict(model.state_dict())
    batch = padded(random_ids(12, 5), "left")
    for site in ("query", "output"):
        expected = folded(merged.merge_and_unload(), values, site)
        merged = get_peft_model(tiny_model("llama"), config)
        merged.load_state_dict(model.state_dict())
        with torch.inference_mode(), ablate(model, values, site=site):
            got = model(**batch).logits
        with torch.inference_mode():
            wanted = expected.eval()(**batch).logits
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(got[real], wanted[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["module", "in place", "submodule"])
def test_compiled_models_are_refused(how):
    model = tiny_model("llama")
    values = make_values(model)
    if how == "module":
        model.model = torch.compile(model.model)
    elif how == "in place":
        model.compile()
    else:
        model.get_decoder().layers[1].compile()
    with pytest.raises(ModelError, match="compiled"), ablate(model, values):
        pass


def test_unknown_family_names_the_known_ones():
    from transformers import OPTConfig, OPTForCausalLM

    small = {"hidden_size": 8, "ffn_dim": 8, "word_embed_proj_dim": 8, "vocab_size": 11}
    model = OPTForCausalLM(OPTConfig(num_hidden_layers=1, num_attention_heads=2, **small))
    with (
        pytest.raises(
            ModelError,
            match=r"'opt' are not known. Known: llama, mist.*register_family.*locos doctor",
        ),
        ablate(model, {Head(0, 0): torch.zeros(4)}),
    ):
        pass


def test_unknown_site_is_named():
    model = tiny_model("llama")
    with (
        pytest.raises(ModelError, match=r"site='key' is not known. Use one of query, output"),
        ablate(model, make_values(model), site="key"),
    ):
        pass


@pytest.mark.real_model
@pytest.mark.parametrize("site", ["query", "output"])
def test_smollm2_equals_ablation_in_the_weights(smollm2, site):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": smollm2["gguf_file"]}
    model = AutoModelForCausalLM.from_pretrained(smollm2["pretrained"], **source).eval().double()
    tokenizer = AutoTokenizer.from_pretrained(smollm2["pretrained"], **source)
    heads = [Head(23, 2), Head(23, 1), Head(28, 0), Head(0, 0), Head(29, 8)]
    values = {head: value.double() for head, value in make_values(model, heads).items()}
    ids = tokenizer("The Louvre is a museum in the city of").input_ids
    batch = padded([ids, ids[:4]], "left")
    with torch.inference_mode():
        expected = folded(model, values, site)(**batch).logits
        with ablate(model, values, site=site):
            got = model(**batch).logits
            alone = model(input_ids=torch.tensor([ids[:4]])).logits[0]
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-9, atol=1e-9)
    # Padding shifts the positions, and RoPE's angles are float32 whatever the model's dtype.
    torch.testing.assert_close(got[1, -4:], alone, rtol=1e-4, atol=1e-3)
