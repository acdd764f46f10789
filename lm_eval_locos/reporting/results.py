"""Results and sample files of the harness, as records.

    >>> run = load(["out/"])[0]
    >>> run.condition, run.tasks["musique"].metrics["acc"]
    ('top:20', 0.41)

``lm_eval --output_path DIR`` writes ``results_DATE.json``; with ``--log_samples`` also
``samples_TASK_DATE.jsonl`` beside it, of the same date.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval_locos.errors import DataError, LocosError
from lm_eval_locos.files import expanded
from lm_eval_locos.reporting.samples import Sample, read_samples
from lm_eval_locos.reporting.text import BUNDLED_MARK, clean, family_of, number

_DATE = re.compile(r"_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json$")
_NEXT = "Give files or folders that `lm_eval --output_path DIR --log_samples` wrote."

# How a model runs, and what is ablated in it, but not which model it is.
_NOT_THE_MODEL = frozenset(
    "batch_size max_batch_size device parallelize device_map max_memory_per_gpu max_cpu_memory "
    "offload_folder use_cache heads num_heads select head_list seed site mode calibration "
    "num_calibration average on_overlength trust_remote_code".split()
)
_DEFAULTS = {"revision": "main", "dtype": "auto"}
# Arguments that the harness takes a model's name from; without any it writes a random one.
_NAMING = frozenset(("pretrained", "model", "path", "engine", "peft", "delta"))


@dataclass(frozen=True)
class Task:
    """One task of a run.

    Attributes:
        name: of the task.
        alias: as the harness's table shows it, without the mark of a bundled sample.
        family: of the task, or the task's own name.
        metrics: value by metric name; the first is the primary one.
        stderr: standard error by metric name, where the harness gives one.
        filter: of the metrics ("none" for tasks of this package).
        documents: number of documents evaluated, or None.
        bundled: whether the data are the package's sample.
        data: provenance of the documents (``locos_data``), or {}.
        own: what a task that compares conditions itself recorded (``locos_specificity``), or {}.
        settings: what decides a prompt and its answer besides the documents.
        hash: the harness's hash over all documents and prompts, or None.
        samples: an entry a document, or None without a sample file.
        not_finite: metrics whose value is NaN or infinite; they are not among `metrics`.
    """

    name: str
    alias: str
    family: str
    metrics: Mapping[str, float]
    stderr: Mapping[str, float]
    filter: str
    documents: int | None
    bundled: bool
    data: Mapping[str, Any]
    own: Mapping[str, Any]
    settings: Mapping[str, Any]
    hash: str | None
    samples: tuple[Sample, ...] | None
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Run:
    """One results file.

    Attributes:
        path: of the file, as found.
        sha256: of its bytes.
        date: in its name, "" where there is none.
        kind: the harness's model type.
        model: name of the model.
        identity: what makes it that model: arguments, revision, size, dtype.
        locos: the ablation's record (``config.locos``), or {} for another model type.
        condition: what was ablated; "baseline" for another model type.
        tasks: by name.
        config: the file's ``config``.
        versions: of the harness and of transformers, and the harness's commit.
    """

    path: str
    sha256: str
    date: str
    kind: str
    model: str
    identity: Mapping[str, Any]
    locos: Mapping[str, Any]
    condition: str
    tasks: Mapping[str, Task]
    config: Mapping[str, Any]
    versions: Mapping[str, Any]

    @property
    def is_baseline(self) -> bool:
        """Whether nothing was ablated."""
        return self.condition == "baseline"

    @property
    def ranking(self) -> Mapping[str, Any]:
        """``path`` and ``sha256`` of the ranking, or {}."""
        return self.locos.get("ranking") or {}


def load(paths: Iterable[str | Path]) -> list[Run]:
    """The runs in these files and folders (searched to the bottom), oldest first.

    A file that is named must be a results file; in folders other files are passed over.

    Raises:
        DataError: no such path, no results file in it, or one that cannot be read.
    """
    found: dict[Path, Path] = {}
    for given in paths:
        for file in _results_files(expanded(given)):
            found.setdefault(file.resolve(), file)
    runs = [run for file in found.values() for run in [_read(file)] if run]
    if not runs:
        listed = ", ".join(str(path) for path in paths) or "no paths"
        raise DataError(f"{listed}: no results file of the harness. {_NEXT}")
    runs.sort(key=lambda run: (run.date, run.path))
    return runs


def _results_files(path: Path) -> Sequence[Path]:
    try:
        missing = not path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, a folder that is closed
        raise DataError(f"{path}: cannot be read ({error}). {_NEXT}") from error
    if path.is_dir():
        files = sorted(f for f in path.rglob("*.json") if _DATE.search(f.name) and f.is_file())
        if not files:
            raise DataError(f"{path}: no results_DATE.json in this folder. {_NEXT}")
        return files
    if path.suffix == ".jsonl":
        raise DataError(f"{path} is a sample file. Give the results file beside it, or its folder.")
    if missing:
        raise DataError(f"{path}: no such file or folder. {_NEXT}")
    return [path]


def _read(path: Path) -> Run | None:
    try:
        data = path.read_bytes()
        content = json.loads(data.decode("utf-8"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {_NEXT}") from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise DataError(
            f"{path}: not JSON ({error}). Was the run cut off? Run it again, or leave the file out."
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(content.get(key), dict) for key in ("results", "configs", "config")
    ):
        seen = sorted(content)[:6] if isinstance(content, dict) else type(content).__name__
        raise DataError(
            f"{path}: not a results file of the harness: expected results, configs and config, "
            f"seen {seen}. {_NEXT}"
        )
    advice = "Run it again with lm_eval 0.4.13 or later, or leave the file out."
    with known_form(f"{path}: a results file of a shape", advice):
        return _run(path, hashlib.sha256(data).hexdigest(), clean(content))


@contextmanager
def known_form(
    what: str, advice: str = "Run it again with this version of lm-eval-locos."
) -> Iterator[None]:
    """What fails in the block for want of a key or a type becomes a `DataError`.

    Args:
        what: begins the message, which goes on "that is not known".
        advice: ends it.
    """
    try:
        yield
    except LocosError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{what} that is not known ({type(error).__name__}: {error}). {advice}"
        ) from error


def _run(path: Path, sha256: str, content: dict[str, Any]) -> Run:
    config = content["config"]
    dated = _DATE.search(path.name)
    date = dated[1] if dated else ""
    locos = config.get("locos") or {}
    tasks = {
        name: _task(name, content, path.parent, date)
        for name in content["results"]
        if name in content["configs"]  # groups have a line, but no configuration
    }
    arguments = _arguments(config.get("model_args"))
    named = content.get("model_name") if _NAMING & set(arguments) else None
    versions = {
        "lm_eval": content.get("lm_eval_version"),
        "transformers": content.get("transformers_version"),
        "lm-eval-locos": locos.get("version"),
        "git_hash": content.get("git_hash"),
    }
    return Run(
        path=clean(str(path)),
        sha256=sha256,
        date=date,
        kind=str(content.get("model_source") or config.get("model") or "unknown"),
        model=str(named or locos.get("model") or content.get("model_name") or "unknown"),
        identity=_identity(config, arguments),
        locos=locos,
        condition=str(locos.get("condition", "baseline")),
        tasks=tasks,
        config=config,
        versions={key: value for key, value in versions.items() if value},
    )


def _arguments(given: Any) -> dict[str, Any]:
    """The model's arguments as a dict; some versions of the harness write ``a=1,b=2``."""
    if isinstance(given, Mapping):
        return dict(given)
    parts = (part.partition("=") for part in str(given or "").split(","))
    return {key.strip(): value for key, sign, value in parts if sign}


