"""The golden ranking of SmolLM2: its prompts rebuilt as the reference builds them, scored by us."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.ranking import HeadRanking

FRAME = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nThe character is"
)
RESERVE = 200  # the reference's context length is the prompt's length less this
_BEFORE = 10  # the reference generates at most so many tokens


def rebuilt(name, goldens, tokenizer):
    """The trial that the reference calls ``nolima_ENTRY_TEST_CHARACTER_LENGTH_DEPTH``.

    The book's tokens are cut to the length less reserve and needle. The needle's tokens come after
    the last full stop before the depth, or at the very end, without a blank.
    """
    _, entry, test, character, length, depth = name.split("_")

    def encode(text):
        return tokenizer.encode(text, add_special_tokens=False)

    entries = json.loads((goldens / "nolima" / "needle_set.json").read_text(encoding="utf-8"))
    number, found = next((i, e) for i, e in enumerate(entries) if e["id"] == entry)
    places = found["tests"][test]["input_args"]

    def fill(text):
        for i, place in enumerate(places, 1):
            text = text.replace(f"{{{i}}}", place)
        return text.replace("{CHAR}", character)

    needle = encode(fill(found["needle"]))
    book = goldens / "nolima" / "haystack" / "rand_shuffle" / f"rand_book_{number % 5 + 1}.txt"
    hay = encode(book.read_text(encoding="utf-8"))[: int(length) - RESERVE - len(needle)]
    place = len(hay)
    if depth != "100":
        place = int(len(hay) * int(depth) / 100)
        stop = encode(".")[0]
        while place and hay[place - 1] != stop:
            place -= 1
    template = found["task_template"].replace("{question}", fill(found["questions"]["onehop"]))
    head, tail = FRAME.format(template).split("{haystack}")
    ids = [*encode(head), *hay[:place], *needle, *hay[place:], *encode(tail)]
    start = len(encode(head)) + place
    return Trial(tuple(ids), (start, start + len(needle)), character)


@pytest.fixture(scope="module")
def engine(smollm2):
    model = AutoModelForCausalLM.from_pretrained(
        smollm2["pretrained"], gguf_file=smollm2["gguf_file"], dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2["pretrained"], gguf_file=smollm2["gguf_file"])
    return Engine(model, tokenizer, methods=["locos"], max_new_tokens=_BEFORE)


@pytest.mark.real_model
def test_the_rebuilt_prompts_are_the_references(goldens, engine):
    records = json.loads((goldens / "trials" / "trials.json").read_text(encoding="utf-8"))
    arrays = np.load(goldens / "trials" / "trials.npz")
    for i, record in enumerate(records):
        trial = rebuilt(record["trial_id"], goldens, engine.tokenizer)
        assert list(trial.ids) == arrays[f"t{i}_input_ids"].tolist(), record["trial_id"]
        assert list(trial.needle) == record["needle_span"]


@pytest.mark.real_model
def test_golden_ranking(goldens, engine):
    """All heads in the reference's order, and every trial's scores."""
    golden = HeadRanking.load(goldens / "rankings" / "smollm2_logit_contrib.json")
    heads = sorted(golden.scores)
    expected = np.array([golden.scores[head] for head in heads]).T  # (trials, heads)
    trials = [rebuilt(name, goldens, engine.tokenizer) for name in golden.trial_ids]
    got = np.zeros_like(expected)
    for i, result in engine.run_all(trials, batch_size=4):
        assert result.passed, golden.trial_ids[i]
        got[i] = result.scores["locos"].flatten().numpy()
    assert np.abs(got - expected).max() < 1e-3 * np.abs(expected).max()
    ours, theirs = got.mean(0), expected.mean(0)
    assert spearmanr(ours, theirs).statistic >= 0.999
    assert np.argsort(-ours)[:10].tolist() == np.argsort(-theirs)[:10].tolist()
