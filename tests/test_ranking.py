"""Rankings: three file forms, pooling, selection, and every way a file can be wrong."""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lm_eval_locos.architecture import Head
from lm_eval_locos.conditions import Condition, parse_head_list
from lm_eval_locos.errors import LocosError, RankingError
from lm_eval_locos.ranking import HeadRanking

FINGERPRINT = {
    "architecture": "llama",
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "hidden_size": 128,
    "vocab_size": 1000,
}
POPULATION = [Head(i, j) for i in range(4) for j in range(8)]


def read(content, path="r.json"):
    text = content if isinstance(content, str) else json.dumps(content)
    return HeadRanking.from_bytes(text.encode(), path)


def ranked(*scores):
    """A ranking of heads 0-0, 0-1, ... of a 4 x 8 model with these scores."""
    return read({str(head): [score] for head, score in zip(POPULATION, scores, strict=False)})


# -- forms and pooling


def test_wu_form_pools_by_the_mean_over_trials():
    ranking = read({"1-0": [0.5, 0.5], "0-1": [1.0, 0.2], "0-0": []})
    assert ranking.pooled == {Head(1, 0): 0.5, Head(0, 1): 0.6}
    assert ranking.order == (Head(0, 1), Head(1, 0))
    assert ranking.method == "unknown"


def test_envelope_keeps_meta_ids_and_intervals():
    ranking = read(
        {
            "meta": {"method": "dla"},
            "scores": {"0-0": [1, 2]},
            "trial_ids": ["a", "b"],
            "confidence_intervals": {"0-0": [0.5, 2.5]},
        }
    )
    assert ranking.method == "dla"
    assert ranking.trial_ids == ("a", "b")
    assert ranking.confidence_intervals == {Head(0, 0): (0.5, 2.5)}


def test_answer_steps_pool_by_equation_4():
    ranking = read({"scores": {"0-0": [1.0, 0.0], "0-1": [0.0, 1.0]}, "answer_steps": [3, 1]})
    assert ranking.pooled == {Head(0, 0): 0.75, Head(0, 1): 0.25}


trials = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.dictionaries(
            st.tuples(st.integers(0, 3), st.integers(0, 7)),
            st.lists(st.floats(-1e6, 1e6), min_size=n, max_size=n),
            min_size=1,
        ),
        st.lists(st.integers(1, 9), min_size=n, max_size=n),
    )
)


@given(trials)
def test_equation_4_equals_the_mean_over_every_answer_step(data):
    scores, steps = data
    ranking = read(
        {"scores": {f"{i}-{j}": s for (i, j), s in scores.items()}, "answer_steps": steps}
    )
    for head, values in scores.items():
        expanded = [v for v, n in zip(values, steps, strict=True) for _ in range(n)]
        assert math.isclose(
            ranking.pooled[Head(*head)], sum(expanded) / len(expanded), abs_tol=1e-6
        )


@given(trials)
def test_written_rankings_read_back_the_same(tmp_path_factory, data):
    scores, steps = data
    ranking = HeadRanking(
        {Head(*h): tuple(s) for h, s in scores.items()},
        meta={"method": "locos", "model": "m"},
        trial_ids=tuple(f"t{i}" for i in range(len(steps))),
        answer_steps=tuple(steps),
    )
    path = tmp_path_factory.mktemp("r") / "deep" / "r.json"
    ranking.save(path)
    again = HeadRanking.load(path)
    assert (again.scores, again.meta) == (ranking.scores, ranking.meta)
    assert (again.trial_ids, again.answer_steps) == (ranking.trial_ids, ranking.answer_steps)
    assert again.order == ranking.order
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_huge_finite_scores_do_not_overflow():
    assert read({"0-0": [1.7e308, 1.7e308]}).pooled[Head(0, 0)] == pytest.approx(1.7e308)


def test_a_huge_ranking_is_read_quickly_enough_to_use():
    ranking = read({f"{i}-{j}": [i * 0.5 + j] for i in range(100) for j in range(128)})
    assert ranking.top(1) == (Head(99, 127),)


# -- selection


def test_ties_break_by_layer_then_head_whatever_the_order_of_the_file():
    ranking = read({"2-0": [1.0], "1-1": [1.0], "1-0": [1.0], "0-5": [0.0]})
    assert ranking.top(3) == (Head(1, 0), Head(1, 1), Head(2, 0))


def test_top_bottom_and_threshold():
    ranking = ranked(0.1, 0.9, -0.5, 0.4)
    assert ranking.top(2) == (Head(0, 1), Head(0, 3))
    assert ranking.bottom(2) == (Head(0, 2), Head(0, 0))
    assert ranking.above(0.1) == (Head(0, 1), Head(0, 3))
    assert ranking.top(0) == ()