def _identity(config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        key: value
        for key, value in arguments.items()
        if key not in _NOT_THE_MODEL and value != _DEFAULTS.get(key, object())
    }
    for key in ("model_sha", "model_num_parameters", "model_dtype", "peft_sha", "delta_sha"):
        if config.get(key):
            found[key] = config[key]
    if weights := (config.get("locos") or {}).get("model_identity"):
        found["weights"] = str(weights)[:16]
    return found


def _task(name: str, content: Mapping[str, Any], folder: Path, date: str) -> Task:
    result, config = content["results"][name], content["configs"][name]
    metrics, stderr, filters, not_finite = _metrics(result, config)
    metadata = config.get("metadata") or {}
    data = metadata.get("locos_data") or {}
    alias = str(result.get("alias") or name).strip()
    counts = (content.get("n-samples") or {}).get(name) or {}
    file = folder / f"samples_{name}_{date}.jsonl"
    settings = {
        "number of few-shot examples": (content.get("n-shot") or {}).get(name),
        "task version": (content.get("versions") or {}).get(name),
        "generation settings": config.get("generation_kwargs"),
        "chat template": content.get("chat_template_sha"),
        "system instruction": content.get("system_instruction_sha"),
    }
    return Task(
        name=name,
        alias=alias.removesuffix(BUNDLED_MARK).strip(),
        family=family_of(name),
        metrics=metrics,
        stderr=stderr,
        filter=filters,
        documents=counts.get("effective") or result.get("sample_len"),
        bundled=data.get("source") == "bundled" or BUNDLED_MARK in alias,
        data=data,
        own=metadata.get("locos_specificity") or {},
        settings=settings,
        hash=(content.get("task_hashes") or {}).get(name),
        samples=read_samples(file, filters, set(metrics)) if date and file.is_file() else None,
        not_finite=not_finite,
    )


def _metrics(
    result: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, float], str, tuple[str, ...]]:
    """Values and standard errors of the first filter, in the task's own order of metrics; the
    filter; and the metrics that are no finite number."""
    names = [key for key in result if "," in key]
    chosen = names[0].partition(",")[2] if names else "none"
    values = {
        key.partition(",")[0]: found
        for key in names
        if key.partition(",")[2] == chosen and (found := number(result[key])) is not None
    }
    declared = [str(entry.get("metric")) for entry in config.get("metric_list") or []]
    order = [n for n in declared if n in values] + [n for n in values if n not in declared]
    metrics = {n: values[n] for n in order if not n.endswith("_stderr")}
    errors = {n: values[f"{n}_stderr"] for n in metrics if f"{n}_stderr" in values}
    not_finite = tuple(
        name
        for key in names
        if isinstance(result[key], float) and not math.isfinite(result[key])
        for name, _, of in [key.partition(",")]
        if of == chosen and not name.endswith("_stderr")
    )
    return metrics, errors, chosen, not_finite
