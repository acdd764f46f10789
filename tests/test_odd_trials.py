"""Odd needles and answers, from a file of probes through tokens and generation to scores."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import torch
from slow_reference import SlowScores
from test_steps import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lm_eval_locos import probes
from lm_eval_locos.detect import detect
from lm_eval_locos.detection.batches import Batch, Trial
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.detection.prompts import token_span
from lm_eval_locos.detection.steps import answer_steps, passes
from lm_eval_locos.errors import DataError

METHODS = ("locos", "dla", "attention_spatial", "wu", "contrastive", "headkv")

# -- tokenizers ----------------------------------------------------------------------------------

_LETTERS = "abcdefghijklmnopqrstuvwxyzALY.?:\n"
_BYTES = ("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *_LETTERS)
_TO_TEXT = (
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
)


def _wrapped(core):
    core.decoder = decoders.Sequence(list(_TO_TEXT))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level():
    """Bytes, and a few words of one token, as GPT-2's."""
    return byte_tokenizer(" Yuki", " Leon", "👩", "\u200d", "🚀", " يوكي", "東京", "++", " met")


def composing():
    """The same behind NFC, as Qwen's."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def sentencepiece():
    """A blank before the text and blanks as ▁, bytes for what is unknown, as Llama 2's."""
    vocabulary = {piece: i for i, piece in enumerate(_BYTES)}
    core = Tokenizer(
        models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return _wrapped(core)


def unigram():
    """The same by a unigram model, which takes neighbours that it does not know for one piece."""
    pieces = [(piece, -1.0) for piece in _BYTES]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    return _wrapped(core)


TOKENIZERS = {make.__name__: make() for make in (byte_level, composing, sentencepiece, unigram)}
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


# -- where the needle is -------------------------------------------------------------------------

NEEDLES = {
    "one token": "Yuki",
    "one letter": "x",
    "emoji": "Leon 👩‍🚀 flew to the 🏳️‍🌈 by 👨‍👩‍👧‍👦.",
    "emoji alone": "🚀",
    "skin and flags": "👍🏽🇯🇵🇯🇵",
    "keycap": "press 1️⃣ now",
    "accents put together": "Zoé à Genève.",
    "accents apart": "Zoe\u0301 a\u0300 Gene\u0300ve.",
    "stacked accents": "Z\u0335\u0321\u0322\u031b\u0300\u0301o.",
    "an accent first": "\u0301lan vital",
    "Hangul": "유키는 한국에 산다.",
    "Hangul apart": unicodedata.normalize("NFD", "유키는 한국에 산다."),
    "right to left": "يوكي تعيش بجانب متحف اللوفر.",
    "Hebrew with points": "שָׁלוֹם עוֹלָם",
    "both ways": "Yuki يوكي 東京 שלום.",
    "marks of direction": "\u202bيوكي\u202c (Yuki)\u200f.",
    "no blanks": "由紀は東京に住んでいる。",
    "Thai": "ยูกิอยู่ที่โตเกียว",
    "Devanagari": "यूकी टोक्यो में रहती है।",
    "outside the first plane": "𝒴𝓊𝓀𝒾 𐍈 𠮷野家",
    "no-break blanks": "Yuki\u00a0lives\u2009here\u3000now.",
    "lines": "Yuki\nlives\n\n\there.",
    "line separators": "Yuki\u2028lives\x85here.",
    "braces": "{haystack} {question} {{x}} {%y%}",
    "special tokens of others": "<|im_end|> [INST] <end_of_turn>",
    "private use": "\ue000 Yuki \uf8ff",
    "signs": "?! -- …",
    "zero width": "Yu\u200bki \u2060lives\ufeff.",
}


def composed(text):
    return unicodedata.normalize("NFC", text)


def row(needle, *, before="It rained. ", after=" Nobody came.", **changes):
    return {
        "context": before + needle + after,
        "needle": needle,
        "question": "Who lives there?",
        "answer": "Yuki",
    } | changes


def loaded(tmp_path, tokenizer, *rows, **options):
    path = tmp_path / "probes.jsonl"
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in rows)
    path.write_text(text, encoding="utf-8")
    found, _ = probes.load(str(path), tokenizer, **options)
    return sorted(found, key=lambda probe: int(probe.id.removeprefix("line").split("_")[0]))


