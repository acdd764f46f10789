"""Where the needle is: through chat templates, and from characters to tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm_eval_locos.detection import prompts
from lm_eval_locos.errors import DataError


@pytest.fixture(scope="module")
def bytewise(bytewise):
    """The same with a chat template."""
    bytewise.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }}\n"
        "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}(no thinking)"
        "{% endif %}"
    )
    return bytewise


@pytest.mark.parametrize(
    "needle", ["Yuki.", "北京很大。", "يوكي", "👩‍🚀 flew", "x", "{{ bos_token }}", "\\1 $0"]
)
@pytest.mark.parametrize("chat_template", [True, False])
@pytest.mark.parametrize(("before", "after"), [("", " End"), ("Once. ", " Then.\n"), ("é", "é")])
def test_the_needle_is_followed(bytewise, needle, chat_template, before, after):
    prompt = before + needle + after
    span = (len(before), len(before) + len(needle))
    trial = prompts.tokenised(bytewise, prompt, span, "Yuki", chat_template=chat_template)
    assert bytewise.decode(trial.ids[slice(*trial.needle)]).strip() == needle.strip()
    text = bytewise.decode(trial.ids)
    assert ("(no thinking)" in text) == ("[user]" in text) == chat_template


def test_a_repeated_sentence_is_not_confused_with_the_needle(bytewise):
    prompt = "Yuki. Yuki. Yuki."
    for start in (0, 6, 12):
        trial = prompts.tokenised(bytewise, prompt, (start, start + 5), "x", chat_template=True)
        before = bytewise.decode(trial.ids[: trial.needle[0]])
        assert before.count("Yuki.") == start // 6


def test_one_bos(bytewise):
    bytewise_bos = bytewise.bos_token_id
    trial = prompts.tokenised(bytewise, "a needle", (2, 8), "x", chat_template=True)
    assert trial.ids.count(bytewise_bos) == 1
    trial = prompts.tokenised(bytewise, "<s>a needle", (5, 11), "x", chat_template=False)
    assert trial.ids.count(bytewise_bos) == 1


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
        "{% for m in messages %}{{ m['content'][:4] }}{% endfor %}",
        "{% for m in messages %}{{ m['content'] }}{{ m['content'] | length }}{% endfor %}",
        "no content",
    ],
)
def test_a_template_that_loses_the_needle(bytewise, template):
    other = SimpleNamespace(
        chat_template=template,
        apply_chat_template=lambda *a, **k: bytewise.apply_chat_template(
            *a, chat_template=template, **k
        ),
    )
    if "upper" in template:  # marks have no capitals, and the place is still known
        text, (start, end) = prompts.rendered(other, "a needle b", (2, 8))
        assert text[start:end] == "NEEDLE"
        return
    with pytest.raises(DataError, match="--no-chat-template"):
        prompts.rendered(other, "a needle b", (2, 8))


def test_no_template(bytewise):
    with pytest.raises(DataError, match="no chat template"):
        prompts.rendered(SimpleNamespace(chat_template=None), "a", (0, 1))


def test_marks_in_the_prompt(bytewise):
    with pytest.raises(DataError, match="private-use"):
        prompts.rendered(bytewise, "a \ue0a0 b", (0, 1))


def test_a_token_over_the_edge_belongs_to_the_needle(tokenizer):
    # One token a word, and the needle is a part of two of them.
    ids, span = prompts.token_span(tokenizer, "w1 w22 w33 w4", (4, 9))
    assert [tokenizer.decode([i]) for i in ids[slice(*span)]] == ["w22", "w33"]


def test_a_tokenizer_that_reports_nothing_for_the_needle():
    class Offsets:
        is_fast = True

        def __call__(self, text, **_):
            return {"input_ids": [1, 2], "offset_mapping": [(0, 2), (8, 10)]}

    with pytest.raises(DataError, match="reports no token for 'n' in the needle 'needle'"):
        prompts.token_span(Offsets(), "a needle b", (2, 8))


class Slow:
    """A tokenizer without offsets, one token a word, perhaps with one that closes every text."""

    is_fast = False
    all_special_ids = (0,)

    def __init__(self, closing=False, merging=False):
        self.closing, self.merging = closing, merging

    def __call__(self, text, **_):
        ids = [1 + sum(map(ord, word)) for word in text.split()]
        if self.merging:  # tokens depend on the text's length: no prefix is stable
            ids = [i * 1000 + len(text) for i in ids]
        return {"input_ids": ids + [0] * self.closing}


@pytest.mark.parametrize("closing", [False, True])
def test_slow_tokenizers(closing):
    ids, span = prompts.token_span(Slow(closing), "one two three four", (4, 13))
    assert span == (1, 3)
    assert len(ids) == 4 + closing


def test_slow_tokenizers_that_cannot_be_followed():
    with pytest.raises(DataError, match="slow tokenizer"):
        prompts.token_span(Slow(merging=True), "one two three four", (4, 13))


@settings(max_examples=60, deadline=None)
@given(
    before=st.text(max_size=20),
    needle=st.text(min_size=1, max_size=20).filter(str.strip),
    after=st.text(max_size=20),
)
def test_any_text(bytewise, before, needle, after):
    if "<s>" in before + needle + after or "</s>" in before + needle + after:
        return
    text = before + needle + after
    ids, (start, end) = prompts.token_span(
        bytewise, text, (len(before), len(before) + len(needle)), add_special_tokens=False
    )
    parts = [bytewise.decode(ids[a:b]) for a, b in ((0, start), (start, end), (end, len(ids)))]
    assert parts == [before, needle, after]
