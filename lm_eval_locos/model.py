"""The harness model type ``locos-ablated``: HFLM with heads ablated while requests run.

    lm_eval --model locos-ablated \\
      --model_args pretrained=MODEL,heads=ranking.json,num_heads=20 --tasks nolima,musique

Every HFLM argument keeps working. `LocosAblatedLM.__init__` lists the others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm.auto import tqdm

from lm_eval_locos import __version__
from lm_eval_locos.ablation import ablate, refuse_compiled
from lm_eval_locos.architecture import SITES, Head, Site, describe
from lm_eval_locos.bundled import MINI, MINI_NAME, bundled_ranking, resolve, run_unnamed
from lm_eval_locos.cache import model_identity
from lm_eval_locos.calibration import AVERAGES, MODES, Average, Mode, constants
from lm_eval_locos.calibrations import Calibrations
from lm_eval_locos.conditions import REQUEST_KEY, Condition
from lm_eval_locos.errors import (
    SKIPPED,
    DataError,
    LocosError,
    ModelError,
    install_excepthook,
)
from lm_eval_locos.families import FAMILIES
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.settings import (
    Overlength,
    Select,
    check,
    condition_of,
    count,
    ranking_of,
    recorded_k,
)

CACHE_KEY = "locos_ablation"
"""Key under which ``--use_cache`` databases carry the identity of the ablation."""

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
install_excepthook()


class _Setting(NamedTuple):
    """What decides how a request is ablated; requests of one setting run together."""

    condition: Condition
    family: str | None  # whose calibration prompts the means come from; None: of all families
    templated: bool  # whether prompts went through the chat template


class LocosAblatedLM(HFLM):
    """A Hugging Face causal language model with attention heads ablated."""

    def __init__(
        self,
        pretrained: Any = None,
        *,
        heads: str | HeadRanking | None = None,
        num_heads: int | None = None,
        select: Select = "top",
        head_list: str | Sequence[str] | None = None,
        seed: int = 42,
        site: Site = "query",
        mode: Mode = "mean",
        calibration: str = "auto",
        num_calibration: int = 50,
        average: Average = "prompt",
        on_overlength: Overlength = "error",
        **kwargs: Any,
    ) -> None:
        """Loads the model and chooses the heads; means are measured when first needed.

        Args:
            pretrained: as for HFLM; default ``locos-mini``, the small model in the package.
            heads: the ranking: a path, ``hf://datasets/OWNER/REPO/PATH.json`` or a `HeadRanking`;
                default: the one bundled for this model, if any.
            num_heads: k, how many heads are ablated; 0 is the baseline. Default: what the ranking
                records, else 50.
            select: ``top`` or ``bottom`` k of the ranking, k ``random`` heads without the top k,
                the same with as many per layer as the top k has (``layer-random``), or ``list``.
            head_list: the heads of ``select=list``, such as ``3-1;7-2``.
            seed: of random heads, of resampling and of the calibration prompts.
            site: ``query`` (the slice of q_proj's output) or ``output`` (of o_proj's input).
            mode: ``mean``, ``zero`` or ``resample``.
            calibration: ``auto`` (each task's own family; all five for other tasks), a family's
                name, or a file of prompts (text, one a line, or JSONL with ``text``).
            num_calibration: how many calibration prompts.
            average: mean over tokens per ``prompt`` and then over prompts, or over every ``token``.
            on_overlength: what to do with a prompt that would be cut: ``error``, ``skip`` (counted
                and reported, tasks of this package leave it out) or ``truncate`` (as ``hf`` does).
            **kwargs: everything HFLM takes.

        Raises:
            LocosError: a missing or wrong argument, a ranking that does not fit the model, or a
                model that is not supported.
        """
        self.label = str(getattr(pretrained, "name_or_path", pretrained or MINI_NAME))
        run_unnamed(str(MINI) if pretrained is None else None)
        pretrained = resolve(pretrained)
        check("site", site, SITES)
        check("mode", mode, MODES)
        check("average", average, AVERAGES)
        check("on_overlength", on_overlength, get_args(Overlength))
        self.site, self.mode = site, mode
        self.on_overlength, self.seed = on_overlength, count("seed", seed)
        num_calibration = count("num_calibration", num_calibration, least=1)
        self.calibrations = Calibrations(self, str(calibration), num_calibration, average)
        self.ranking = ranking_of(
            heads,
            bundled_ranking(pretrained, kwargs.get("gguf_file")),
            needed=select != "list" and num_heads != 0,
        )
        k = recorded_k(self.ranking) if num_heads is None else count("num_heads", num_heads)
        self.condition = condition_of(select, k, head_list, self.seed)

        # HFLM's own default fails without a GPU; an empty name takes one where there is one.
        kwargs["device"] = kwargs.get("device") or ""
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ModelError(
                f"pretrained={pretrained} is a {self.backend} model. locos-ablated works on "
                "decoder-only (causal) models."
            )
        self.architecture = describe(self.model, tensor_parallel=True)
        if isinstance(pretrained, str):
            self._check_processes()
        refuse_compiled(self.model)
        self.ablate_as(self.condition, self.ranking)

    def _check_processes(self) -> None:
        """Raises LocosError where every process would run every request, as HFLM does on CPUs."""
        started = int(os.environ.get("WORLD_SIZE", "1"))
        if started > 1 and self.world_size == 1 and self.architecture.ranks == 1:
            raise LocosError(
                f"{started} processes were started, and without as many GPUs the harness would "
                "have each of them run every request. Start one process (no torchrun or accelerate "
                "launch), or one for each of several GPUs."
            )

    def ablate_as(self, condition: Condition, ranking: HeadRanking | None) -> None:
        """Changes the default condition and the ranking. Means that were measured are kept.

        Raises:
            LocosError: the ranking does not fit the model or the condition.
        """
        if ranking is not None:
            ranking.check_fits(self.architecture.fingerprint)
        self.condition, self.ranking = condition, ranking
        self.heads: dict[Condition, tuple[Head, ...]] = {}
        self.skipped: Counter[str] = Counter()
        self._select(condition)

    # -- running requests ------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As HFLM, each request under its condition; see ``on_overlength`` for long prompts."""
        long = set(self._too_long(requests))
        fits = [request for i, request in enumerate(requests) if i not in long]
        answers = iter(self._ablated(fits, super().generate_until, disable_tqdm))
        return [SKIPPED if i in long else next(answers) for i in range(len(requests))]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """As HFLM, under the default condition."""
        return self._ablated(requests, super().loglikelihood, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """As HFLM, under the default condition."""
        return self._ablated(requests, super().loglikelihood_rolling, disable_tqdm)

    def _model_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.pop(REQUEST_KEY, None)  # the harness keeps it in its cache key up to here
        # With a static cache transformers would compile the model past our hooks.
        return super()._model_generate(*args, disable_compile=True, **kwargs)

    def _ablated(
        self, requests: list[Instance], run: Callable[..., list[_T]], disable_tqdm: bool
    ) -> list[_T]:
        """``run`` on groups of requests with the same setting; answers in the order of requests."""
        groups: dict[_Setting, list[int]] = defaultdict(list)
        suffix = self._template_suffix()
        for i, request in enumerate(requests):
            groups[self._setting(request, suffix)].append(i)
        if len(groups) > 1 and self.world_size > 1 and self.batch_size == "auto":
            raise LocosError(
                f"batch_size=auto with {self.world_size} processes and {len(groups)} kinds of "
                "requests could wait for ever. Give a number as batch size."
            )
        for setting in groups:  # a draw that is impossible fails before any work is done
            self._select(setting.condition)
        answers: dict[int, _T] = {}
        # One bar over all groups, in the place of a bar for each.
        alone = len(groups) == 1
        hidden = alone or disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), desc="Running requests", disable=hidden) as bar:
            for setting, rows in groups.items():
                bar.set_postfix_str(str(setting.condition), refresh=False)
                with self._hooks(setting):
                    chosen = [requests[i] for i in rows]
                    results = run(chosen, disable_tqdm=disable_tqdm or not alone)
                answers.update(zip(rows, results, strict=True))
                bar.update(len(rows))
        return [answers[i] for i in range(len(requests))]

    def _setting(self, request: Instance, suffix: str) -> _Setting:
        kwargs = request.args[1] if len(request.args) > 1 else None
        text = kwargs.get(REQUEST_KEY) if isinstance(kwargs, dict) else None
        condition = Condition.parse(text) if text else self.condition
        family = request.doc.get("family") if isinstance(request.doc, dict) else None
        templated = bool(suffix) and suffix in request.args[0]
        return _Setting(condition, family if family in FAMILIES else None, templated)

    @contextmanager
    def _hooks(self, setting: _Setting) -> Iterator[None]:
        """Ablates as ``setting`` says while requests run, and makes sure that it happened."""
        heads = self._select(setting.condition)
        values = {}
        if heads and self.mode == "zero":
            size = self.architecture.slices(self.site).size
            values = {head: torch.zeros(size) for head in heads}
        elif heads:
            calibration, _ = self.calibrations.get(setting.family, setting.templated)
            values = constants(calibration, heads, mode=self.mode, seed=self.seed)
        with ablate(self.model, values, site=self.site, architecture=self.architecture) as ablation:
            yield
        if heads and not ablation.fired:
            raise ModelError(
                f"{len(heads)} heads were to be ablated but no hook ran. Is the model compiled, or "
                "does it run in another process?"
            )

    def _select(self, condition: Condition) -> tuple[Head, ...]:
        if condition not in self.heads:
            chosen = condition.select(self.ranking, self.architecture.heads)
            self.architecture.check_heads(chosen)
            self.heads[condition] = chosen
        return self.heads[condition]

    def _template_suffix(self) -> str:
        """What the chat template puts between a user turn and the answer; empty without one."""
        if self.tokenizer.chat_template is None:
            return ""
        mark = "<locos-user-turn>"
        return self.apply_chat_template([{"role": "user", "content": mark}]).rpartition(mark)[2]

    # -- prompts that do not fit -----------------------------------------------------------

    def _too_long(self, requests: Sequence[Instance]) -> list[int]:
        """Indices of the requests to skip; raises or warns instead as ``on_overlength`` says."""
        long = []
        for i, request in enumerate(requests):
            context, kwargs = request.args[0], dict(request.args[1])
            answer = normalize_gen_kwargs(kwargs, self.max_gen_toks)["max_gen_toks"]
            room = self.max_length - answer
            # A token is at least one byte, so most prompts need no tokenising here.
            if len(context.encode()) < room or (length := len(self.tok_encode(context))) <= room:
                continue
            if self.on_overlength == "error":
                where = f"task {request.task_name}, document {request.doc_id}"
                if room <= 0:
                    raise DataError(
                        f"{where}: the answer may have {answer} tokens, and the model takes "
                        f"{self.max_length} with the prompt. Use a larger max_length, or fewer "
                        "tokens of answer (--gen_kwargs max_gen_toks=...)."
                    )
                raise DataError(
                    f"{where}: the prompt has {length} tokens and the model takes {room} "
                    f"({self.max_length} less {answer} for the answer); cutting it would remove "
                    "the instruction or the needle. Use shorter contexts (--metadata "
                    "'{\"lengths\": [...]}'), a larger max_length, or on_overlength=skip or "
                    "truncate in --model_args."
                )
            long.append(i)
        if long and self.on_overlength == "truncate":
            _log.warning("%d prompts are too long and are cut on the left", len(long))
            return []
        tasks = Counter(str(requests[i].task_name) for i in long)
        self.skipped.update(tasks)
        for task, number in tasks.items():
            _log.warning("%s: %d prompts are too long and are skipped", task, number)
        return long

    # -- provenance and the response cache -------------------------------------------------

    def get_model_info(self) -> dict[str, Any]:
        """HFLM's, plus ``locos``: everything needed to repeat the ablation."""
        ranking = self.ranking
        return super().get_model_info() | {
            "locos": {
                "version": __version__,
                "model": self.label,
                "ranking": ranking and {"path": ranking.path, "sha256": ranking.sha256},
                "method": ranking and ranking.method,
                "condition": str(self.condition),
                "heads": [str(head) for head in self._select(self.condition)],
                "conditions": {str(c): [str(h) for h in heads] for c, heads in self.heads.items()},
                "site": self.site,
                "mode": self.mode,
                "average": self.calibrations.average,
                "seed": self.seed,
                "calibration": self.calibrations.provenance(),
                "on_overlength": self.on_overlength,
                "skipped": dict(self.skipped),
                "model_identity": self.identity,
                "fingerprint": self.architecture.fingerprint,
            }
        }

    @cached_property
    def identity(self) -> str:
        """A hash of the model's weights."""
        return model_identity(self.model)

    def cache_identity(self) -> str:
        """What answers depend on besides the request: the identity of a ``--use_cache`` file."""
        return json.dumps(
            {
                "model": self.identity,
                "ranking": self.ranking and self.ranking.to_json(),
                "condition": str(self.condition),
                "site": self.site,
                "mode": self.mode,
                "seed": self.seed,
                **self.calibrations.identity(),
            },
            sort_keys=True,
        )

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Refuses a response cache that was written under another ablation, or none."""
        if (answers := cache_hook.dbdict) is not None:
            if self.architecture.ranks > 1:
                raise LocosError(
                    f"--use_cache with tensor parallelism on {self.architecture.ranks} processes: "
                    "they would share one file, and one that finds an answer there would leave the "
                    "others waiting. Leave --use_cache out."
                )
            identity = hashlib.sha256(self.cache_identity().encode()).hexdigest()
            found = answers.get(CACHE_KEY)
            if found != identity and len(answers):
                raise LocosError(
                    f"--use_cache: {answers.filename} holds answers of "
                    f"{'another ablation' if found else 'a model without ablation'}; they would be "
                    "taken for this one's. Give another path, or delete the file."
                )
            answers[CACHE_KEY] = identity
            answers.commit()
        super().set_cache_hook(cache_hook)
