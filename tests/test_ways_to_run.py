"""Ways to run a model: adapters, precisions, offloading, attention kernels, caches, processes.

Each against the same model run plainly: same ablated logits, same scores.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import test_detect
import torch
from accelerate import cpu_offload, disk_offload
from lm_eval.api.instance import Instance
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from tiny import EARLY, folded, padded, random_ids, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache, StaticCache
from transformers.utils import is_optimum_quanto_available

from lm_eval_locos.ablation import ablate
from lm_eval_locos.architecture import Head, describe
from lm_eval_locos.calibration import calibrate
from lm_eval_locos.detection import prefix, scores
from lm_eval_locos.detection.batches import Batch, Trial
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.errors import ModelError
from lm_eval_locos.model import LocosAblatedLM

home = test_detect.home
METHODS = scores.METHODS + scores.VARIANTS
SITES = ("query", "output")
HEADS = [Head(0, 0), Head(0, 3), Head(1, 2), Head(2, 1)]
VALUES = {head: torch.linspace(-1, 1 + head.head, 8) for head in HEADS}
BATCH = padded(random_ids(20, 7, 13), "left")
REAL = BATCH["attention_mask"].bool()
NEEDLES = {40: (31, 36), 37: (4, 9), 36: (20, 28)}


def logits(model, site=None):
    """Of the real tokens of BATCH, with VALUES at ``site``."""
    with torch.inference_mode(), ablate(model, VALUES if site else {}, site=site or "query"):
        return model(**BATCH).logits[REAL].float()


def scored(model, tokenizer, trials, **options):
    engine = Engine(model, tokenizer, **({"methods": METHODS, "max_new_tokens": 8} | options))
    return engine.run(trials, Batch(tuple(range(len(trials)))))


def passing(model, tokenizer, **options):
    """Trials whose gold answer is the first tokens, two at most, that the model generates."""
    trials = [Trial(tuple(ids), NEEDLES[len(ids)], "w1") for ids in random_ids(*NEEDLES, seed=3)]
    generated = scored(model, tokenizer, trials, methods=[], **options)
    golds = [[i for i in result.ids if i > 4][:2] for result in generated]
    assert all(golds)
    return [
        replace(trial, gold=tokenizer.decode(gold))
        for trial, gold in zip(trials, golds, strict=True)
    ]


def assert_same_scores(found, expected, tolerance=1e-4):
    for got, wanted in zip(found, expected, strict=True):
        assert wanted.passed
        assert (got.ids, got.steps) == (wanted.ids, wanted.steps)
        assert set(got.scores) == set(wanted.scores) == set(METHODS)
        for method, score in wanted.scores.items():
            limit = tolerance * max(float(score.abs().max()), 1e-6)
            assert (got.scores[method] - score).abs().max() <= limit, method


# -- adapters --------------------------------------------------------------------------------------

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "lora": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, lora_dropout=0.3),
    "dora": LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False, use_dora=True),
    "ia3": IA3Config(target_modules=TARGETS, feedforward_modules=[], init_ia3_weights=False),
    "ia3 of the input": IA3Config(
        target_modules=["k_proj", "o_proj"],
        feedforward_modules=["o_proj"],
        init_ia3_weights=False,
    ),
}


@pytest.fixture(scope="module", params=ADAPTERS)
def adapted(request):
    """A model with an adapter, and the model that the adapter's weights are merged into."""
    torch.manual_seed(4)
    model = get_peft_model(tiny_model("llama"), copy.deepcopy(ADAPTERS[request.param])).eval()
    return model, copy.deepcopy(model).merge_and_unload()


@pytest.mark.parametrize("site", SITES)
def test_adapted_model_is_ablated_as_the_merged_one(adapted, site):
    model, merged = adapted
    expected = logits(folded(merged, VALUES, site))
    torch.testing.assert_close(logits(model, site), expected, rtol=1e-4, atol=1e-4)
    assert (logits(model) - logits(tiny_model("llama"))).abs().max() > 0.01  # it adapts
    model.merge_adapter()  # the adapter's modules stay, their weights are merged
    try:
        torch.testing.assert_close(logits(model, site), expected, rtol=1e-4, atol=1e-4)
    finally:
        model.unmerge_adapter()