def test_heads_without_a_score_never_enter():
    ranking = read({"0-0": [], "0-1": [-3.0], "0-2": [-4.0]})
    assert ranking.top(2) == (Head(0, 1), Head(0, 2))
    with pytest.raises(RankingError, match=r"k=3, but .* scores for 2 heads.*between 0 and 2"):
        ranking.top(3)
    with pytest.raises(RankingError, match="k=3"):
        ranking.bottom(3)


@given(st.integers(0, 16), st.integers(0, 999), st.booleans())
def test_random_heads_are_seeded_distinct_and_without_the_top(k, seed, matched):
    ranking = ranked(*[(i * 7) % 32 for i in range(32)])
    fullest = max(Counter(head.layer for head in ranking.top(k)).values(), default=0)
    assume(not matched or fullest <= 4)  # otherwise a layer has too few other heads
    drawn = ranking.random(k, seed, POPULATION, match_layers=matched)
    assert drawn == ranking.random(k, seed, POPULATION[::-1], match_layers=matched)
    assert len(set(drawn)) == k
    assert not set(drawn) & set(ranking.top(k))
    if matched:
        assert sorted(h.layer for h in drawn) == sorted(h.layer for h in ranking.top(k))


def test_random_heads_vary_with_the_seed_and_may_include_the_top():
    ranking = ranked(*range(32))
    draws = {ranking.random(4, seed, POPULATION) for seed in range(20)}
    assert len(draws) > 15
    everything = ranking.random(32, 0, POPULATION, exclude_top=False)
    assert everything == tuple(POPULATION)


def test_too_few_heads_to_draw_from_is_an_error():
    ranking = ranked(*range(32))
    with pytest.raises(RankingError, match=r"random:20: only 12 heads are left"):
        ranking.random(20, 0, POPULATION)
    with pytest.raises(RankingError, match=r"8 heads in layer 3 and only 0 others"):
        ranking.random(8, 0, POPULATION, match_layers=True)


# -- files that are wrong


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "a JSON list at the top"),
        ("3", "a JSON int at the top"),
        ('"0-0"', "a JSON str at the top"),
        ("{}", "no head has a score"),
        ('{"0-0": [], "0-1": []}', "no head has a score .2 heads, all lists empty"),
        ('{"0-0": [NaN]}', "head 0-0 has the score nan"),
        ('{"0-0": [1, Infinity]}', "head 0-0 has the score inf"),
        ('{"0-0": [1e999]}', "head 0-0 has the score inf"),
        ('{"0-0": [1' + "0" * 400 + "]}", "integer too large"),
        ('{"0-0": 0.5}', "head 0-0 has '0.5', not a list of numbers"),
        ('{"0-0": ["a"]}', "not a list of numbers"),
        ('{"0-0": [true]}', "not a list of numbers"),
        ('{"0-0": [null]}', "not a list of numbers"),
        ('{"0-0": [[0.5]]}', "not a list of numbers"),
        ('{"0.0": [1]}', "the key '0.0' is no head"),
        ('{"-1-0": [1]}', "the key '-1-0' is no head"),
        ('{"layer": [1]}', "the key 'layer' is no head"),
        ('{"0-0": [1], "0-0": [2]}', "'0-0' occurs twice"),
        ('{"0-1": [1], "0-01": [2]}', "head 0-1 occurs twice .the second time as '0-01'"),
        ('{"scores": [1]}', "scores is a list"),
        ('{"scores": {"0-0": [1]}, "meta": []}', "meta is a list"),
        ('{"scores": {"0-0": [1]}, "trial_ids": "a"}', "trial_ids is a str"),
        ('{"scores": {"0-0": [1]}, "trial_ids": ["a", "b"]}', "has 1 scores, but trial_ids has 2"),
        ('{"scores": {"0-0": [1]}, "answer_steps": [1, 1]}', "answer_steps has 2 entries"),
        ('{"scores": {"0-0": [1]}, "answer_steps": [0]}', "answer_steps is not a list of counts"),
        ('{"scores": {"0-0": [1]}, "answer_steps": {"a": 1}}', "answer_steps is not a list"),
    ],
)
def test_wrong_files_say_what_was_seen(content, words):
    with pytest.raises(RankingError, match=words) as error:
        read(content, "some/file.json")
    assert "heads=some/file.json" in str(error.value)


@given(st.binary(max_size=80))
def test_no_bytes_give_a_traceback(data):
    with contextlib.suppress(LocosError):
        HeadRanking.from_bytes(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["0-0", "0-1", "scores", "meta", "answer_steps", "trial_ids", "x"]),
            inner,
        )
    ),
)


