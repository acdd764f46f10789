"""Measures everything that locos-mini promises and prints it as a table.

    python examples/mini/check.py lm_eval_locos/data/mini --draws 50

What is asked: the bundled sample's evaluation documents, as the tasks ask them. What is ablated:
heads' queries, by their mean over each family's own calibration prompts. The ranking is made on the
detection part of the same generators and written next to the model with ``--write``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from documents import DOCUMENTS, GUESS, answers, load, trials
from plant import ANSWER_HEADS, DECOY, FIRST_HOP
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_eval_locos import __version__
from lm_eval_locos.ablation import ablate
from lm_eval_locos.architecture import Head, describe
from lm_eval_locos.cache import model_identity
from lm_eval_locos.calibration import Calibration, calibrate, constants
from lm_eval_locos.detection import rankings
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.families import calibration_prompts
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.sources.synthetic.text import SEED

RETRIEVAL = ("nolima", "musique", "qa1", "qa2")
SUMS = "SHA256SUMS"
METHODS = ("locos", "dla", "attention_spatial", "wu", "contrastive", "headkv")


class Bench:
    """A model with the documents and the calibration of every task.

    Args:
        folder: the checkpoint.
        most: documents of a task.
    """

    def __init__(self, folder: str, most: int | None = None) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.documents = {task: load(task, self.tokenizer)[:most] for task in DOCUMENTS}
        self.architecture = describe(self.model)
        self.means: dict[str, Calibration] = {}
        for family in {documents[0].family for documents in self.documents.values()}:
            turns, _ = calibration_prompts(family, tokenizer=self.tokenizer)
            ids = [self.tokenizer(turn).input_ids for turn in turns]
            self.means[family] = calibrate(
                self.model, ids, site="query", batch_size=8, progress=False
            )

    def run(
        self, heads: Iterable[Head] = (), most: int | None = None, tasks: Iterable[str] = DOCUMENTS
    ) -> dict[str, dict[str, float]]:
        """The tasks' mean scores with these heads ablated."""
        found = {}
        for task in tasks:
            chosen = self.documents[task][:most]
            values = constants(self.means[chosen[0].family], heads, mode="mean", seed=0)
            with ablate(self.model, values, architecture=self.architecture):
                texts = answers(self.model, self.tokenizer, chosen)
            scored = [doc.score(text) for doc, text in zip(chosen, texts, strict=True)]
            found[task] = {key: sum(s[key] for s in scored) / len(scored) for key in scored[0]}
        return found


def main_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Each task's own score."""
    return {task: scores[task][DOCUMENTS[task].metric] for task in scores}


def detected(bench: Bench, each: int) -> dict[str, HeadRanking]:
    """Rankings by every method over trials of all retrieval families."""
    engine = Engine(bench.model, bench.tokenizer, methods=METHODS)
    probes = trials(bench.tokenizer, each)
    names = [name for name, _ in probes]
    by_index = dict(engine.run_all([trial for _, trial in probes]))
    results = [by_index[i] for i in range(len(probes))]
    text = json.dumps([[name, trial.ids, trial.needle, trial.gold] for name, trial in probes])
    meta = {
        "model": "locos-mini",
        "revision": None,
        "dtype": "float32",
        "fingerprint": bench.architecture.fingerprint,
        "model_identity": model_identity(bench.model),
        "dataset": "generators of the bundled sample: nolima, musique (2 hops), babilong qa1, qa2",
        "split": "detection",
        "seed": SEED,
        "k": len(ANSWER_HEADS),  # what num_heads defaults to
        "chat_template": False,
        "trials_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "data": {"source": "bundled", "trials_of_each_family": each},
        "plugin_version": __version__,
        "versions": rankings.versions(),
    }
    layers = tuple(bench.architecture.layers)
    return {method: rankings.ranking(method, layers, names, results, meta) for method in METHODS}


def write(folder: Path, ranking: HeadRanking) -> None:
    """Writes ``locos.json`` and the hashes of everything in the folder."""
    ranking.save(folder / "locos.json")
    files = sorted(path for path in folder.iterdir() if path.name != SUMS)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(sums), encoding="utf-8")


