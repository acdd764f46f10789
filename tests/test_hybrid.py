"""Models some of whose layers have no attention: nothing counts, draws or scores heads there."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from tiny import FAMILIES, HEADS, SCORED, random_ids, tiny_model
from transformers import AutoModelForCausalLM

from lm_eval_locos.ablation import ablate
from lm_eval_locos.architecture import Family, Head, describe, families, register_family
from lm_eval_locos.calibration import calibrate
from lm_eval_locos.conditions import Condition
from lm_eval_locos.detect import detect
from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.cri import cri
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.doctor import diagnose, facts
from lm_eval_locos.errors import ModelError, RankingError
from lm_eval_locos.figures import grid
from lm_eval_locos.ranking import HeadRanking

HYBRID = [name for name, case in FAMILIES.items() if len(case.layers) < 3]
DETECTED = [name for name in HYBRID if name in SCORED]
needs_detection = pytest.mark.skipif(
    not DETECTED, reason="this release of transformers is too early for detection in hybrids"
)


@pytest.fixture(params=HYBRID)
def family(request):
    return request.param


def test_a_head_of_a_layer_without_attention_is_named(family):
    model, case = tiny_model(family), FAMILIES[family]
    (missing,) = {0, 1, 2} - set(case.layers)
    size = describe(model).query_slices.size
    has = ", ".join(map(str, case.layers))
    said = rf"head {missing}-1 .*: layer {missing} .* no attention. Choose .* layers {has};"
    with (
        pytest.raises(ModelError, match=said),
        ablate(model, {Head(missing, 1): torch.zeros(size)}),
    ):
        pass
    with (
        pytest.raises(ModelError, match=r"head 3-0 is outside the model"),
        ablate(model, {Head(3, 0): torch.zeros(size)}),
    ):
        pass


def test_a_model_without_any_attention_is_refused(family):
    model = tiny_model(family)
    without = set(range(3)) - set(FAMILIES[family].layers)
    kind = model.config.layer_types[without.pop()]
    model.config.layer_types = [kind] * 3
    for block in model.get_decoder().layers:
        block.self_attn = None
    with pytest.raises(ModelError, match=r"none of the 3 layers .* has an attention\. Choose"):
        describe(model)


def test_an_attention_layer_without_its_module_is_an_error(family):
    """Only what the config calls something else may be without: all else is a wrong description."""
    model = tiny_model(family)
    model.get_decoder().layers[2].self_attn = None
    with pytest.raises(ModelError, match=r"layer 2 .* without self_attn\.q_proj"):
        describe(model)


def test_means_of_layers_without_attention_are_zero(family):
    found = calibrate(tiny_model(family), random_ids(9, 5), site="query", progress=False)
    (missing,) = {0, 1, 2} - set(FAMILIES[family].layers)
    assert not found.means[missing].any()
    assert found.means[list(FAMILIES[family].layers)].all()


def test_facts_count_the_layers(family):
    model = tiny_model(family)
    told = facts(model, describe(model))
    assert told["layers"] == "2 global, 1 none"
    gated = FAMILIES[family].gated
    assert ("4 heads of 16 with gates between them (128" in told["query site"]) == gated
    assert "after one another" in told["output site"]


def test_a_ranking_with_such_a_head_is_refused(folder, family):
    from lm_eval_locos.model import LocosAblatedLM

    tiny_model(family).save_pretrained(folder / "model")
    (missing,) = {0, 1, 2} - set(FAMILIES[family].layers)
    (folder / "heads.json").write_text(json.dumps({f"{missing}-0": [2.0], "2-1": [1.0]}))
    options = {
        "pretrained": str(folder / "model"),
        "tokenizer": str(folder / "model"),
        "heads": str(folder / "heads.json"),
        "calibration": str(folder / "prompts.txt"),
        "num_calibration": 2,
        "device": "cpu",
    }
    said = rf"names head {missing}-0, but layer {missing} of the model has no attention"
    for more in ({"num_heads": 1}, {"num_heads": 1, "select": "random"}, {"num_heads": 2}):
        with pytest.raises(RankingError, match=said):
            LocosAblatedLM(**more, **options)


@needs_detection
@pytest.mark.parametrize("family", DETECTED)
def test_detection_ranks_the_heads_that_exist(tmp_path, tokenizer, family):
    tiny_model(family).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    words = " ".join(f"w{5 + j}" for j in range(30))
    row = {"context": words, "needle": "w12 w13 w14", "question": "w3", "answer": "w1"}
    path = tmp_path / "probes.jsonl"

    def write(answer):
        path.write_text("\n".join(json.dumps(row | {"id": i, "answer": answer}) for i in range(3)))

    def run(**options):
        return detect(model, tokenizer, data=str(path), progress=False, **options)

    write("w1")
    generated = run(methods=["headkv"]).results[0].text.split()
    write(next(word for word in generated if word.startswith("w")))
    found = run(methods=["locos", "cri"], output=tmp_path / "out")
    layers = FAMILIES[family].layers
    expected = {Head(layer, head) for layer in layers for head in range(HEADS)}
    for method in ("locos", "cri"):
        ranking = HeadRanking.load(tmp_path / "out" / f"{method}.json")
        assert set(ranking.scores) == expected
        for result in found.results:
            rows = dict(zip(layers, result.scores[method].tolist(), strict=True))
            for head, values in ranking.scores.items():
                assert any(rows[head.layer][head.head] == pytest.approx(v) for v in values)
    drawn = Condition.parse("random:4:1").select(ranking, describe(model).heads)
    assert set(drawn) <= expected
    assert (
        "| 2 of 3 layers x 4 heads (2 key/value heads)"
        in (tmp_path / "out" / "README.md").read_text()
    )
    picture = grid(ranking)
    assert picture.shape == (3, HEADS)
    assert (picture == picture).all(1).nonzero()[0].tolist() == list(layers)  # not NaN


@needs_detection
@pytest.mark.parametrize("family", DETECTED)
def test_the_prefix_is_not_shared_and_the_log_says_why(family, tokenizer, caplog):
    engine = Engine(tiny_model(family), tokenizer, max_new_tokens=2)
    ids = tuple(random_ids(40)[0])
    trials = [Trial(ids, (20, 24), "w1"), Trial(ids[:30], (20, 24), "w1")]
    with caplog.at_level(logging.WARNING):
        batches = engine.plan(trials, batch_size=2)
    assert all(batch.shared == () for batch in batches)
    assert "layers without attention keep a state" in caplog.text


def test_releases_that_lose_the_state_are_refused(family, tokenizer, monkeypatch):
    """The tokens would be others, without a word."""
    monkeypatch.setattr(transformers, "__version__", "5.14.1")
    model = tiny_model(family)
    engine = Engine(model, tokenizer, max_new_tokens=2)
    trial = Trial(tuple(random_ids(20)[0]), (3, 6), "w1")
    said = r"transformers 5\.14\.1 loses the state of layers .* Use transformers 5\.17 or later"
    with pytest.raises(ModelError, match=said):
        dict(engine.run_all([trial]))
    with pytest.raises(ModelError, match=said):
        cri(model, trial, [7, 8], [0])
    checks = {check.name: check for check in diagnose(model, tokenizer)}
    assert all(check.passed is not False for check in checks.values()), checks
    assert checks["scores"].passed is None


@needs_detection
@pytest.mark.parametrize("family", [name for name in DETECTED if FAMILIES[name].gated])
@pytest.mark.parametrize(
    ("layout", "name", "said"),
    [
        ("split", "attention", "softmax of the captured queries and keys is not the heads' out"),
        ("query_first", "query site", "ablating its query changes the output of"),
    ],
)
def test_a_gate_that_is_not_described_fails_the_doctor(
    family, layout, name, said, tokenizer, monkeypatch
):
    monkeypatch.setattr(families, "_KNOWN", dict(families._KNOWN))
    model = tiny_model(family)
    register_family(Family((model.config.model_type,), layout=layout))
    checks = {check.name: check for check in diagnose(model, tokenizer)}
    assert checks[name].passed is False
    assert said in checks[name].detail