def test_adapted_model_is_scored_as_the_merged_one(adapted, tokenizer):
    model, merged = adapted
    trials = passing(merged, tokenizer)
    expected = scored(merged, tokenizer, trials)
    assert_same_scores(scored(model, tokenizer, trials), expected, 1e-3)
    plain = scored(tiny_model("llama"), tokenizer, trials, methods=["headkv"])
    assert (plain[0].scores["headkv"] - expected[0].scores["headkv"]).abs().max() > 1e-3


LIKELY = [Instance("loglikelihood", {}, ("w5 w6 w9", " w7 w8"), 0, metadata=("t", 0, 1))]


def harness(folder, **options):
    return LocosAblatedLM(
        pretrained=options.pop("pretrained", str(folder / "model")),
        heads=str(folder / "heads.json"),
        calibration=str(folder / "prompts.txt"),
        num_calibration=10,
        num_heads=3,
        device="cpu",
        **options,
    )


@pytest.mark.parametrize("site", SITES)
def test_adapter_in_the_harness_equals_the_merged_model(folder, site):
    torch.manual_seed(4)
    model = get_peft_model(tiny_model("llama"), copy.deepcopy(ADAPTERS["dora"]))
    model.save_pretrained(folder / "adapter")
    adapted = harness(folder, peft=str(folder / "adapter"), site=site)
    assert isinstance(adapted.model, PeftModel)
    merged = copy.deepcopy(adapted.model).merge_and_unload()
    merged.save_pretrained(folder / "merged")
    adapted.tokenizer.save_pretrained(folder / "merged")
    expected = harness(folder, pretrained=str(folder / "merged"), site=site)
    got = adapted.loglikelihood(LIKELY, True)[0][0]
    assert got == pytest.approx(expected.loglikelihood(LIKELY, True)[0][0], abs=1e-4)
    assert got != pytest.approx(harness(folder, site=site).loglikelihood(LIKELY, True)[0][0])
    torch.testing.assert_close(
        adapted.calibrations.get(None, False)[0].means,
        expected.calibrations.get(None, False)[0].means,
    )


# -- precision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_scores_in_low_precision_are_near_those_in_float32(dtype, family, tokenizer):
    options = {"max_new_tokens": 1}
    trials = passing(tiny_model(family), tokenizer, **options)
    exact = scored(tiny_model(family), tokenizer, trials, **options)
    near = scored(tiny_model(family).to(dtype), tokenizer, trials, **options)
    for method in ("locos", "dla", "attention_spatial", "headkv"):
        a, b = (
            np.concatenate([r.scores[method].float().numpy().ravel() for r in results])
            for results in (exact, near)
        )
        assert np.isfinite(b).all()
        assert np.corrcoef(a, b)[0, 1] > 0.98, method
        assert np.abs(a - b).max() > 0  # it is another precision


# -- weights elsewhere -----------------------------------------------------------------------------


def mapped(folder):
    tiny_model("llama").save_pretrained(folder / "model")
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head"), "cpu")
    layers = {f"model.layers.{i}": "disk" for i in range(3)}
    return AutoModelForCausalLM.from_pretrained(
        folder / "model",
        device_map={**places, "model.rotary_emb": "cpu", **layers},
        offload_folder=folder / "offload",
    )


OFFLOADED = {
    "to the cpu": lambda folder: cpu_offload(tiny_model("llama"), execution_device="cpu"),
    "to the disk": lambda folder: disk_offload(tiny_model("llama"), folder, execution_device="cpu"),
    "layers to the disk": mapped,
}


@pytest.mark.parametrize("how", OFFLOADED)
def test_offloaded_weights_are_ablated_all_the_same(how, tmp_path):
    model, plain = OFFLOADED[how](tmp_path).eval(), tiny_model("llama")
    assert any(parameter.is_meta for parameter in model.parameters())
    for site in SITES:
        assert torch.equal(logits(model, site), logits(plain, site))
        found, expected = (
            calibrate(m, random_ids(9, 4), site=site, progress=False) for m in (model, plain)
        )
        assert torch.equal(found.means, expected.means)


