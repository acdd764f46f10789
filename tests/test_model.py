"""LocosAblatedLM in process, on a tiny model with a real tokenizer made here."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from tiny import EARLY, FAMILIES, folded, tiny_model

from lm_eval_locos import model as model_module
from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import SKIPPED, DataError, LocosError, ModelError, RankingError
from lm_eval_locos.model import LocosAblatedLM


def load(folder, **kwargs):
    options = {
        "pretrained": str(folder / "model"),
        "heads": str(folder / "heads.json"),
        "calibration": str(folder / "prompts.txt"),
        "num_calibration": 10,
        "num_heads": 3,
        "device": "cpu",
        "batch_size": 2,
    }
    return LocosAblatedLM(**(options | kwargs))


def generate(*contexts, doc=None, **kwargs):
    kwargs = {"until": [], "max_gen_toks": 6, "do_sample": False} | kwargs
    return [
        Instance("generate_until", doc or {}, (context, kwargs), 0, metadata=("task", i, 1))
        for i, context in enumerate(contexts)
    ]


CONTEXTS = ("w5 w6 w7 w8", "w9", "w11 w12 w13 w14 w15 w16 w17", "w20 w21")


def reference(folder, heads, site, calibration, family="llama", **own):
    """HFLM over a model whose heads are ablated in the weights."""
    values = {head: calibration.means[head.layer, head.head] for head in heads}
    plain = HFLM(pretrained=str(folder / "model"), device="cpu", batch_size=1, **own)
    plain._model = folded(plain.model, values, site, family)
    return plain


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", ["query", "output"])
def test_both_request_types_run_ablated(folder, tokenizer, family, site):
    if family != "llama":
        shutil.rmtree(folder / "model")
        tiny_model(family).save_pretrained(folder / "model")
        pairs = [(i, j) for i in FAMILIES[family].layers for j in range(4)]
        (folder / "heads.json").write_text(json.dumps({f"{i}-{j}": [4 * i + j] for i, j in pairs}))
    # Apart from the model: AutoTokenizer has its own idea of a Qwen2 model's tokenizer.
    tokenizer.save_pretrained(folder / "tokenizer")
    own = {"tokenizer": str(folder / "tokenizer")}
    # In early releases convolutions lose their state in padded batches, without ablation too.
    padded = not (EARLY and family.startswith("lfm2"))
    lm = load(folder, site=site, batch_size=2 if padded else 1, **own)
    pairs = [("w5 w6", " w7"), ("w8 w9 w10", " w11 w12")]
    likely = [Instance("loglikelihood", {}, pair, 0, metadata=("t", 0, 1)) for pair in pairs]
    texts = lm.generate_until(generate(*CONTEXTS), disable_tqdm=True)
    scores = lm.loglikelihood(likely, disable_tqdm=True)
    rolling = [Instance("loglikelihood_rolling", {}, ("w5 w6 w7",), 0, metadata=("t", 0, 1))]
    total = lm.loglikelihood_rolling(rolling, disable_tqdm=True)

    heads = [Head(2, 3), Head(2, 2), Head(2, 1)]
    expected = reference(folder, heads, site, lm.calibrations.get(None, False)[0], family, **own)
    assert texts == expected.generate_until(generate(*CONTEXTS), disable_tqdm=True)
    wanted = expected.loglikelihood(likely, disable_tqdm=True)
    assert [s[0] for s in scores] == pytest.approx([w[0] for w in wanted], abs=1e-4)
    assert total == pytest.approx(expected.loglikelihood_rolling(rolling, True), abs=1e-4)
    plain = HFLM(pretrained=str(folder / "model"), device="cpu", **own)
    assert [s[0] for s in scores] != pytest.approx(
        [w[0] for w in plain.loglikelihood(likely, disable_tqdm=True)], abs=1e-4
    )


def test_no_heads_is_the_plain_model_and_needs_no_ranking(folder):
    lm = load(folder, num_heads=0, heads=None)
    plain = HFLM(pretrained=str(folder / "model"), device="cpu", batch_size=2)
    asked = generate(*CONTEXTS)
    assert lm.generate_until(asked, True) == plain.generate_until(asked, True)
    batch = torch.tensor([[5, 6, 7]])
    assert torch.equal(lm._model_call(batch), plain._model_call(batch))
    assert not lm.calibrations.measured  # nothing was measured for nothing


def test_requests_name_their_own_condition(folder):
    lm = load(folder)
    asked = []
    for condition in ("baseline", "top:3", "bottom:2", "random:3:7", "heads:0-0;1-1"):
        asked += generate(*CONTEXTS[:2], locos_condition=condition)
    mixed = lm.generate_until(asked[::-1], True)[::-1]
    for i in range(0, len(asked), 2):
        assert mixed[i : i + 2] == lm.generate_until(asked[i : i + 2], True)
    plain = HFLM(pretrained=str(folder / "model"), device="cpu")
    assert mixed[:2] == plain.generate_until(generate(*CONTEXTS[:2]), True)
    assert mixed[2:4] == lm.generate_until(generate(*CONTEXTS[:2]), True)
    assert lm.get_model_info()["locos"]["conditions"]["bottom:2"] == ["0-0", "0-1"]


def test_the_answer_does_not_depend_on_the_batch(folder):
    texts = [load(folder, batch_size=n).generate_until(generate(*CONTEXTS), True) for n in (1, 4)]
    assert texts[0] == texts[1]


def test_automatic_batch_size_disturbs_neither_means_nor_hooks(folder):
    fixed, auto = load(folder), load(folder, batch_size="auto", max_batch_size=4)
    asked = generate(*CONTEXTS)
    assert auto.generate_until(asked, True) == fixed.generate_until(asked, True)
    means = [lm.calibrations.get(None, False)[0].sha256 for lm in (fixed, auto)]
    assert means[0] == means[1]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in auto.model.modules())


@pytest.mark.parametrize("mode", ["mean", "zero", "resample"])
def test_modes_differ_and_repeat(folder, mode):
    pair = [Instance("loglikelihood", {}, ("w5 w6", " w7"), 0, metadata=("t", 0, 1))]
    results = {
        m: load(folder, mode=m, num_heads=8).loglikelihood(pair, True)[0][0]
        for m in ("mean", "zero", "resample")
    }
    assert len(set(results.values())) == 3
    assert results[mode] == load(folder, mode=mode, num_heads=8).loglikelihood(pair, True)[0][0]


def test_families_are_calibrated_apart_and_with_the_template(folder):
    lm = load(folder, calibration="auto", num_calibration=5, max_length=250)
    doc = {"family": "parametric"}
    lm.generate_until(generate("w5 w6", doc=doc), True)
    lm.generate_until(generate("w1 w5 w6 w2 w3 ", doc=doc), True)
    lm.generate_until(generate("w5 w6", doc={"family": "musique"}), True)
    lm.generate_until(generate("w5 w6", doc={"text": "hellaswag"}), True)
    assert set(lm.calibrations.measured) == {
        ("parametric", False),
        ("parametric", True),
        ("musique", False),
        (None, False),
    }
    everything = lm.calibrations.measured[None, False][1]
    assert set(everything["families"]) == set(model_module.FAMILIES)
    assert everything["prompts"] == 5
    hashes = {source["means_sha256"] for _, source in lm.calibrations.measured.values()}
    assert len(hashes) == 4


def test_calibration_by_a_family_serves_every_task(folder):
    lm = load(folder, calibration="arithmetic", num_calibration=4)
    lm.generate_until(generate("w5", doc={"family": "musique"}), True)
    assert list(lm.calibrations.measured) == [(None, False)]
    assert set(lm.calibrations.measured[None, False][1]["families"]) == {"arithmetic"}


def test_fewer_prompts_than_asked_is_said(folder, caplog):
    lm = load(folder, num_calibration=50)
    lm.generate_until(generate("w5"), True)
    assert "has 10 prompts; 50 were asked" in caplog.text
    assert lm.calibrations.measured[None, False][1]["prompts"] == 10


def test_provenance(folder):
    lm = load(folder, select="bottom", num_heads=2, site="output")
    lm.generate_until(generate("w5"), True)
    info = lm.get_model_info()["locos"]
    assert json.loads(json.dumps(info)) == info
    assert info["ranking"]["path"] == str(folder / "heads.json")
    assert len(info["ranking"]["sha256"]) == 64
    assert (info["condition"], info["heads"]) == ("bottom:2", ["0-0", "0-1"])
    assert (info["site"], info["mode"], info["average"]) == ("output", "mean", "prompt")
    assert info["calibration"]["given"]["prompts"] == 10
    assert len(info["calibration"]["given"]["means_sha256"]) == 64
    assert info["version"]


# -- prompts that are too long


LONG = " ".join(["w5"] * 300)


def test_long_prompt_is_an_error_that_names_everything(folder):
    lm = load(folder)
    with pytest.raises(DataError, match=r"task task, document 1: the prompt has 300 tokens .* 250"):
        lm.generate_until(generate("w5", LONG), True)


def test_no_room_for_the_answer_is_an_error_of_its_own(folder):
    lm = load(folder, max_length=64)
    asked = generate("w5 w6", max_gen_toks=64)
    said = r"task task, document 0: the answer may have 64 tokens, and the model takes 64 with the"
    with pytest.raises(DataError, match=said):
        lm.generate_until(asked, True)


def test_long_prompt_may_be_skipped_and_is_counted(folder, caplog):
    lm = load(folder, on_overlength="skip")
    answers = lm.generate_until(generate("w5", LONG, "w6"), True)
    short = lm.generate_until(generate("w5", "w6"), True)
    assert answers == [short[0], SKIPPED, short[1]]
    assert lm.get_model_info()["locos"]["skipped"] == {"task": 1}
    assert "task: 1 prompts are too long and are skipped" in caplog.text


def test_long_prompt_may_be_cut_as_the_harness_does(folder, caplog):
    lm = load(folder, on_overlength="truncate", num_heads=0)
    plain = HFLM(pretrained=str(folder / "model"), device="cpu", batch_size=2)
    assert lm.generate_until(generate(LONG), True) == plain.generate_until(generate(LONG), True)
    assert caplog.text.count("are too long and are cut") == 1


# -- the response cache


def cached(lm, path):
    return CachingLM(lm, str(path))


def test_response_cache_of_another_ablation_is_refused(folder):
    path = folder / "answers.db"
    first = cached(load(folder), path).generate_until(generate(*CONTEXTS))
    again = cached(load(folder), path)
    assert again.generate_until(generate(*CONTEXTS)) == first
    for other in ({"num_heads": 2}, {"site": "output"}, {"mode": "zero"}, {"num_calibration": 9}):
        with pytest.raises(LocosError, match="answers of another ablation"):
            cached(load(folder, **other), path)


def test_response_cache_of_a_plain_model_is_refused(folder):
    path = folder / "plain.db"
    plain = HFLM(pretrained=str(folder / "model"), device="cpu")
    cached(plain, path).generate_until(generate(*CONTEXTS))
    with pytest.raises(LocosError, match="a model without ablation"):
        cached(load(folder), path)


def test_response_cache_keeps_conditions_apart(folder):
    path = folder / "answers.db"
    asked = generate(*CONTEXTS, locos_condition="baseline") + generate(*CONTEXTS)
    first = cached(load(folder), path).generate_until(asked)
    assert first[:4] != first[4:]
    assert cached(load(folder), path).generate_until(asked) == first


def test_plain_model_cannot_read_an_ablated_cache(folder):
    from lm_eval_locos import _autoload

    _autoload.install(force=True)
    path = folder / "answers.db"
    cached(load(folder), path).generate_until(generate(*CONTEXTS))
    plain = HFLM(pretrained=str(folder / "model"), device="cpu")
    with pytest.raises(LocosError, match=r"holds answers of an ablated model"):
        cached(plain, path)


# -- arguments that are wrong


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"heads": None}, RankingError, r"heads is missing, and .* example:\n  lm_eval --m"),
        ({"heads": 3.1}, RankingError, "heads=3.1 was read as a float"),
        ({"heads": "none.json"}, RankingError, "none.json: cannot be read"),
        ({"num_heads": 13}, RankingError, "k=13, but .* scores for 12 heads"),
        ({"num_heads": -1}, LocosError, "num_heads=-1: expected a whole number, at least 0"),
        ({"num_heads": "x"}, LocosError, "num_heads='x'"),
        ({"num_heads": 2.5}, LocosError, "num_heads=2.5"),
        ({"select": "best"}, LocosError, "select='best' is not known. Use one of top, bottom"),
        ({"select": "list"}, RankingError, "select=list needs head_list"),
        ({"head_list": "1-1"}, RankingError, "head_list=1-1 needs select=list"),
        ({"select": "list", "head_list": "9-1"}, ModelError, "head 9-1 is outside the model"),
        ({"select": "list", "head_list": "a"}, RankingError, "'a' is no head"),
        ({"select": "list", "head_list": 3.1}, RankingError, r"'3\.1' is no head"),
        ({"select": "list", "head_list": 11}, RankingError, "'11' is no head"),
        ({"select": "random", "num_heads": 7}, RankingError, "only 5 heads are left"),
        ({"site": "key"}, LocosError, "site='key' is not known. Use one of query, output"),
        ({"mode": "max"}, LocosError, "mode='max'"),
        ({"average": "all"}, LocosError, "average='all'"),
        ({"on_overlength": "x"}, LocosError, "on_overlength='x'"),
        ({"num_calibration": 0}, LocosError, "num_calibration=0: .* at least 1"),
    ],
)
def test_wrong_arguments_say_what_to_do(folder, arguments, kind, words):
    with pytest.raises(kind, match=words):
        load(folder, **arguments)


def test_missing_calibration_file_is_explained(folder):
    with pytest.raises(DataError, match=r"calibration=nolma: cannot be read .* name of a task fam"):
        load(folder, calibration="nolma").generate_until(generate("w5"), True)


def test_wrong_condition_of_a_request(folder):
    with pytest.raises(RankingError, match="condition 'best:3' is not understood"):
        load(folder).generate_until(generate("w5", locos_condition="best:3"), True)


def test_ranking_of_another_model(folder):
    (folder / "other.json").write_text('{"0-0": [1], "7-0": [2]}')
    with pytest.raises(RankingError, match="names head 7-0, but the model has layers 0-2"):
        load(folder, heads=str(folder / "other.json"), num_heads=1)


@pytest.mark.parametrize("head_list", ["2-1;0-3", ["2-1", "0-3"]])
def test_explicit_heads_keep_their_order(folder, head_list):
    lm = load(folder, select="list", head_list=head_list, heads=None)
    assert lm.get_model_info()["locos"]["heads"] == ["2-1", "0-3"]


def test_adapter(folder):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    get_peft_model(tiny_model("llama"), config).save_pretrained(folder / "adapter")
    adapted = load(folder, peft=str(folder / "adapter"))
    plain = load(folder)
    pair = [Instance("loglikelihood", {}, ("w5 w6", " w7"), 0, metadata=("t", 0, 1))]
    assert adapted.loglikelihood(pair, True) != plain.loglikelihood(pair, True)
    assert (
        adapted.calibrations.get(None, False)[0].sha256
        != plain.calibrations.get(None, False)[0].sha256
    )
