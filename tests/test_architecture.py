"""What `describe` finds in every family, what it refuses, and how a new family is described."""

from __future__ import annotations

import family_table
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, HEADS, NEWER, SCORED, attention_of, random_ids, tiny_model
from torch import nn

from lm_eval_locos.architecture import (
    Family,
    HeadSlices,
    _ranks,
    describe,
    families,
    known_model_types,
    register_family,
)
from lm_eval_locos.detection.batches import Batch, Trial
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.errors import ModelError


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(families, "_KNOWN", dict(families._KNOWN))


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_and_slices_are_where_the_matrix_says(family):
    model, case = tiny_model(family), FAMILIES[family]
    found = describe(model)
    assert (found.num_layers, found.num_heads, found.head_dim) == (3, HEADS, case.size)
    assert tuple(found.layers) == case.layers
    for index, layer in found.layers.items():
        attention = attention_of(model, family, index)
        assert layer.attention is attention
        assert layer.query is getattr(attention, case.query)
        assert layer.output is getattr(attention, case.output)
    for head, part in found.query_slices.here.items():
        assert list(range(part.start, part.stop)) == list(case.rows(head, case.size))
    size = found.output_slices.size
    assert found.output_slices.starts == tuple(size * head for head in range(HEADS))
    assert len(found.heads) == len(set(found.heads)) == len(case.layers) * HEADS
    assert [i for i, kind in enumerate(found.kinds) if kind != "none"] == list(case.layers)
    assert found.hybrid == (len(case.layers) < 3)
    assert (found.gate_slices is not None) == case.gated


@pytest.mark.parametrize("family", SCORED)
def test_scaling_soft_cap_and_sinks_are_those_of_the_kernel(family):
    from lm_eval_locos.detection import prefix
    from lm_eval_locos.detection.capture import capturing

    model = tiny_model(family)
    found = describe(model)
    with torch.inference_mode(), capturing(model, found, first_row=0) as capture:
        prefix.forward(model, prefix.empty(model, found), input_ids=torch.tensor(random_ids(9)))
    assert set(capture.layers) == set(found.layers)
    for index, layer in found.layers.items():
        kept = capture.layers[index]
        assert layer.scaling == pytest.approx(kept.scaling)
        assert layer.softcap == kept.softcap
        assert layer.sinks == (kept.sinks is not None)


def test_every_known_model_type_is_in_the_matrix():
    tested = {case.type or name for name, case in FAMILIES.items()}
    assert (tested | NEWER) - {"gemma3"} == set(known_model_types())


@given(st.data())
def test_split_is_what_the_slices_say(data):
    size = data.draw(st.integers(1, 4))
    heads = data.draw(st.integers(1, 4))
    places = data.draw(st.permutations(range(heads + 2)))[:heads]
    away = data.draw(st.sets(st.integers(0, heads - 1)))
    starts = tuple(None if h in away else place * size for h, place in enumerate(places))
    slices = HeadSlices(starts, size, size * (heads + 2))
    x = torch.randn(2, 3, slices.width)
    split = slices.split(x)
    assert split.shape == (2, 3, heads, size)
    for head, start in enumerate(starts):
        expected = torch.zeros(2, 3, size) if start is None else x[..., start : start + size]
        assert torch.equal(split[..., head, :], expected)
    assert set(slices.here) == set(range(heads)) - away


class Mine(nn.Module):
    """An attention under names of its own."""

    def __init__(self, former: nn.Module) -> None:
        super().__init__()
        self.wq, self.wo = former.q_proj, former.o_proj


def test_a_new_family_can_be_described():
    model = tiny_model("llama")
    model.config.model_type = "mine"
    with pytest.raises(ModelError, match=r"'mine' are not known. Known: llama, .*register_family"):
        describe(model)
    for block in model.model.layers:
        block.attn = Mine(block.self_attn)
    register_family(Family(("mine",), attention="attn", query="wq", output="wo"))
    found = describe(model)
    assert found.layers[1].query is model.model.layers[1].self_attn.q_proj
    assert "mine" in known_model_types()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "blocks"}, r"a LlamaModel, has no blocks\. Is the model of another family"),
        ({"norm": "ln_f"}, r"has no ln_f"),
        ({"attention": "attn"}, r"layer 0 of this llama model .* without attn\.q_proj and attn\.o"),
        ({"query": ("wq", "qq")}, r"without self_attn\.wq or \.qq and self_attn\.o_proj"),
        ({"layout": "grouped"}, r"give 32 features, which 4 heads of 8 cannot have \(grouped\)"),
        ({"query": "rotary"}, r"without self_attn\.rotary"),
    ],
)
def test_a_wrong_description_is_refused(change, message):
    register_family(Family(("llama",), **change))
    with pytest.raises(ModelError, match=message):
        describe(tiny_model("llama"))


def test_packed_projections_have_no_features():
    model = tiny_model("llama")
    packed = nn.Module()
    packed.register_buffer("qweight", torch.zeros(4, 4, dtype=torch.int32))
    model.model.layers[1].self_attn.q_proj = packed
    with pytest.raises(ModelError, match=r"have \[32, None\] features.*packed projections"):
        describe(model)


def test_split_layers_are_refused_where_nobody_handles_them():
    with pytest.raises(ModelError, match=r"split over 2 processes.*ablated so, but not scored"):
        _ranks.check_split(2, handled=False, adapted=False)
    with pytest.raises(ModelError, match=r"adapter.*split over 2 processes.*merge_and_unload"):
        _ranks.check_split(2, handled=True, adapted=True)
    _ranks.check_split(2, handled=True, adapted=False)


def test_layers_without_attention_are_refused():
    model = tiny_model("qwen3")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match=r"layer 1 of this qwen3 model is of type 'linear_att"):
        describe(model)


def test_alibi_is_not_scored(tokenizer):
    model, ids = tiny_model("falcon-alibi"), random_ids(20)[0]
    engine = Engine(model, tokenizer, max_new_tokens=4)
    with pytest.raises(ModelError, match=r"FalconAttention adds a bias .*ALiBi.* not scored"):
        engine.run([Trial(tuple(ids), (3, 6), "w1")], Batch((0,)))
    # Nothing of the capture is left.
    assert model(torch.tensor([ids])).logits.isfinite().all()


def test_an_attention_that_hides_its_kernel_is_refused(tokenizer, monkeypatch):
    from transformers.models.llama import modeling_llama

    def own(module, query, key, value, mask, scaling, **kwargs):
        groups = query.shape[1] // key.shape[1]
        weights = query @ key.repeat_interleave(groups, 1).mT * scaling
        return (weights.softmax(-1) @ value.repeat_interleave(groups, 1)).transpose(1, 2), None

    class Hidden:
        def get_interface(self, *_):
            return own

        __getitem__ = get_interface  # how early releases ask

    model = tiny_model("llama")
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Hidden())
    engine = Engine(model, tokenizer, max_new_tokens=2)
    with pytest.raises(ModelError, match=r"ran without a call of its kernel.*attn_implementation"):
        engine.run([Trial(tuple(random_ids(20)[0]), (3, 6), "w1")], Batch((0,)))


@pytest.mark.skipif(bool(NEWER), reason=f"this release of transformers has no {sorted(NEWER)}")
def test_the_readmes_table_is_made_from_the_matrix():
    text = family_table.README.read_text(encoding="utf-8")
    _, found, rest = text.partition(family_table.START)
    assert found
    assert rest.partition(family_table.END)[0] == family_table.table(), (
        "run python tests/family_table.py"
    )