def test_offloaded_layers_are_scored_all_the_same(tmp_path, tokenizer):
    model, plain = mapped(tmp_path), tiny_model("llama")
    trials = passing(plain, tokenizer)
    assert_same_scores(scored(model, tokenizer, trials), scored(plain, tokenizer, trials))
    assert model.model.layers[1].self_attn.o_proj.weight.is_meta  # it is not kept


def test_a_shared_prefix_of_an_offloaded_model():
    ids = random_ids(20)[0]
    with torch.no_grad():
        models = OFFLOADED["to the cpu"](None), tiny_model("llama")
        caches = [prefix.prefill(model, describe(model), ids) for model in models]
    for got, wanted in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(got.keys, wanted.keys)
        assert torch.equal(got.values, wanted.values)


def test_an_offloaded_unembedding_is_refused_for_what_needs_it(tokenizer):
    model, plain = OFFLOADED["to the cpu"](None), tiny_model("llama")
    with pytest.raises(ModelError, match=r"the unembedding is .* neither quantised nor offloaded"):
        Engine(model, tokenizer)
    trials = passing(plain, tokenizer)
    rest = {"methods": ["attention_spatial", "wu", "contrastive", "headkv"]}
    found, expected = (scored(m, tokenizer, trials, **rest) for m in (model, plain))
    for got, wanted in zip(found, expected, strict=True):
        assert got.ids == wanted.ids
        for method in rest["methods"]:
            assert torch.equal(got.scores[method], wanted.scores[method]), method


@pytest.mark.skipif(EARLY, reason="early releases of transformers read masks on meta")
@pytest.mark.parametrize("site", SITES)
def test_parallelize_in_the_harness(folder, site, monkeypatch):
    monkeypatch.chdir(folder)  # where the harness makes its folder for offloaded weights
    spread, plain = (harness(folder, site=site, parallelize=p) for p in (True, False))
    assert spread.loglikelihood(LIKELY, True) == plain.loglikelihood(LIKELY, True)


# -- attention kernels -----------------------------------------------------------------------------

KERNELS = ("sdpa", "eager", "flex_attention")


@pytest.fixture(params=KERNELS)
def kernel(request):
    """``attn_implementation``; FlashAttention needs a GPU."""
    # flex_attention compiles its kernel, which takes a minute: run as it is written.
    with torch.compiler.set_stance("force_eager"):
        yield request.param


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_any_kernel_gives_the_same(kernel, family, tokenizer):
    model, reference = tiny_model(family, attn=kernel), tiny_model(family)
    size = 16 if family == "gemma3_text" else 8
    values = {head: torch.linspace(-1, 1 + head.head, size) for head in HEADS}
    for site in SITES:
        with torch.inference_mode(), ablate(model, values, site=site):
            got = model(**BATCH).logits[REAL]
        with torch.inference_mode(), ablate(reference, values, site=site):
            expected = reference(**BATCH).logits[REAL]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    trials = passing(reference, tokenizer)
    assert_same_scores(scored(model, tokenizer, trials), scored(reference, tokenizer, trials), 1e-9)
    assert model.config._attn_implementation == kernel


# -- caches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("site", SITES)
def test_generation_with_any_cache_is_ablated(family, cache, site):
    model = tiny_model(family)
    size = 16 if family == "gemma3_text" else 8
    values = {head: torch.linspace(-1, 1 + head.head, size) for head in HEADS}
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    expected = folded(model, values, site, family).generate(**BATCH, **options)
    with ablate(model, values, site=site):
        got = model.generate(**BATCH, cache_implementation=cache, disable_compile=True, **options)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
def test_any_cache_gives_the_same_scores(family, cache, tokenizer):
    model = tiny_model(family)
    trials = passing(model, tokenizer)
    options = {} if cache is DynamicCache else {"max_cache_len": 64}
    found = scored(
        model, tokenizer, trials, make_cache=lambda: cache(config=model.config, **options)
    )
    assert_same_scores(found, scored(model, tokenizer, trials))


