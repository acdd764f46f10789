"""Quantised projections: real quantisers where they are installed, and packed modules made here.

The reference is a model of ordinary layers with the very weights that the quantised ones apply.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_ways_to_run import BATCH, METHODS, REAL, SITES, assert_same_scores, passing, scored
from tiny import _COMMON, folded, random_ids
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    QuantoConfig,
    TorchAoConfig,
)

from lm_eval_locos.ablation import ablate
from lm_eval_locos.architecture import Head, describe
from lm_eval_locos.calibration import calibrate
from lm_eval_locos.detection import scores
from lm_eval_locos.errors import ModelError

VALUES = {
    head: torch.linspace(-1, 1 + head.head, 16)
    for head in (Head(0, 0), Head(0, 3), Head(1, 2), Head(2, 1))
}
SIZES = {"hidden_size": 64, "intermediate_size": 64}


def plain_model() -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **(_COMMON | SIZES))
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.2)
    return model.eval()


def projections(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every projection of the layers: its owner and its name there."""
    found = []
    for layer in model.model.layers:
        found += [(layer.self_attn, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        found += [(layer.mlp, name) for name in ("gate_proj", "up_proj", "down_proj")]
    return found


def twin(quantised: nn.Module) -> nn.Module:
    """An ordinary model that applies the same weights: what each projection makes of a one."""
    model = plain_model()
    pairs = zip(projections(quantised), projections(model), strict=True)
    with torch.no_grad():
        for (owner, name), (other, _) in pairs:
            getattr(other, name).weight.copy_(getattr(owner, name)(torch.eye(64)).T)
    return model


def logits(model: nn.Module, site: str) -> Tensor:
    with torch.no_grad(), ablate(model, VALUES, site=site):
        return model(**BATCH).logits[REAL].float()


def at_site(model: nn.Module, site: str, values: dict[Head, Tensor]) -> Tensor:
    """(heads, tokens, size) of layer 0, as the model goes on with it."""
    layer, seen = describe(model).layers[0], []
    module = layer.query if site == "query" else layer.output
    with torch.no_grad(), ablate(model, values, site=site):
        handle = module.register_forward_hook(
            lambda module, args, output: seen.append(output if site == "query" else args[0])
        )
        model(torch.tensor(random_ids(9)))
        handle.remove()
    return seen[0][0].unflatten(-1, (4, 16)).transpose(0, 1).clone()


# -- packed modules made here ----------------------------------------------------------------------


class Packed(nn.Module):
    """Two 4 bit weights a byte, in buffers: the size and the forward of an ordinary Linear."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        whole = (linear.weight.detach() / scales).round().add(8).to(torch.uint8)
        self.register_buffer("packed", whole[:, ::2] * 16 + whole[:, 1::2])
        self.register_buffer("scales", scales)

    def unpacked(self) -> Tensor:
        whole = torch.stack([self.packed // 16, self.packed % 16], -1).flatten(1)
        return (whole.to(self.scales) - 8) * self.scales

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.unpacked().T


class Opaque(Packed):
    """The same through a kernel without a gradient, as those of GPTQ and AWQ are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def packed_model(kind: type[Packed]) -> nn.Module:
    model = plain_model()
    for owner, name in projections(model):
        setattr(owner, name, kind(getattr(owner, name)))
    return model


@pytest.mark.parametrize("kind", [Packed, Opaque])
@pytest.mark.parametrize("site", SITES)
def test_packed_projections_are_ablated_as_their_weights(kind, site):
    model = packed_model(kind)
    reference = twin(model)
    with torch.no_grad():
        expected = folded(reference, VALUES, site)(**BATCH).logits[REAL]
    torch.testing.assert_close(logits(model, site), expected, rtol=1e-4, atol=1e-4)
    found, wanted = (
        calibrate(m, random_ids(9, 4), site=site, progress=False) for m in (model, reference)
    )
    torch.testing.assert_close(found.means, wanted.means, rtol=1e-4, atol=1e-5)


def test_packed_projections_are_scored_as_their_weights(tokenizer):
    model = packed_model(Packed)
    reference = twin(model)
    trials = passing(reference, tokenizer)
    assert_same_scores(scored(model, tokenizer, trials), scored(reference, tokenizer, trials), 1e-3)


def test_projections_without_a_gradient_are_refused_for_what_needs_one(tokenizer):
    model = packed_model(Opaque)
    reference = twin(model)
    trials = passing(reference, tokenizer)
    with pytest.raises(
        ModelError,
        match=r"Opaque: heads cannot be scored through this output projection .* without quant",
    ):
        scored(model, tokenizer, trials)
    rest = [method for method in METHODS if method not in ("locos", "dla")]
    found, expected = (scored(m, tokenizer, trials, methods=rest) for m in (model, reference))
    for got, wanted in zip(found, expected, strict=True):
        for method in rest:
            torch.testing.assert_close(
                got.scores[method], wanted.scores[method], rtol=1e-3, atol=1e-4
            )


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_projection_that_does_not_tell_its_size_is_refused(name):
    model = packed_model(Packed)
    projection = getattr(model.model.layers[1].self_attn, name)
    del projection.in_features, projection.out_features
    with pytest.raises(ModelError, match=r"packed projections \(GPTQ, AWQ\) have none"):
        describe(model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_packed_projection_computes_in_the_precision_of_its_scales(dtype):
    torch.manual_seed(0)
    projection = Packed(nn.Linear(64, 32))
    projection.scales = projection.scales.to(dtype)
    u = torch.randn(3, 32)
    expected = u.to(dtype).float() @ projection.unpacked().float()
    found = scores.direct_effect(projection, u)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


# -- real quantisers -------------------------------------------------------------------------------


def torchao_int8() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


# What makes the config, the module it needs, and how near the twin is (what it rounds besides).
QUANTISERS: dict[str, tuple[Callable[[], Any], str, float]] = {
    "bitsandbytes 8 bit": (  # takes activations to int8 too
        lambda: BitsAndBytesConfig(load_in_8bit=True),
        "bitsandbytes",
        0.2,
    ),
    "bitsandbytes 4 bit": (
        lambda: BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        ),
        "bitsandbytes",
        0.05,
    ),
    "torchao int8": (torchao_int8, "torchao", 1e-4),
    "quanto int8": (lambda: QuantoConfig(weights="int8"), "optimum.quanto", 1e-4),
    "quanto int4": (lambda: QuantoConfig(weights="int4"), "optimum.quanto", 1e-4),
}


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(scope="module", params=QUANTISERS)
def quantised(request, tmp_path_factory):
    """A quantised model, its twin, and how near they are."""
    make, module, tolerance = QUANTISERS[request.param]
    if not installed(module):
        pytest.skip(f"{module} is not installed")
    folder = tmp_path_factory.mktemp("model")
    plain_model().save_pretrained(folder)
    options = {"quantization_config": make(), "device_map": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    weight = model.model.layers[0].self_attn.o_proj.weight
    assert type(weight) is not nn.Parameter  # it is quantised
    return model, twin(model), tolerance


def near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return float((found - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("site", SITES)
def test_quantised_models_are_ablated(quantised, site):
    model, reference, tolerance = quantised
    with torch.no_grad():
        expected = folded(reference, VALUES, site)(**BATCH).logits[REAL]
    assert near(logits(model, site), expected, tolerance)
    before, after = (at_site(model, site, values) for values in ({}, VALUES))
    for head in range(4):
        value = VALUES.get(Head(0, head))
        kept = before[head] if value is None else value.expand_as(before[head])
        assert torch.equal(after[head], kept), head


def test_quantised_models_are_scored(quantised, tokenizer):
    model, reference, tolerance = quantised
    trials = passing(reference, tokenizer, max_new_tokens=1)
    expected = scored(reference, tokenizer, trials, max_new_tokens=1)
    state = getattr(model.model.layers[0].self_attn.o_proj.weight, "quant_state", None)
    if getattr(state, "packing_format_for_cpu", False):
        # bitsandbytes packs 4 bit weights anew for such a CPU, and its kernel has no gradient.
        with pytest.raises(ModelError, match="Linear4bit: heads cannot be scored"):
            scored(model, tokenizer, trials, max_new_tokens=1)
        return
    layers = [m.model.layers[0].self_attn.o_proj for m in (model, reference)]
    u = torch.randn(3, 64)
    effect, exact = (scores.direct_effect(layer, u) for layer in layers)
    torch.testing.assert_close(effect, exact, rtol=1e-3, atol=1e-3)
    found = scored(model, tokenizer, trials, max_new_tokens=1)
    # Rounding may tip the choice of a token; then another token is scored.
    same = [pair for pair in zip(found, expected, strict=True) if pair[0].ids == pair[1].ids]
    assert len(same) >= (3 if tolerance < 1e-3 else 1)
    for got, wanted in same:
        for method in ("locos", "dla", "attention_spatial", "headkv"):
            assert near(got.scores[method], wanted.scores[method], tolerance), method