def table(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Rows of scores, as Markdown."""
    tasks = list(rows[0][1])
    lines = [f"| condition | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    lines += [
        f"| {name} | {' | '.join(f'{values[task]:.3f}' for task in tasks)} |"
        for name, values in rows
    ]
    return "\n".join(lines)


def losses(base: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    """The part of each retrieval task's distance from guessing to baseline that is lost."""
    return {t: (base[t] - other[t]) / (base[t] - GUESS[t]) for t in RETRIEVAL}


def mean_loss(base: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Mean over the retrieval tasks of the relative drop."""
    return sum((base[t] - other[t]) / base[t] for t in RETRIEVAL) / len(RETRIEVAL)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Measures locos-mini.")
    parser.add_argument("model")
    parser.add_argument("--documents", type=int, help="most of each task (default: all)")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--draw-documents", type=int, default=24)
    parser.add_argument("--trials", type=int, default=40, help="of each retrieval family")
    parser.add_argument("--write", type=Path, help="folder for locos.json and hashes")
    arguments = parser.parse_args()
    os.environ["LOCOS_DATA"] = "bundled"  # the model is made for the bundled sample
    torch.set_grad_enabled(False)
    start = time.time()
    bench = Bench(arguments.model, arguments.documents)
    print({task: len(documents) for task, documents in bench.documents.items()}, flush=True)
    found = detected(bench, arguments.trials)
    locos, spatial = found["locos"], found["attention_spatial"]
    k = len(ANSWER_HEADS)
    planted = {Head(*head) for head in ANSWER_HEADS}
    print(f"trials passed {locos.meta['num_trials_passed']}/{locos.meta['num_trials_total']}")
    for method, ranking in found.items():
        print(method, [(str(h), round(ranking.pooled[h], 3)) for h in ranking.order[: k + 4]])
    print("first k are the planted ones:", set(locos.top(k)) == planted)
    print("last:", [(str(h), round(locos.pooled[h], 4)) for h in locos.bottom(k + 4)])
    print("first hop:", {str(Head(*h)): round(locos.pooled[Head(*h)], 4) for h in FIRST_HOP})
    decoy = Head(*DECOY)
    print(
        f"decoy {decoy}: LOCOS {locos.pooled[decoy]:.4f}, attention-spatial "
        f"{spatial.pooled[decoy]:.3f}, rank {spatial.order.index(decoy) + 1}, "
        f"in its top {k}: {decoy in spatial.top(k)}",
        flush=True,
    )
    if arguments.write:
        write(arguments.write, locos)
    full = bench.run()
    base = main_scores(full)
    rows = [("baseline", base)]
    ablated = bench.run(locos.top(k))
    rows.append((f"top {k}", main_scores(ablated)))
    rows.append((f"bottom {k}", main_scores(bench.run(locos.bottom(k)))))
    rows.append(("first hop", main_scores(bench.run([Head(*head) for head in FIRST_HOP]))))
    print(table(rows), flush=True)
    print("NoLiMa ROUGE-L", full["nolima"]["rouge_l"], "->", ablated["nolima"]["rouge_l"])
    lost = {task: round(value, 3) for task, value in losses(base, rows[1][1]).items()}
    print("lost of the distance from guessing:", lost, flush=True)
    few = arguments.draw_documents
    small = main_scores(bench.run(most=few, tasks=RETRIEVAL))
    population = bench.architecture.heads
    for matched in (True, False):
        draws = []
        for seed in range(arguments.draws):
            heads = locos.random(k, seed, population, match_layers=matched)
            draws.append((main_scores(bench.run(heads, most=few, tasks=RETRIEVAL)), heads))
        mean = {t: sum(d[t] for d, _ in draws) / len(draws) for t in small}
        worst = max(draws, key=lambda draw: mean_loss(small, draw[0]))
        name = "same layers" if matched else "any layer"
        lost_mean = sum(mean_loss(small, d) for d, _ in draws) / len(draws)
        print(table([("baseline (few)", small), (f"random, {name}, mean", mean)]))
        print(
            f"{name}: mean retrieval loss {lost_mean:.3f}, worst "
            f"{mean_loss(small, worst[0]):.3f} ({', '.join(map(str, worst[1]))})",
            flush=True,
        )
    print(f"{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