def quantised(model, backend):
    """A quantised cache of ``backend``, or a skip with the reason."""
    if backend == "quanto" and not is_optimum_quanto_available():
        pytest.skip("optimum-quanto is not installed")
    options = {} if backend == "fp8" else {"nbits": 4, "q_group_size": 8, "residual_length": 4}
    try:
        return QuantizedCache(backend=backend, config=model.config, **options)
    except (ValueError, ImportError, RuntimeError) as error:
        pytest.skip(f"QuantizedCache of {backend}: {error}")


@pytest.mark.parametrize("backend", ["quanto", "fp8"])
@pytest.mark.parametrize("site", SITES)
def test_generation_with_a_quantised_cache_is_ablated(backend, site):
    model = tiny_model("llama")
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    changed = folded(model, VALUES, site)
    expected = changed.generate(**BATCH, past_key_values=quantised(model, backend), **options)
    with torch.no_grad(), ablate(model, VALUES, site=site):
        got = model.generate(**BATCH, past_key_values=quantised(model, backend), **options)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("backend", ["quanto", "fp8"])
def test_scores_of_a_quantised_cache_are_near(backend, tokenizer):
    model = tiny_model("llama")
    trials = passing(model, tokenizer, max_new_tokens=1)
    found, exact = (
        scored(model, tokenizer, trials, max_new_tokens=2, **more)
        for more in ({"make_cache": lambda: quantised(model, backend)}, {})
    )
    for method in ("locos", "dla", "attention_spatial", "headkv"):
        near, reference = (
            torch.cat([result.scores[method].float().ravel() for result in results])
            for results in (found, exact)
        )
        assert torch.corrcoef(torch.stack([near, reference]))[0, 1] > 0.95, method
        # The first token comes from the exact keys; scores see the quantised ones.
        assert torch.equal(near, reference) == (method == "dla"), method


# -- processes -------------------------------------------------------------------------------------

ENVIRONMENT = {
    **os.environ,
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "LOCOS_DATA": "bundled",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# accelerate launch --cpu starts one process, whatever --num_processes says.
TWO_PROCESSES = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NOTING = """
import os, sys
from pathlib import Path
from lm_eval_locos.cli import main
from lm_eval_locos.detection.generate import Engine

run, folder = Engine.run, Path(sys.argv[1])

def noted(self, trials, batch):
    (folder / f"{os.environ.get('RANK', 0)}-{'-'.join(map(str, batch.members))}").touch()
    return run(self, trials, batch)

Engine.run = noted
main(sys.argv[2:])
"""


def test_detection_by_two_processes_equals_one_bit_for_bit(home, tmp_path):
    (tmp_path / "noting.py").write_text(NOTING)
    names = ("one", "two")
    for name, launch in zip(names, ((), TWO_PROCESSES), strict=True):
        (tmp_path / f"ran-{name}").mkdir()
        asked = ("detect", "--model", str(home / "model"), "--data", str(home / "probes.jsonl"))
        options = ("--batch-size", "2", "--methods", *METHODS, "cri")
        where = ("--output", str(tmp_path / name))
        script = (str(tmp_path / "noting.py"), str(tmp_path / f"ran-{name}"))
        done = subprocess.run(
            [sys.executable, *launch, *script, *asked, *options, *where],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("7 of 10 trials passed") == 1
    one, two = (sorted(path.name for path in (tmp_path / f"ran-{n}").iterdir()) for n in names)
    shares = [[name[2:] for name in two if name[0] == rank] for rank in "01"]
    assert all(shares)  # both processes worked
    assert sorted(shares[0] + shares[1]) == sorted(name[2:] for name in one)  # nothing twice
    found, expected = (test_detect.contents(tmp_path / name) for name in ("two", "one"))
    assert {f"{method}.json" for method in (*METHODS, "cri")} < set(expected)
    assert found == expected


def test_several_processes_on_a_cpu_are_refused(folder):
    arguments = {
        "pretrained": str(folder / "model"),
        "heads": str(folder / "heads.json"),
        "calibration": str(folder / "prompts.txt"),
        "num_heads": 2,
    }
    asked = ("-m", "lm_eval", "run", "--model", "locos-ablated", "--tasks", "locos_arithmetic")
    done = subprocess.run(
        [sys.executable, *TWO_PROCESSES, *asked, "--model_args", json.dumps(arguments)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert "lm_eval: 2 processes were started, and without as many GPUs" in done.stderr
