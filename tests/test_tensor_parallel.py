"""Tensor parallelism: two ranks (gloo) against one process, in the weights and in the means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from split_over_ranks import BATCH, PROMPTS, SITES, evaluated, heads_of
from tiny import EARLY, NEWER, folded, tiny_model
from torch import nn

from lm_eval_locos.architecture import HeadSlices, describe
from lm_eval_locos.architecture._ranks import on_rank
from lm_eval_locos.calibration import calibrate, constants
from lm_eval_locos.errors import ModelError

# Which heads the second rank has at each site. OLMo 2 and Phi-3 gather their queries.
SECOND = {
    "llama": ([2, 3], [2, 3]),
    "qwen3": ([2, 3], [2, 3]),
    "gpt_neox": ([2, 3], [2, 3]),
    "olmo2": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "phi3": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "qwen3_5_text": ([2, 3], [2, 3]),
}
SECOND = {family: heads for family, heads in SECOND.items() if family not in NEWER}


def model_of(family: str) -> nn.Module:
    model = tiny_model(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(0, 0.3)  # a bias must be added once, not once a rank
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory, tokenizer):
    """The folder of the models and, per rank, its tensors and facts."""
    folder = tmp_path_factory.mktemp("ranks")
    heads = {f"{i}-{j}": [float((7 * (4 * i + j)) % 12)] for i in range(3) for j in range(4)}
    (folder / "heads.json").write_text(json.dumps(heads))
    lines = [" ".join(f"w{(7 * i + j) % 92}" for j in range(5 + i)) for i in range(10)]
    (folder / "prompts.txt").write_text("\n".join(lines))
    tokenizer.save_pretrained(folder / "model-llama")
    for family in (*SECOND, "llama-one-kv-head"):
        model_of(family).save_pretrained(folder / f"model-{family}")
    script = Path(__file__).with_name("split_over_ranks.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, str(script), str(folder)],
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "LOCOS_CACHE_DIR": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, [
        (load_file(folder / f"{rank}"), json.loads((folder / f"{rank}.json").read_text()))
        for rank in range(2)
    ]


@pytest.fixture
def ranks(run):
    return run[1]


@pytest.mark.parametrize("family", SECOND)
@pytest.mark.parametrize("site", SITES)
def test_two_ranks_equal_one_process(ranks, family, site):
    of = ranks[0][1][family]
    if EARLY and (reason := of.get("broken") or of.get("refused")):
        pytest.skip(f"early release of transformers: {reason}")
    model = model_of(family)
    calibration = calibrate(model, PROMPTS, site=site, batch_size=2, progress=False)
    real = BATCH["attention_mask"].bool()
    with torch.inference_mode():
        plain = model(**BATCH).logits[real]
    for tensors, facts in ranks:
        assert facts[family]["ranks"] == 2
        for kind, expected in (("means", calibration.means), ("samples", calibration.samples)):
            got = tensors[f"{family}/{site}/{kind}"]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        for mode in ("mean", "resample"):
            values = constants(calibration, heads_of(describe(model)), mode=mode, seed=1)
            with torch.inference_mode():
                expected = folded(model, values, site, family)(**BATCH).logits[real]
            got = tensors[f"{family}/{site}/{mode}"][real]
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            assert (got - plain).abs().max() > 0.01
    (first, _), (second, _) = ranks
    for kind in ("means", "samples"):  # bit for bit: both ranks ablate with the same numbers
        assert torch.equal(first[f"{family}/{site}/{kind}"], second[f"{family}/{site}/{kind}"])


@pytest.mark.parametrize("family", SECOND)
def test_each_rank_knows_its_own_heads(ranks, family):
    (_, first), (_, second) = ranks
    for site, heads in zip(SITES, SECOND[family], strict=True):
        assert second[family][site] == heads
        assert sorted({*first[family][site], *heads}) == [0, 1, 2, 3]


def test_heads_that_no_rank_has_whole_are_refused(ranks):
    for _, facts in ranks:
        assert "4 heads and 1 key/value heads" in facts["llama-one-kv-head"]["error"]
        assert "a number of processes that divides both" in facts["llama-one-kv-head"]["error"]


def test_scoring_is_refused(ranks):
    for _, facts in ranks:
        for family in SECOND:
            assert "split over 2 processes" in facts[family]["scoring"]
            assert "device_map=auto" in facts[family]["scoring"]


def test_the_harness_model_on_two_ranks_equals_one_process(run, tmp_path, monkeypatch):
    folder, ranks = run
    monkeypatch.setenv("LOCOS_CACHE_DIR", str(tmp_path))
    expected = evaluated(folder, device="cpu")
    for _, facts in ranks:
        assert facts["harness"]["texts"] == expected["texts"]
        assert facts["harness"]["likelihood"] == pytest.approx(expected["likelihood"], abs=1e-4)
        assert facts["harness"]["identity"] == expected["identity"]


@pytest.mark.parametrize(
    ("layout", "groups", "style", "ranks"),
    [("query_first", 2, "colwise", 2), ("split", 2, "colwise", 4), ("split", 2, "packed", 2)],
)
def test_other_ways_of_splitting_are_refused(layout, groups, style, ranks):
    slices = HeadSlices((0, 8, 16, 24), 8, 64 if layout == "query_first" else 32)
    with pytest.raises(ModelError, match=rf"\({layout}, {style}\) cannot be told apart on {ranks}"):
        on_rank(slices, groups, layout, style, 0, ranks)


def test_an_activation_of_another_width_is_never_ablated_in_the_wrong_place():
    from dataclasses import replace

    from lm_eval_locos.ablation import ablate
    from lm_eval_locos.architecture import Head

    model = tiny_model("llama")
    architecture = describe(model)
    half = replace(architecture.query_slices, starts=(0, 8, None, None), width=16)
    wrong = replace(architecture, query_slices=half)
    with (
        pytest.raises(ModelError, match=r"layer 0 has 32 features at site=query, not 16"),
        ablate(model, {Head(0, 0): torch.zeros(8)}, architecture=wrong),
    ):
        model(torch.tensor([[5, 6]]))