def span(tokenizer, probe):
    """The text of the needle's tokens."""
    return tokenizer.decode(list(probe.trial.ids[slice(*probe.trial.needle)]))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("before", "after"),
    [("It rained. ", " Nobody came."), ("", " Nobody came."), ("It rained. ", ""), ("", "")],
    ids=["middle", "very first", "very last", "nothing else"],
)
def test_the_span_is_the_needle(tmp_path, tokenizer, monkeypatch, chat, before, after):
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE if chat else None)
    rows = [row(needle, before=before, after=after) for needle in NEEDLES.values()]
    found = loaded(tmp_path, tokenizer, *rows, chat_template=chat)
    assert len(found) == len(NEEDLES)
    for (name, needle), probe in zip(NEEDLES.items(), found, strict=True):
        if name == "an accent first" and tokenizer is TOKENIZERS["composing"] and before:
            continue  # NFC puts it together with the blank before
        assert composed(span(tokenizer, probe)).strip() == composed(needle).strip(), name
        whole = tokenizer.decode(list(probe.trial.ids))
        assert composed(before + needle + after) in composed(whole), name


def test_a_needle_that_is_placed(tmp_path, tokenizer):
    book = "It rained all day. Nobody came by. The end was near. " * 8
    for depth in (0, 50, 100):
        rows = [row(needle, context=book) for needle in NEEDLES.values()]
        found = loaded(tmp_path, tokenizer, *rows, depths=(depth,), lengths=(300,))
        for (name, needle), probe in zip(NEEDLES.items(), found, strict=True):
            if name == "an accent first" and tokenizer is TOKENIZERS["composing"]:
                continue
            assert composed(span(tokenizer, probe)).strip() == composed(needle).strip(), name
            before = tokenizer.decode(list(probe.trial.ids[: probe.trial.needle[0]]))
            assert depth or before == "Read the text.\n\n", name


def test_a_needle_of_one_token():
    tokenizer = TOKENIZERS["byte_level"]
    ids, (start, end) = token_span(tokenizer, "It was Yuki again.", (7, 11))
    assert end - start == 1
    assert tokenizer.decode(ids[start:end]) == " Yuki"


def test_a_mark_that_a_normaliser_puts_together_with_the_letter_before():
    tokenizer = TOKENIZERS["composing"]
    text = "Zoe\u0301 met \u1112\u1161\u11ab."
    ids, (start, end) = token_span(tokenizer, text, (0, len(text)))
    assert tokenizer.decode(ids[start:end]) == composed(text) == "Zoé met 한."
    # Of "e" and its accent the needle has one: the token of both holds a part of it.
    ids, (start, end) = token_span(tokenizer, text, (2, 3))
    assert tokenizer.decode(ids[start:end]) == "é"
    with pytest.raises(DataError, match="reports no token for"):
        token_span(tokenizer, text, (3, 4))


def test_needle_or_answer_in_the_question(tmp_path, tokenizer):
    """The question repeats the needle word for word, and names the answer."""
    needle = "Yuki 👩‍🚀 lives in 東京."
    rows = [
        row(needle, question=f"{needle} Is it so?"),
        row(needle, question="Is it Yuki, or Leon?"),
        row(needle, question="{haystack}"),
    ]
    for probe in loaded(tmp_path, tokenizer, *rows):
        start = probe.trial.needle[0]
        assert span(tokenizer, probe).strip() == needle
        assert tokenizer.decode(list(probe.trial.ids[:start])).strip().endswith("It rained.")


# -- when the answer is generated ----------------------------------------------------------------