@given(json_values)
def test_no_json_gives_a_traceback(content):
    with contextlib.suppress(LocosError):
        assert read(content).top(1)


def test_missing_file_names_the_forms(tmp_path):
    with pytest.raises(RankingError, match=r"none.json: cannot be read .* hf://datasets/"):
        HeadRanking.load(tmp_path / "none.json")
    with pytest.raises(RankingError, match="cannot be read"):
        HeadRanking.load(tmp_path)


def test_hub_paths(monkeypatch, tmp_path):
    asked = {}

    def download(repository, filename, *, repo_type, revision):
        asked.update(repository=repository, filename=filename, kind=repo_type, revision=revision)
        (tmp_path / "r.json").write_text('{"0-0": [1]}')
        return str(tmp_path / "r.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    ranking = HeadRanking.load("hf://datasets/me/heads@v1/deep/r.json")
    assert asked == {
        "repository": "me/heads",
        "filename": "deep/r.json",
        "kind": "dataset",
        "revision": "v1",
    }
    assert ranking.path == "hf://datasets/me/heads@v1/deep/r.json"
    HeadRanking.load("hf://me/heads/r.json")
    assert (asked["kind"], asked["revision"]) == ("model", None)
    with pytest.raises(RankingError, match="not understood"):
        HeadRanking.load("hf://datasets/r.json")


def test_unreachable_hub_is_explained(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(*args, **kwargs):
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(RankingError, match=r"cannot be fetched .*offline.*give a local path"):
        HeadRanking.load("hf://datasets/me/heads/r.json")


# -- fit to a model


def test_fingerprint_of_another_model_is_refused():
    ranking = read(
        {
            "meta": {"model": "other/one", "fingerprint": FINGERPRINT | {"num_layers": 5}},
            "scores": {"0-0": [1]},
        }
    )
    with pytest.raises(RankingError, match=r"another model .other/one.: num_layers 5 there, 4"):
        ranking.check_fits(FINGERPRINT)


def test_a_resized_vocabulary_is_the_same_model():
    meta = {"fingerprint": FINGERPRINT | {"vocab_size": 999}}
    read({"meta": meta, "scores": {"0-0": [1]}}).check_fits(FINGERPRINT)


@pytest.mark.parametrize("head", ["4-0", "0-8"])
def test_heads_outside_the_model_are_refused_without_meta(head):
    with pytest.raises(RankingError, match=rf"head {head}, but .* layers 0-3 and heads 0-7"):
        read({"0-0": [1], head: [1]}).check_fits(FINGERPRINT)
    read({"3-7": [1]}).check_fits(FINGERPRINT)


# -- conditions


@pytest.mark.parametrize(
    "text", ["baseline", "top:5", "bottom:5", "random:5:7", "layer-random:5:7", "heads:3-1;0-2"]
)
def test_conditions_print_as_they_are_read(text):
    assert str(Condition.parse(text)) == text
    assert Condition.parse(f" {text} ") == Condition.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "top", "top:", "top:-1", "top:1:2", "random:5", "baseline:1", "heads:", "best:3", "top:²"],
)
def test_other_texts_are_refused(text):
    with pytest.raises(RankingError, match=r"Expected|empty"):
        Condition.parse(text)


def test_conditions_select_heads():
    ranking = ranked(*range(32))

    def select(text):
        return Condition.parse(text).select(ranking, POPULATION)

    assert select("baseline") == select("top:0") == ()
    assert select("top:2") == ranking.top(2)
    assert select("bottom:2") == ranking.bottom(2)
    assert select("random:3:1") == ranking.random(3, 1, POPULATION)
    assert select("layer-random:3:1") == ranking.random(3, 1, POPULATION, match_layers=True)
    assert select("heads:3-1;0-2") == (Head(3, 1), Head(0, 2))
    with pytest.raises(RankingError, match="top:2 needs a ranking"):
        Condition.parse("top:2").select(None, POPULATION)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        (" ; ", "is empty"),
        ("3", "'3' is no head"),
        ("1-1;1-1", "names a head twi"),
    ],
)
def test_wrong_head_lists(text, words):
    with pytest.raises(RankingError, match=words):
        parse_head_list(text)


def test_golden_rankings_have_the_known_top_heads(goldens):
    locos = HeadRanking.load(goldens / "rankings" / "smollm2_logit_contrib.json")
    assert [str(head) for head in locos.top(5)] == ["23-2", "23-1", "28-0", "23-7", "23-0"]
    wu = HeadRanking.load(goldens / "rankings" / "smollm2_behavioral.json")
    assert len(wu.order) == 270
