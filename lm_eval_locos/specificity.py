"""The harness task ``locos_specificity``: do these heads retrieve, and do nothing else?

    lm_eval --model locos-ablated --model_args pretrained=MODEL,heads=ranking.json,num_heads=20 \\
            --tasks locos_specificity --metadata '{"per_family": 100}'

One task holds documents of all five families. Each is answered under every condition (nothing
ablated, the top k heads, and k random heads with as many per layer, ten times), so that
`process_results` sees all answers to a document and the harness's own table shows specificity with
its standard error (`specificity_numbers` says what is in it).

Documents, prompts, examples, stop strings and scores are those of the families' own tasks, which
this task loads and asks: an answer here is the one that the task alone would get.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from itertools import zip_longest
from typing import Any

from lm_eval.api.instance import Instance

from lm_eval_locos import tasks_dir
from lm_eval_locos.conditions import REQUEST_KEY
from lm_eval_locos.errors import SKIPPED, DataError
from lm_eval_locos.families.documents import Documents, package, sha256_of
from lm_eval_locos.families.scoring import strip_thinking
from lm_eval_locos.families.task import LocosTask
from lm_eval_locos.specificity_numbers import Number, metrics, summarise
from lm_eval_locos.specificity_plan import MEMBERS, Plan

_log = logging.getLogger(__name__)

RESULTS_KEY = "locos_specificity"
"""The key in the task's metadata, in the results file's ``configs``, that holds the plan and all
statistics."""

_MODEL_MODULE = "lm_eval_locos.model"


class SpecificityDocuments(Documents):
    """`Documents` with the tasks that they are from."""

    plan: Plan
    members: dict[str, LocosTask]


def load(**kwargs: Any) -> SpecificityDocuments:
    """The documents of all families in turn, so that ``--limit`` takes of each.

    Args:
        **kwargs: see `Plan`; the rest (the model's arguments, lengths, depths) goes to the
            families' own loaders.

    Raises:
        DataError: wrong metadata, or whatever a family's loader has to say.
    """
    from lm_eval.tasks import TaskManager

    plan = Plan.of(kwargs)
    ours = (*Plan.KEYS, "version", "config_source")
    manager = TaskManager(
        include_path=tasks_dir(),
        include_defaults=False,
        metadata={key: value for key, value in kwargs.items() if key not in ours},
    )
    tasks = manager.load([MEMBERS[family].task for family in plan.families])["tasks"]
    members = {family: tasks[MEMBERS[family].task] for family in plan.families}
    chosen = [_documents(family, task, plan) for family, task in members.items()]
    documents = [doc for turn in zip_longest(*chosen) for doc in turn if doc is not None]
    packed = package(
        documents, _source(members), split="evaluation", per_family=plan.per_family or "all"
    )
    found = SpecificityDocuments(packed["test"], packed.provenance)
    found.plan, found.members = plan, members
    return found


def _documents(family: str, task: LocosTask, plan: Plan) -> list[dict[str, Any]]:
    """What all families' documents have, and the number of the document in its own task."""
    rows = task.test_docs()
    count = min(len(rows), plan.documents(family) or len(rows))
    numbers = _spread(len(rows))[:count] if MEMBERS[family].spread else range(count)
    kept = ("id", "family", "cluster", "prompt", "answers", "question")
    return [
        {key: row[key] for key in kept} | {"task": MEMBERS[family].task, "number": n}
        for n in numbers
        for row in [rows[n]]
    ]


def _spread(size: int) -> list[int]:
    """0 .. size - 1 in steps of the golden section: any beginning is spread over the whole."""
    step = next(n for n in range(max(1, round(size * 0.618)), 2 * size) if math.gcd(n, size) == 1)
    return [n * step % size for n in range(size)]


def _source(members: Mapping[str, LocosTask]) -> dict[str, Any]:
    """Bundled as soon as one family is, so that the task is marked."""
    kinds = sorted({task.provenance["source"] for task in members.values()})
    source = "bundled" if "bundled" in kinds else kinds[0] if len(kinds) == 1 else "mixed"
    return {
        "source": source,
        "families": {family: task.provenance for family, task in members.items()},
    }


class SpecificityTask(LocosTask):
    """Asks each document under every condition, and aggregates over all documents at once."""

    def __init__(
        self,
        data_dir: str | None = None,
        cache_dir: str | None = None,
        download_mode: Any = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(data_dir, cache_dir, download_mode, config)
        self.plan: Plan = self.dataset.plan
        self.members: dict[str, LocosTask] = self.dataset.members
        self._yaml_kwargs = deepcopy(self.config.generation_kwargs)
        self._numbers: Mapping[str, Number] = {}
        families = {
            family: {
                "task": MEMBERS[family].task,
                "side": MEMBERS[family].side,
                "metric": MEMBERS[family].metric,
                "floor": MEMBERS[family].floor,
                "num_fewshot": task.config.num_fewshot,
                "generation_kwargs": task.config.generation_kwargs,
            }
            for family, task in self.members.items()
        }
        self._record({"k": self.plan.k, "conditions": [*self.plan.conditions]})
        self._record({"families": families})

    def _record(self, found: Mapping[str, Any]) -> None:
        """Adds to what the results file says; the harness dumps metadata after aggregation."""
        before = self.config.metadata.get(RESULTS_KEY, {})
        self.config.metadata = {**self.config.metadata, RESULTS_KEY: {**before, **found}}

    # -- requests --------------------------------------------------------------------------

    def build_all_requests(self, *, tokenizer_name: str = "", **kwargs: Any) -> None:
        """As `LocosTask`; with --cache_requests the key carries the conditions as well.

        Raises:
            DataError: no model of the type ``locos-ablated`` can be at work. Another one would
                refuse the conditions in words of its own, or ignore them and show no drop.
        """
        if _MODEL_MODULE not in sys.modules:
            raise DataError(
                f"task {self.config.task}: the model does not ablate heads, so it cannot answer "
                "under conditions. Use --model locos-ablated --model_args "
                f"pretrained=MODEL,heads=ranking.json,num_heads={self.plan.k}"
            )
        asked = [self.plan.conditions, *map(self._generation_kwargs, self.plan.families)]
        name = f"{tokenizer_name}-conditions{sha256_of(asked)[:16]}"
        super().build_all_requests(tokenizer_name=name, **kwargs)

    def set_fewshot_seed(self, seed: int | None = None) -> None:
        """Passes the seed on to the families' tasks."""
        super().set_fewshot_seed(seed)
        for member in self.members.values():
            member.set_fewshot_seed(seed)

    def fewshot_context(self, doc: dict[str, Any], num_fewshot: int, **kwargs: Any) -> Any:
        """The prompt that the family's own task builds, with the examples that it gives."""
        member = self.members[doc["family"]]
        shots = member.config.num_fewshot or 0
        return member.fewshot_context(self._own(doc), num_fewshot=shots, **kwargs)

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        """One request a condition, in the plan's order."""
        asked = {key: kwargs[key] for key in ("metadata",) if key in kwargs}
        generation = self._generation_kwargs(doc["family"])
        return [
            Instance(
                request_type=self.OUTPUT_TYPE,
                doc=doc,
                arguments=(ctx, deepcopy(generation) | {REQUEST_KEY: condition}),
                idx=idx,
                **asked,
            )
            for idx, condition in enumerate(self.plan.conditions)
        ]

    def _generation_kwargs(self, family: str) -> dict[str, Any]:
        """The family's, with what --gen_kwargs changes."""
        changed = {
            key: value
            for key, value in self.config.generation_kwargs.items()
            if key not in self._yaml_kwargs or self._yaml_kwargs[key] != value
        }
        return {**self.members[family].config.generation_kwargs, **changed}

    def _own(self, doc: Mapping[str, Any]) -> dict[str, Any]:
        """The document as the family's own task has it."""
        return self.members[doc["family"]].test_docs()[doc["number"]]

    # -- results ---------------------------------------------------------------------------

    def process_results(self, doc: dict[str, Any], results: list[Any]) -> dict[str, Any]:
        """The document's record under the first metric, from which all numbers are computed.

        Adds to ``doc``, for the logged samples, the answer and the score under each condition;
        both are None where the request was skipped.
        """
        member, own = self.members[doc["family"]], self._own(doc)
        metric = MEMBERS[doc["family"]].metric
        found = {
            condition: {
                "answer": None if response == SKIPPED else strip_thinking(response),
                "score": member.process_results(own, [response]).get(metric),
            }
            for condition, response in zip(self.plan.conditions, results, strict=True)
        }
        doc["locos"] = {"metric": metric, "conditions": found}
        record = {
            "id": doc["id"],
            "family": doc["family"],
            "cluster": doc["cluster"],
            "scores": {condition: one["score"] for condition, one in found.items()},
            "changed": len({one["answer"] for one in found.values()}) > 1,
        }
        first, *others = self.aggregation()
        return {first: record, **dict.fromkeys(others)}

    def aggregation(self) -> dict[str, Callable[[list[Any]], Number]]:
        """A function a metric; the first computes, the others look up."""
        if "bypass" in self._metric_fn_list:  # --predict_only
            return super().aggregation()
        return {name: partial(self._number, name) for name in metrics(self.plan.families)}

    def higher_is_better(self) -> dict[str, bool]:
        """Of the metrics that have a better side."""
        known = metrics(self.plan.families)
        return {name: better for name, better in known.items() if better is not None}

    def _number(self, name: str, values: list[Any]) -> Number:
        if name == "specificity":  # the harness aggregates in the order of process_results
            summary = summarise(values, self.plan.families, self.plan.conditions)
            for remark in summary.remarks():
                _log.warning("%s: %s", self.config.task, remark)
            self._record(summary.as_dict())
            self._numbers = summary.numbers
        return self._numbers[name]