def scripted(tokenizer, chain, attn="sdpa", room=512):
    """A random Llama that generates the tokens of ``chain`` one after the other.

    The stream is almost the embedding of the token at hand, and the unembedding's row of a token is
    the embedding of its predecessor. What heads add is too small to change the tokens.
    """
    size = max(len(tokenizer), *tokenizer.get_vocab().values()) + 1
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=room,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        attn_implementation=attn,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    assert len(set(chain)) == len(chain)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                small = "o_proj" in name or "down_proj" in name
                parameter.normal_(0, 0.01 if small else 0.3)
        rows = torch.nn.functional.normalize(torch.randn(size, 64), dim=-1)
        model.get_input_embeddings().weight.copy_(8 * rows)
        unembedding = model.get_output_embeddings().weight
        unembedding.mul_(0.01)
        for token, following in pairwise(chain):
            unembedding[following] = rows[token]
    return model


ANSWERS = [
    ("Yuki", " Yuki"),  # one token with the blank, four without it
    ("Yuki", "Yuki"),
    ("Yuki", " It. Yuki"),
    ("yUKI", " Yuki"),
    ("👩‍🚀", "👩‍🚀"),
    ("👩‍🚀", " 👩‍🚀"),
    ("🚀", "👩‍🚀"),
    ("e\u0301", "e\u0301"),
    ("e\u0301", " e\u0301"),
    ("Zo\u00eb", " Zo\u00eb"),
    ("يوكي", " يوكي"),
    ("東京", "東京"),
    ("東京", "in 東京"),
    ("C++", " C++"),
    ("-7", " -7"),
    ("?!", " ?!"),
    ("?!", "?!"),
]


@pytest.mark.parametrize(("answer", "text"), ANSWERS)
@pytest.mark.parametrize("place", ["first", "last", "between"])
def test_generation_finds_the_answer_and_scores_the_needle(answer, text, place):
    """Steps and scores against loops over positions; the needle at the prompt's ends too."""
    tokenizer = TOKENIZERS["byte_level"]
    said = tokenizer.encode(text, add_special_tokens=False)
    needle = tokenizer.encode(f"Q{answer} 👩‍🚀.", add_special_tokens=False)
    rest = [5, 17, 30, 8, 44, 61]
    before, after = {"first": ([], rest), "last": (rest, []), "between": (rest[:3], rest[3:])}[
        place
    ]
    prompt = [*before, *needle, *after]
    if prompt[-1] in said:
        prompt.append(70)
    at = (len(before), len(before) + len(needle))
    trial = Trial(tuple(prompt), at, answer)
    chain = [prompt[-1], *said, tokenizer.eos_token_id]
    model = scripted(tokenizer, chain)
    (result,) = Engine(model, tokenizer, methods=METHODS).run([trial], Batch((0,)))
    assert list(result.ids) == said
    assert result.text == text.strip()
    assert result.passed
    steps = list(result.steps)
    spoken = tokenizer.decode([said[step] for step in steps]).strip()
    if (answer, text) == ("🚀", "👩‍🚀"):
        assert spoken == "🚀"
    assert spoken.lower() == answer.lower()
    slow = SlowScores(
        scripted(tokenizer, chain, attn="eager"), prompt, at, said, stopped=True, steps=steps
    )
    for method in ("locos", "dla", "attention_spatial", "headkv"):
        expected = slow.all_heads(method)
        np.testing.assert_allclose(
            result.scores[method].numpy(), expected, rtol=2e-3, atol=2e-6, err_msg=method
        )
        assert np.abs(expected).max() > 1e-6
    assert all(torch.isfinite(scores).all() for scores in result.scores.values())


def test_a_prompt_that_is_the_needle_alone():
    """Nothing is off the needle but the answer's own tokens."""
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("Yuki.", add_special_tokens=False)
    said = tokenizer.encode(" Yuki", add_special_tokens=False)
    chain = [prompt[-1], *said, tokenizer.eos_token_id]
    trial = Trial(tuple(prompt), (0, len(prompt)), "Yuki")
    engine = Engine(scripted(tokenizer, chain), tokenizer, methods=METHODS)
    (result,) = engine.run([trial], Batch((0,)))
    assert result.passed
    slow = SlowScores(
        scripted(tokenizer, chain, attn="eager"), prompt, (0, len(prompt)), said, True, [0]
    )
    for method in ("locos", "attention_spatial", "headkv"):
        np.testing.assert_allclose(
            result.scores[method].numpy(), slow.all_heads(method), rtol=2e-3, atol=2e-6
        )


