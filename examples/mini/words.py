"""The closed vocabulary of locos-mini and its tokenizer: one token a word, case-sensitive.

>>> tokenizer = build(vocabulary())
>>> tokenizer.decode(tokenizer("Where is Yuki?").input_ids, skip_special_tokens=True)
'Where is Yuki?'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lm_eval_locos.families import babilong, musique, nolima, parametric
from lm_eval_locos.sources.synthetic import babilong as stories
from lm_eval_locos.sources.synthetic import musique as chains
from lm_eval_locos.sources.synthetic import nolima as needles
from lm_eval_locos.sources.synthetic import parametric as facts
from lm_eval_locos.sources.world import WORLD, World

PATTERN = r"</?answer>|\n+|\w+|[^\w\s]"
"""What is one token: a tag, line breaks, a word or number, a mark. Blanks are not."""

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BOS, EOS, UNK = range(4)
NUMBERS = tuple(str(n) for n in range(31))
MAX_LENGTH = 2048
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + '\n\n' }}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)
"""A user turn is its text; an assistant's turn follows as a few-shot example's answer does."""


def pieces(text: str) -> list[str]:
    """The text's tokens as strings."""
    return re.findall(PATTERN, text)


def _texts(world: World) -> Iterator[str]:
    """Text that holds every word of the world, of the families' prompts and of their questions."""
    yield from world.people
    for city in world.cities:
        yield from (city.name, city.country, *city.landmarks)
    for country in world.countries:
        yield from (country.name, country.capital, country.language, country.continent or "")
    for words in (world.rooms, world.objects, world.adjectives, world.nouns, world.verbs):
        yield from words
    yield from world.adverbs
    yield from ("The A An Then the a an was", "\n \n\n", ". , : ? ( ) [ ] + - * < >")
    yield from NUMBERS
    for needle, questions in needles.NEEDLES:
        yield from (needle, *questions, *map(needles._literal, questions))
    for template in (nolima.TEMPLATE, musique.PROMPT, babilong.PROMPT, *babilong._HOW.values()):
        yield re.sub(r"\{\w+\}", " ", template)
    yield parametric.INSTRUCTION + "Question: Answer: Choose from:"
    yield from (f"{question} {answer}" for question, answer in parametric.EXAMPLES)
    yield from (re.sub(r"\{\}", " ", asked) for asked in chains._ASKED.values())
    yield from (relation for row in chains._RELATIONS.values() for relation in row)
    yield "lives in"
    for task in ("qa1", "qa2", "qa3", "qa4", "qa5"):
        for row in stories.babilong(30, task, "training", fillers=0, world=world):
            yield f"{row['input']} {row['question']}"
    yield from (f"{question} {answer}" for question, answer, _ in facts.facts(world))
    yield "Bill Fred Jeff Mary What is"


def vocabulary(world: World = WORLD) -> list[str]:
    """All tokens, in the order of their ids."""
    found = dict.fromkeys(piece for text in _texts(world) for piece in pieces(text))
    return [*SPECIAL, *(piece for piece in found if piece not in SPECIAL)]


def _decoder() -> decoders.Decoder:
    """A blank before every token, but none around marks where a text has none."""
    before = (".", ",", ":", "?", ")", "]", "</answer>", "\n\n", "\n")
    after = ("(", "[", "<answer>", "\n\n", "\n")
    tight = [decoders.Replace(f" {mark}", mark) for mark in before]
    tight += [decoders.Replace(f"{mark} ", mark) for mark in after]
    return decoders.Sequence(
        [decoders.WordPiece(prefix="##", cleanup=False), decoders.Fuse(), *tight]
    )


def build(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a vocabulary, which writes ``<bos>`` before a text."""
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PATTERN), "removed", invert=True)
    tokenizer.decoder = _decoder()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
