"""From a prompt's text to a `Trial`: tokens, and where among them the needle is.

    >>> trial = tokenised(tokenizer, prompt, (start, end), gold="Yuki", chat_template=True)
    >>> tokenizer.decode(trial.ids[slice(*trial.needle)])
    ' Yuki lives next to the Louvre.'

The needle's place is followed and never looked for: through the chat template by two marks around
it, and from characters to tokens by the tokenizer's own offsets. Where either loses it there is an
error.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from transformers import PreTrainedTokenizerBase

from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.errors import DataError

# Private-use characters, which no text has.
_OPEN, _CLOSE = "\ue0a0", "\ue0a1"


def tokenised(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    needle: tuple[int, int],
    gold: str,
    *,
    chat_template: bool,
) -> Trial:
    """The trial of one prompt.

    Args:
        tokenizer: of the model.
        prompt: the user turn.
        needle: [start, end) of its characters.
        gold: the answer.
        chat_template: whether the prompt becomes a user turn of the model's chat template, thinking
            disabled where the template can.

    Raises:
        DataError: the needle cannot be followed.
    """
    if chat_template:
        prompt, needle = rendered(tokenizer, prompt, needle)
    # A template writes special tokens itself.
    bos = tokenizer.bos_token
    written = chat_template or (bos is not None and prompt.startswith(bos))
    ids, span = token_span(tokenizer, prompt, needle, add_special_tokens=not written)
    return Trial(tuple(ids), span, gold)


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer comes with a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def rendered(
    tokenizer: PreTrainedTokenizerBase, prompt: str, needle: tuple[int, int]
) -> tuple[str, tuple[int, int]]:
    """The prompt in the chat template, and the needle's characters there."""
    if not has_chat_template(tokenizer):
        raise DataError("the tokenizer has no chat template. Run without one.")
    if _OPEN in prompt or _CLOSE in prompt:
        raise DataError("the prompt has private-use characters (U+E0A0, U+E0A1). Remove them.")

    def render(content: str) -> str:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )

    start, end = needle
    marked = render(prompt[:start] + _OPEN + prompt[start:end] + _CLOSE + prompt[end:])
    text = render(prompt)
    start, end = marked.find(_OPEN), marked.find(_CLOSE) - 1
    if marked.replace(_OPEN, "").replace(_CLOSE, "") != text or not 0 <= start < end:
        raise DataError(
            "the chat template changes the prompt's text, so that the needle cannot be followed "
            "through it. Run without the template (--no-chat-template)."
        )
    return text, (start, end)


def token_span(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    needle: tuple[int, int],
    **options: Any,
) -> tuple[list[int], tuple[int, int]]:
    """The token ids of ``text``, and [start, end) of those that hold a character of the needle.

    A token that holds characters of the needle and of its neighbour too (a blank before it, say)
    belongs to the needle.

    Args:
        tokenizer: fast, or one whose tokens of a text's beginning begin the tokens of the text.
        text: to tokenise.
        needle: [start, end) of its characters.
        **options: for the tokenizer.

    Raises:
        DataError: the offsets do not cover the needle, or a slow tokenizer gives no such prefix.
    """
    start, end = needle
    if tokenizer.is_fast:
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False, **options)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        inside = [i for i, (low, high) in enumerate(offsets) if low < end and high > start]
        covered = {c for i in inside for c in range(*offsets[i])}
        missing = [c for c in range(start, end) if c not in covered and not _may_go(text[c])]
        if not inside or missing or inside[-1] - inside[0] + 1 != len(inside):
            at = text[missing[0]] if missing else text[start:end][:40]
            raise DataError(
                f"{type(tokenizer).__name__} reports no token for {at!r} in the needle "
                f"{text[start:end][:60]!r}, or tokens that are not neighbours. Choose another "
                "needle, or another tokenizer of this model."
            )
        return ids, (inside[0], inside[-1] + 1)
    ids = tokenizer(text, verbose=False, **options)["input_ids"]
    bounds = []
    for cut in (start, end):
        part = tokenizer(text[:cut].rstrip(), verbose=False, **options)["input_ids"]
        while part and part[-1] in tokenizer.all_special_ids and part != ids[: len(part)]:
            part = part[:-1]  # an EOS that closes every text
        if part != ids[: len(part)]:
            raise DataError(
                f"{type(tokenizer).__name__} is a slow tokenizer, and its tokens of the text up to "
                f"{text[:cut][-40:]!r} do not begin its tokens of the whole prompt, so that the "
                "needle cannot be followed. Use a fast tokenizer."
            )
        bounds.append(len(part))
    return ids, (bounds[0], bounds[1])


def _may_go(character: str) -> bool:
    """Whether a normaliser may leave no token of a character's own: a blank, an accent or a letter
    of Hangul that it puts together with the one before (NFC), an invisible mark."""
    kind = unicodedata.category(character)
    return (
        character.isspace() or kind in ("Mn", "Mc", "Me", "Cf") or "\u1160" <= character <= "\u11ff"
    )
