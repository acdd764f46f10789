"""Rankings that ship with the package, and for which models they are used."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from tiny import tiny_model

from lm_eval_locos import bundled
from lm_eval_locos.bundled import RANKINGS, bundled_ranking
from lm_eval_locos.detection.scores import METHODS
from lm_eval_locos.errors import RankingError
from lm_eval_locos.model import LocosAblatedLM
from lm_eval_locos.ranking import HeadRanking

SMOLLM2 = RANKINGS["SmolLM2-135M-Instruct"]


@pytest.mark.parametrize(
    ("pretrained", "gguf_file"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", None),
        ("/models/SmolLM2-135M-Instruct", None),
        ("/models/SmolLM2-135M-Instruct/", None),
        ("/anything", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("/anything", "SmolLM2-135M-Instruct-f16.gguf"),
        (SimpleNamespace(name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct"), None),
    ],
)
def test_known_models(pretrained, gguf_file):
    assert bundled_ranking(pretrained, gguf_file) == SMOLLM2 / "locos.json"


@pytest.mark.parametrize(
    ("pretrained", "gguf_file"),
    [
        ("HuggingFaceTB/SmolLM2-135M", None),
        ("HuggingFaceTB/SmolLM2-360M-Instruct", None),
        ("me/SmolLM2-135M-Instruct-tuned", None),
        ("HuggingFaceTB/SmolLM2-135M-Instruct/sub", None),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "other.gguf"),
        (None, None),
        (SimpleNamespace(), None),
    ],
)
def test_other_models(pretrained, gguf_file):
    assert bundled_ranking(pretrained, gguf_file) is None


@pytest.mark.parametrize("method", METHODS)
def test_what_ships_is_complete(method):
    ranking = HeadRanking.load(SMOLLM2 / f"{method}.json")
    assert ranking.method == method
    assert len(ranking.order) == 270
    assert set(ranking.confidence_intervals) == set(ranking.scores)
    meta = ranking.meta
    assert (meta["dataset"], meta["split"], meta["data"]["source"]) == (
        "nolima",
        "detection",
        "bundled",
    )
    assert meta["num_trials_passed"] >= 20
    assert "/" not in meta["model"].removeprefix("HuggingFaceTB/")
    assert method in (SMOLLM2 / "README.md").read_text(encoding="utf-8")


def test_the_same_heads_as_the_golden_ranking(goldens):
    """Other prompts, other needles; the same model."""
    golden = HeadRanking.load(goldens / "rankings" / "smollm2_logit_contrib.json")
    ours = HeadRanking.load(SMOLLM2 / "locos.json")
    assert len(set(ours.top(5)) & set(golden.top(5))) >= 4


def test_used_when_no_ranking_is_given(folder, monkeypatch, caplog):
    monkeypatch.setitem(bundled.RANKINGS, "model", folder)
    (folder / "heads.json").rename(folder / "locos.json")
    arguments = {"device": "cpu", "num_heads": 2}
    with caplog.at_level(logging.WARNING):
        lm = LocosAblatedLM(str(folder / "model"), **arguments)
    assert lm.get_model_info()["locos"]["ranking"]["path"] == str(folder / "locos.json")
    assert lm.get_model_info()["locos"]["heads"] == ["2-3", "2-2"]
    assert "using the bundled ranking" in caplog.text
    # The baseline needs none, and says nothing.
    caplog.clear()
    assert LocosAblatedLM(str(folder / "model"), device="cpu", num_heads=0).ranking is None
    assert "bundled" not in caplog.text


def test_a_model_of_that_name_with_other_heads(tmp_path, tokenizer):
    home = tmp_path / "SmolLM2-135M-Instruct"
    tiny_model("llama").save_pretrained(home)
    tokenizer.save_pretrained(home)
    with pytest.raises(RankingError, match="was made on another model"):
        LocosAblatedLM(str(home), device="cpu", num_heads=2)


def test_the_mini_by_name_and_by_folder():
    for pretrained in ("locos-mini", str(bundled.MINI)):
        assert bundled_ranking(pretrained) == bundled.MINI / "locos.json"
    assert bundled.resolve(None) == bundled.resolve("locos-mini") == str(bundled.MINI)
    assert bundled.resolve("gpt2") == "gpt2"
