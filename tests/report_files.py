"""Results and sample files in the shape that lm_eval 0.4.13 writes, without running a model.

A document's score is decided by a hash of its name against a probability, so that files are the
same every time and a document that is hard stays hard.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

METRIC = {
    "nolima": "contains",
    "musique": "acc",
    "babilong": "acc",
    "parametric": "exact_match",
    "arithmetic": "exact_match",
}
TASK = {
    "nolima": "nolima",
    "musique": "musique",
    "babilong": "locos_babilong_qa2_0k",
    "parametric": "locos_parametric",
    "arithmetic": "locos_arithmetic",
}
BASE = {"nolima": 0.82, "musique": 0.7, "babilong": 0.6, "parametric": 0.75, "arithmetic": 0.9}
LAYERS, HEADS = 12, 8


def uniform(*parts: object) -> float:
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def sha(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def write_ranking(path: Path, method: str = "locos") -> Path:
    """A ranking of 12 x 8 heads, a few of them high."""
    scores = {}
    for layer in range(LAYERS):
        for head in range(HEADS):
            u = uniform(method, layer, head)
            peak = 4 * u**12 * (1.5 if 4 <= layer <= 9 else 0.3)
            scores[f"{layer}-{head}"] = [round(peak + 0.1 * (u - 0.5), 5)] * 3
    path.write_text(json.dumps({"meta": {"method": method, "model": "org/m"}, "scores": scores}))
    return path


def documents(family: str, n: int) -> list[dict]:
    found = []
    for i in range(n):
        doc = {
            "id": f"{family}_{i}",
            "family": family,
            "cluster": f"{family}_{i // 2}",
            "prompt": f"prompt {i}",
            "answers": [f"Answer{i}"],
            "question": f"What is {family} {i}?",
        }
        if family == "nolima":
            doc |= {"length": 1000 + 3750 * (i % 5), "depth": 25.0 * (i // 5 % 5)}
        found.append(doc)
    return found


def sample(doc: dict, metric: str, score: float, response: str | None = None) -> dict:
    right = f"It is {doc['answers'][0]}."
    text = response if response is not None else right if score else "I cannot tell."
    return {
        "doc_id": int(doc["id"].split("_")[-1]),
        "doc": doc,
        "target": str(doc["answers"]),
        "arguments": {"gen_args_0": {"arg_0": doc["prompt"], "arg_1": {}}},
        "resps": [[text]],
        "filtered_resps": [text],
        "filter": "none",
        "metrics": [metric],
        "doc_hash": sha(json.dumps(doc)),
        "prompt_hash": sha(doc["prompt"]),
        "target_hash": sha(doc["answers"]),
        metric: score,
    }


def write_run(
    folder: Path,
    tasks: dict[str, list[dict]],
    *,
    condition: str | None = None,
    ranking: Path | None = None,
    method: str = "locos",
    number: int = 0,
    model: str = "org/model-1b",
    bundled: bool = False,
    samples: bool = True,
    change=lambda content: None,
) -> Path:
    """A results file with its sample files.

    tasks: per family its samples, as `sample` makes them.
    condition: None for a run of ``--model hf``.
    number: makes the date; later runs have higher ones.
    change: edits the results file's content.
    """
    date = f"2026-03-01T10-{number // 60:02d}-{number % 60:02d}.123456"
    folder = folder / model.replace("/", "__")
    folder.mkdir(parents=True, exist_ok=True)
    results, configs, n_samples, hashes, shots = {}, {}, {}, {}, {}
    for family, entries in tasks.items():
        name, metric = TASK.get(family, family), METRIC.get(family, "acc")
        values = [entry[metric] for entry in entries if metric in entry]
        mark = " [bundled sample]" if bundled else ""
        results[name] = {
            "name": name,
            "alias": name + mark,
            "sample_len": len(entries),
            f"{metric},none": sum(values) / len(values),
            f"{metric}_stderr,none": 0.01,
        }
        docs = [entry["doc"] for entry in entries]
        configs[name] = {
            "task": name,
            "metric_list": [{"metric": metric, "aggregation": "mean"}],
            "generation_kwargs": {"do_sample": False, "max_gen_toks": 32},
            "metadata": {
                "version": 1.0,
                "locos_data": {
                    "source": "bundled" if bundled else "hub",
                    "reason": "a test",
                    "revision": "0123abc",
                    "documents": len(docs),
                    "sha256": sha(json.dumps(docs)),
                },
            },
        }
        n_samples[name] = {"original": len(entries), "effective": len(entries)}
        shots[name] = 0
        hashes[name] = sha("".join(e["doc_hash"] + e["prompt_hash"] for e in entries))
        if samples:
            lines = "".join(json.dumps(entry) + "\n" for entry in entries)
            (folder / f"samples_{name}_{date}.jsonl").write_text(lines)
    arguments = {"pretrained": model, "dtype": "bfloat16"}
    config = {
        "model": "hf",
        "model_args": arguments,
        "model_num_parameters": 1_000_000,
        "model_dtype": "torch.bfloat16",
        "model_revision": "main",
        "model_sha": "",
        "batch_size": "8",
        "limit": None,
    }
    if condition is not None:
        kind, _, rest = condition.partition(":")
        k = int(rest.split(":")[0]) if rest and kind != "heads" else 0
        heads = rest.split(";") if kind == "heads" else []
        data = ranking.read_bytes() if ranking else b""
        if ranking and kind == "top":
            scores = json.loads(data)["scores"]
            heads = sorted(scores, key=lambda h: (-scores[h][0], *map(int, h.split("-"))))[:k]
        config["model"] = "locos-ablated"
        config["model_args"] = arguments | {"heads": str(ranking), "num_heads": k}
        config["locos"] = {
            "version": "0.1.0",
            "ranking": ranking
            and {"path": str(ranking), "sha256": hashlib.sha256(data).hexdigest()},
            "method": ranking and method,
            "condition": condition,
            "heads": heads,
            "site": "query",
            "mode": "mean",
            "average": "prompt",
            "seed": 42,
            "calibration": {"nolima": {"prompts": 50, "means_sha256": sha("means")}},
        }
    content = {
        "results": results,
        "group_subtasks": {},
        "configs": configs,
        "versions": dict.fromkeys(results, 1.0),
        "n-shot": shots,
        "higher_is_better": {},
        "n-samples": n_samples,
        "config": config,
        "git_hash": "abc1234",
        "date": 1_790_000_000.0 + number,
        "transformers_version": "5.24.0",
        "lm_eval_version": "0.4.13",
        "task_hashes": hashes if samples else {},
        "model_source": config["model"],
        "model_name": model,
        "model_name_sanitized": model.replace("/", "__"),
        "system_instruction_sha": None,
        "chat_template_sha": sha("template"),
    }
    change(content)
    path = folder / f"results_{date}.json"
    path.write_text(json.dumps(content, indent=2))
    return path


def binary(family: str, n: int, share: float, salt: object = "") -> list[dict]:
    """`n` documents of which about `share` are right; `salt` moves some of them."""
    found = []
    for doc in documents(family, n):
        u = 0.85 * uniform(doc["id"]) + 0.15 * uniform(doc["id"], salt)
        far = doc.get("length", 0) / 16000 * 0.25
        found.append(sample(doc, METRIC[family], float(u < share - far)))
    return found


def study(
    folder: Path,
    *,
    ks: tuple[int, ...] = (10, 20, 50),
    methods: tuple[str, ...] = ("locos", "wu"),
    seeds: int = 10,
    n: int = 50,
    bundled: bool = False,
    models: tuple[str, ...] = ("org/model-1b",),
) -> Path:
    """A whole study: a baseline, `ks` of each ranking, and random controls of `seeds` seeds."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    rankings = {m: write_ranking(folder / f"{m}.json", m) for m in methods}
    out = folder / "out"
    for model in models:
        shared = {"bundled": bundled, "model": model}

        def tasks(factor, salt):
            return {
                family: binary(family, n, share * factor(family), salt)
                for family, share in BASE.items()
            }

        write_run(out, tasks(lambda f: 1.0, "base"), number=number, **shared)
        for method in methods:
            strength = 1.0 if method == "locos" else 0.5
            for k in ks:
                for condition in (f"top:{k}", *(f"layer-random:{k}:{s}" for s in range(seeds))):
                    number += 1
                    hurt = strength if condition.startswith("top") else 0.08
                    loss = hurt * (1 - 2.718 ** (-k / 20))

                    def factor(family, loss=loss):
                        return 1 - loss if family in ("nolima", "musique", "babilong") else 1.0

                    write_run(
                        out,
                        tasks(factor, condition),
                        condition=condition,
                        ranking=rankings[method],
                        method=method,
                        number=number,
                        **shared,
                    )
    return out
