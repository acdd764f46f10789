"""What locos-mini is measured on: evaluation documents of the tasks, and trials for detection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lm_eval_locos.detection.batches import Trial
from lm_eval_locos.detection.prompts import tokenised
from lm_eval_locos.families import arithmetic, babilong, musique, nolima, parametric
from lm_eval_locos.sources.synthetic.babilong import babilong as stories
from lm_eval_locos.sources.synthetic.musique import musique as chains
from lm_eval_locos.sources.synthetic.nolima import nolima as contexts

_TAGGED = ("</answer>", "\nQuestion:")
_LINE = ("\n",)


@dataclass(frozen=True)
class Task:
    """How a task's documents are made, stopped and scored.

    Attributes:
        load: called with the tokenizer.
        score: the family's.
        metric: its name.
        stops: the strings that end an answer, as in the task's YAML file.
        shots: whether the harness shows its four examples first.
    """

    load: Callable[[Any], Any]
    score: Callable[[dict[str, Any], str], dict[str, float]]
    metric: str
    stops: tuple[str, ...]
    shots: bool = False


DOCUMENTS = {
    "nolima": Task(lambda t: nolima.load(tokenizer=t), nolima.score, "contains", _LINE),
    "musique": Task(lambda t: musique.load(hops=2), musique.score, "acc", _TAGGED),
    "qa1": Task(lambda t: babilong.load("qa1", "0k"), babilong.score, "acc", _TAGGED),
    "qa2": Task(lambda t: babilong.load("qa2", "0k"), babilong.score, "acc", _TAGGED),
    "parametric": Task(
        lambda t: parametric.load(), parametric.score, "exact_match", _LINE, shots=True
    ),
    "arithmetic": Task(
        lambda t: arithmetic.load(), arithmetic.score, "exact_match", _LINE, shots=True
    ),
}
GUESS = {"nolima": 1 / 7, "musique": 1 / 6, "qa1": 1 / 6, "qa2": 1 / 6}


@dataclass(frozen=True)
class Document:
    """A prompt as the harness sends it."""

    family: str
    prompt: str
    task: str
    row: dict[str, Any]

    def score(self, text: str) -> dict[str, float]:
        """The family's scores of a generation, cut at the task's stop strings."""
        task = DOCUMENTS[self.task]
        for stop in task.stops:
            text = text.partition(stop)[0]
        return task.score(self.row, text)


def load(name: str, tokenizer: Any) -> list[Document]:
    """The evaluation documents of a task."""
    task = DOCUMENTS[name]
    examples = "".join(
        f"{parametric.prompt(question)} {answer}\n\n" for question, answer in parametric.EXAMPLES
    )
    return [
        Document(row["family"], (examples if task.shots else "") + row["prompt"], name, row)
        for row in task.load(tokenizer)["test"]
    ]


@torch.no_grad()
def answers(
    model: Any, tokenizer: Any, documents: Sequence[Document], *, longest: int = 8, size: int = 16
) -> list[str]:
    """Greedy generations, batched with padding on the left."""
    ids = [tokenizer(document.prompt).input_ids for document in documents]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = [""] * len(ids)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        width = max(len(ids[i]) for i in rows)
        batch = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(batch)
        for row, i in enumerate(rows):
            batch[row, width - len(ids[i]) :] = torch.tensor(ids[i])
            mask[row, width - len(ids[i]) :] = 1
        out = model.generate(
            input_ids=batch, attention_mask=mask, max_new_tokens=longest, do_sample=False
        )
        for row, i in enumerate(rows):
            found[i] = tokenizer.decode(out[row, width:], skip_special_tokens=True)
    return found


def trials(tokenizer: Any, each: int) -> list[tuple[str, Trial]]:
    """(id, trial) of the detection part, ``each`` of every retrieval family; the needle is the
    sentence that holds the answer."""
    found = []

    def add(name: str, prompt: str, needle: str, gold: str) -> None:
        start = prompt.rindex(needle)
        span = (start, start + len(needle))
        trial = tokenised(tokenizer, prompt, span, gold, chat_template=False)
        found.append((name, trial))

    for number, row in enumerate(contexts(each, "detection", fillers=20)):
        prompt = nolima.TEMPLATE.replace("{question}", row["question"])
        prompt = prompt.replace("{haystack}", row["input"])
        add(f"nolima_{number}", prompt, row["needles"][0], row["target"])
    for row in chains(each, 2, "detection"):
        person = row["question_decomposition"][-1]["question"].split()[0]
        prompt = musique._prompt(row["paragraphs"], row["question"])
        add(row["id"], prompt, f"{person} lives in {row['answer']}.", row["answer"])
    for task in ("qa1", "qa2"):
        for number, row in enumerate(stories(each // 2, task, "detection")):
            needle = next(n for n in reversed(row["needles"]) if row["target"] in n)
            add(f"{task}_{number}", babilong._prompt(task, row), needle, row["target"])
    return found