def test_an_answer_in_the_question_is_no_answer_step():
    """Only what is generated counts: the same word in the prompt does not."""
    tokenizer = TOKENIZERS["byte_level"]
    prompt = tokenizer.encode("Leon met Yuki. Was it Yuki", add_special_tokens=False)
    said = tokenizer.encode(" Leon", add_special_tokens=False)
    chain = [prompt[-1], *said, tokenizer.eos_token_id]
    trial = Trial(tuple(prompt), (0, 3), "Yuki")
    (result,) = Engine(scripted(tokenizer, chain), tokenizer, methods=METHODS).run(
        [trial], Batch((0,))
    )
    assert (result.text, result.passed, result.steps) == ("Leon", False, ())
    assert set(result.scores) == {"headkv"}


@pytest.mark.parametrize(
    ("gold", "text", "passed"),
    [
        ("?!", "?!", True),
        ("?!", "Well ?! yes", True),
        ("?!", "!?", False),
        ("🙂", "It is 🙂.", True),
        ("+", "one plus two", False),
        ("_", "a_b", True),
        ("Yuki?", "Yuki", False),  # the text has no such answer: no step
        ("Yuki", "Yuki?", True),
    ],
)
def test_answers_of_signs_pass_where_they_occur(gold, text, passed):
    tokenizer = TOKENIZERS["byte_level"]
    steps = answer_steps(tokenizer.encode(text, add_special_tokens=False), gold, tokenizer)
    assert passes(gold, text, steps) is passed


@pytest.mark.parametrize(
    "words", [("Yuki", " Yuki"), ("👩‍🚀", " 👩‍🚀"), ("é", " é"), ("-7", " -7")]
)
def test_an_answer_is_found_with_and_without_its_blank(tokenizer, words):
    """Whatever the blank does to the tokens, the steps spell the answer."""
    answer = words[0]
    bare, blank = (tokenizer.encode(word, add_special_tokens=False) for word in words)
    for ids in (bare, blank, [*tokenizer.encode("it:", add_special_tokens=False), *blank]):
        steps = answer_steps(ids, answer, tokenizer)
        assert tokenizer.decode([ids[step] for step in steps]).strip() == answer


# -- as long as the model's context --------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_a_prompt_as_long_as_the_context(tmp_path, monkeypatch, chat):
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE if chat else None
    (probe,) = loaded(tmp_path, tokenizer, row("Yuki lives here."), chat_template=chat)
    said = tokenizer.encode(" Yuki", add_special_tokens=False)
    chain = [probe.trial.ids[-1], *said, tokenizer.eos_token_id]
    length, new = len(probe.trial.ids), 7
    options = {"data": str(tmp_path / "probes.jsonl"), "max_new_tokens": new, "progress": False}
    found = detect(scripted(tokenizer, chain, room=length + new), tokenizer, **options)
    assert found.pass_rate == 1
    too_small = scripted(tokenizer, chain, room=length + new - 1)
    with pytest.raises(DataError) as error:
        detect(too_small, tokenizer, output=tmp_path / "out", **options)
    assert f"the prompt has {length} tokens and needs {new} for the answer" in str(error.value)
    assert f"the model takes {length + new - 1}. Use shorter" in str(error.value)
    assert not (tmp_path / "out").exists()


def test_the_answer_may_fill_the_context_to_its_last_token(tmp_path):
    """A generation that never stops ends at the limit, in the last place there is."""
    tokenizer = byte_level()
    (probe,) = loaded(tmp_path, tokenizer, row("Yuki lives here."))
    said = [*tokenizer.encode(" Yuki met", add_special_tokens=False), 3, 4, 5]
    chain = [probe.trial.ids[-1], *said, 6]
    model = scripted(tokenizer, chain, room=len(probe.trial.ids) + len(said))
    found = detect(
        model,
        tokenizer,
        data=str(tmp_path / "probes.jsonl"),
        max_new_tokens=len(said),
        progress=False,
    )
    assert list(found.results[0].ids) == said
    assert found.results[0].steps == (0,)
