"""Training prompts of locos-mini, exactly as the families build them, from the part "training".

    >>> prompts = Prompts(seed=0)
    >>> example = prompts.draw("qa2", fillers=4)
    >>> [prompts.vocabulary[token] for _, token in example.targets]
    ['<answer>', 'kitchen', '</answer>', '<eos>']

What training asks no other part asks, but for facts and sums, of which it has all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import words
from torch import Tensor

from lm_eval_locos.families import babilong, musique, nolima, parametric
from lm_eval_locos.sources.needles import load_benchmark
from lm_eval_locos.sources.synthetic.babilong import babilong as stories
from lm_eval_locos.sources.synthetic.musique import musique as chains
from lm_eval_locos.sources.synthetic.nolima import nolima as contexts
from lm_eval_locos.sources.synthetic.parametric import parametric as facts
from lm_eval_locos.sources.world import WORLD, World

FAMILIES = ("nolima", "musique", "qa1", "qa2", "parametric", "arithmetic")
RETRIEVAL, KNOWLEDGE = frozenset(FAMILIES[:4]), FAMILIES[4:]
_ENDLESS = 10**9


@dataclass(frozen=True)
class Example:
    """One row of training: ``targets`` are (position, token it should predict)."""

    family: str
    ids: tuple[int, ...]
    targets: tuple[tuple[int, int], ...]


def asked_elsewhere() -> set[tuple[str, str]]:
    """(person, landmark) pairs of the bundled needle sets, which training never asks."""
    return {
        (person, arguments[0])
        for entry in load_benchmark("needle_set.json").entries
        for arguments in entry.tests.values()
        for person in entry.characters
    }


class Prompts:
    """Draws examples of any family.

    Args:
        seed: of everything drawn.
        world: the word lists.
    """

    def __init__(self, seed: int, world: World = WORLD) -> None:
        self.world, self.seed = world, seed
        self.rng = random.Random(f"{seed}-prompts")
        self.vocabulary = words.vocabulary(world)
        self._id = {word: i for i, word in enumerate(self.vocabulary)}
        self._rows: dict[tuple[str, int], Iterator[dict]] = {}
        self._asked = asked_elsewhere()
        known = list(facts("training", world=world))
        self._facts = [row for row in known if row["source"] != "arithmetic"]
        self._sums = [row for row in known if row["source"] == "arithmetic"]

    def ids(self, text: str) -> list[int]:
        """Token ids, without ``<bos>``."""
        return [self._id[piece] for piece in words.pieces(text)]

    def draw(self, family: str, fillers: int = 12, turns: int = 6, bare: bool = False) -> Example:
        """A random example.

        fillers: sentences of filler (in MuSiQue: passages kept besides those with facts).
        turns: question and answer pairs of a parametric or arithmetic example.
        bare: such an example without its instruction and the harness's own examples.
        """
        if family not in RETRIEVAL:
            return self._knowledge(family, turns, bare)
        if family == "musique":
            prompt, answer = self._chain(fillers)
        elif family == "nolima":
            prompt, answer = self._needle(fillers)
        else:
            row = self._row(family, fillers)
            prompt, answer = babilong._prompt(family, row), row["target"]
        tags = family != "nolima"
        wanted = ["<answer>", answer, "</answer>"] if tags else [answer]
        ids = [words.BOS, *self.ids(prompt)]
        start = len(ids)
        ids += [self._id[word] for word in wanted]
        following = [*ids[start:], words.EOS]
        targets = [(start - 1 + i, token) for i, token in enumerate(following)]
        return Example(family, tuple(ids), tuple(targets))

    def _row(self, family: str, fillers: int) -> dict:
        key = (family, fillers)
        if key not in self._rows:
            make = {
                "nolima": lambda: contexts(
                    _ENDLESS,
                    "training",
                    fillers=fillers,
                    excluded=self._asked,
                    world=self.world,
                    seed=self.seed,
                ),
                "musique": lambda: chains(
                    _ENDLESS, 2, "training", world=self.world, seed=self.seed
                ),
            }
            story = lambda: stories(  # noqa: E731
                _ENDLESS, family, "training", fillers=fillers, world=self.world, seed=self.seed
            )
            self._rows[key] = make.get(family, story)()
        return next(self._rows[key])

    def _needle(self, fillers: int) -> tuple[str, str]:
        row = self._row("nolima", fillers)
        # The books have paragraphs of two to six sentences.
        sentences = row["input"].split(". ")
        text = sentences[0]
        for sentence in sentences[1:]:
            text += (".\n" if self.rng.random() < 0.25 else ". ") + sentence
        prompt = nolima.TEMPLATE.replace("{question}", row["question"])
        return prompt.replace("{haystack}", text), row["target"]

    def _chain(self, fillers: int) -> tuple[str, str]:
        row = self._row("musique", 0)
        kept = [p for p in row["paragraphs"] if not p["title"].startswith("The ")]
        plain = [p for p in row["paragraphs"] if p["title"].startswith("The ")]
        dropped = {id(p) for p in self.rng.sample(plain, max(0, len(plain) - fillers))}
        if fillers == 0:  # the shortest form: only some of the chains, no filler after the fact
            answering = {p["paragraph_text"] for p in kept if p["is_supporting"]}
            others = self.rng.sample(kept, self.rng.randint(2, len(kept)))
            dropped |= {
                id(p)
                for p in kept
                if p["paragraph_text"] not in answering and not any(p is q for q in others)
            }
        paragraphs = [p for p in row["paragraphs"] if id(p) not in dropped]
        if fillers == 0:
            paragraphs = [
                {**p, "paragraph_text": p["paragraph_text"].partition(".")[0] + "."}
                for p in paragraphs
            ]
        return musique._prompt(paragraphs, row["question"]), row["answer"]

    def _knowledge(self, family: str, turns: int, bare: bool) -> Example:
        """Turns in a row, the first few at times those that the harness shows as examples."""
        rows = self._sums if family == "arithmetic" else self._facts
        pairs = [(row["question"], row["answer"]) for row in self.rng.choices(rows, k=turns)]
        shown = not bare and self.rng.random() < 0.3
        if shown:
            pairs = [*parametric.EXAMPLES, *pairs[: max(1, turns - 4)]]
        ids, targets = [words.BOS], []
        for number, (question, answer) in enumerate(pairs):
            prompt = parametric.prompt(question)
            ids += self.ids(prompt.removeprefix(parametric.INSTRUCTION) if bare else prompt)
            if not (shown and number < len(parametric.EXAMPLES)):
                targets.append((len(ids) - 1, self._id[answer]))
                targets.append((len(ids), words.EOS))
            ids += self.ids(f" {answer}\n\n")
        return Example(family, tuple(ids), tuple(targets))


def batches(examples: Sequence[Example], tokens: int) -> Iterator[list[Example]]:
    """The examples in groups of about equal length, each of about ``tokens`` padded tokens."""
    group: list[Example] = []
    for example in sorted(examples, key=lambda example: len(example.ids)):
        if group and (len(group) + 1) * len(example.ids) > tokens:
            yield group
            group = []
        group.append(example)
    if group:
        yield group


def tensors(group: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Right-padded ids (B, T), and of every target its row, position and token, each (n,)."""
    ids = torch.zeros(len(group), max(len(example.ids) for example in group), dtype=torch.long)
    rows, places, tokens = [], [], []
    for row, example in enumerate(group):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        for place, token in example.targets:
            rows.append(row)
            places.append(place)
            tokens.append(token)
    return ids, torch.tensor(rows), torch.tensor(places), torch.tensor(tokens)
