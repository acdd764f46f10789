"""Finds a benchmark's data: a local folder, the hub, or the sample bundled with the package.

    >>> found = locate("musique")
    >>> rows = table("musique", found, "answerable", split="validation", columns=["question"])
    >>> raw = locate("nolima", ["needlesets/*.json"])      # files: raw.path is a folder

Order: ``$LOCOS_DATA_DIR/<name>``, the hub, the bundled sample. ``LOCOS_DATA=local|hub|bundled``
forces one of them, and a miss is then a `DataError`. Without that, falling back to the bundled
sample logs one warning that says why. A hub that cannot be reached is asked once in a process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lm_eval_locos.errors import DataError
from lm_eval_locos.files import expanded

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

HUB_IDS = {
    "nolima": "amodaresi/NoLiMa",
    "musique": "bdsaglam/musique",
    "babilong": "RMT-team/babilong",
    "parametric": "aryopg/parametric-arithmetic-eval",
}
"""The hub's dataset repository of each name."""

REVISIONS = dict.fromkeys(HUB_IDS, "main")
"""The revision that is asked for. A branch is resolved to its commit when it is looked up, and
that commit is what is downloaded and recorded (`Found.revision`). ``LOCOS_REVISION_<NAME>``
overrides."""

SAMPLE = Path(__file__).resolve().parent.parent / "data" / "sample"
"""The bundled sample: one folder a name."""

HUB_TIMEOUT_SECONDS = 5.0
_SUFFIXES = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Found:
    """Where the data of one name was found.

    path: the folder (local, bundled, and the snapshot of a hub dataset that was asked for by
        files); None for a hub table, which `table` loads by its id.
    revision: the hub's commit, None elsewhere (or when only a cached copy could be used).
    reason: why this source, in words.
    """

    kind: Literal["local", "hub", "bundled"]
    path: Path | None
    revision: str | None
    reason: str


def locate(name: str, files: Sequence[str] | None = None) -> Found:
    """Where the data called `name` lies.

    name: nolima, musique, babilong or parametric.
    files: glob patterns of the raw files to download from the hub; None for a table.
    Raises `DataError` for a wrong setting, and for a miss where LOCOS_DATA forces the source.
    """
    if name not in HUB_IDS:
        raise DataError(f"no data called {name!r}. Known: {', '.join(HUB_IDS)}.")
    settings = tuple(
        os.environ.get(key, "").strip() for key in ("LOCOS_DATA", "LOCOS_DATA_DIR", _override(name))
    )
    return _locate(name, None if files is None else tuple(files), *settings)


@functools.cache
def _locate(
    name: str, files: tuple[str, ...] | None, forced: str, directory: str, override: str
) -> Found:
    """`locate` for one setting of the environment, remembered for the process."""
    if forced not in ("", "local", "hub", "bundled"):
        raise DataError(f"LOCOS_DATA={forced}: expected hub, local or bundled, or nothing.")
    bundled = SAMPLE / name
    if forced == "bundled":
        return Found("bundled", _folder(bundled), None, "LOCOS_DATA=bundled")
    missing = "LOCOS_DATA_DIR is not set"
    if directory:
        local = expanded(directory)
        if not local.is_dir():
            raise DataError(
                f"LOCOS_DATA_DIR={directory}: not a folder. Give the folder that holds {name}/, "
                "or unset it to use the hub or the bundled sample."
            )
        if forced != "hub" and (local / name).is_dir():
            return Found("local", local / name, None, f"LOCOS_DATA_DIR={directory}")
        missing = f"{local} has no folder {name}"
    if forced == "local":
        raise DataError(f"LOCOS_DATA=local, but {missing}. Put the data in $LOCOS_DATA_DIR/{name}.")
    try:
        return _on_hub(name, files, override or REVISIONS[name])
    except _Unavailable as error:
        if forced == "hub":
            raise DataError(
                f"LOCOS_DATA=hub, but {HUB_IDS[name]} is not available: {error}. Check the network "
                f"and the access, or put a copy in $LOCOS_DATA_DIR/{name}."
            ) from error
        reason = f"{missing}; {HUB_IDS[name]} on the hub: {error}"
        logger.warning(
            "%s: using the small sample bundled with lm-eval-locos, which is NOT the benchmark "
            "(%s). For the benchmark's data put a copy in $LOCOS_DATA_DIR/%s or give access to "
            "the hub.",
            name,
            reason,
            name,
        )
        return Found("bundled", _folder(bundled), None, reason)


def _override(name: str) -> str:
    """The environment variable that overrides the revision of `name`."""
    return f"LOCOS_REVISION_{name.upper()}"


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise DataError(f"the bundled sample is missing: {path}. Reinstall lm-eval-locos.")
    return path


class _Unavailable(Exception):
    """The hub, or a dataset on it, cannot be had; the message says why."""


_unreachable: str | None = None
"""Why the hub could not be reached, once that was seen: five tasks should not wait five times."""


def _on_hub(name: str, files: tuple[str, ...] | None, revision: str) -> Found:
    """The dataset on the hub, or its copy in the local cache when the hub cannot be reached."""
    try:
        commit = _commit(name, revision)
    except _Unavailable as error:
        cached = _cached(name, files, revision)
        if cached is None:
            raise
        return Found("hub", cached[0], cached[1], f"cached copy of {HUB_IDS[name]} ({error})")
    reason = f"{HUB_IDS[name]} at {commit}"
    if files is None:
        return Found("hub", None, commit, reason)
    from huggingface_hub import snapshot_download

    try:
        path = snapshot_download(
            HUB_IDS[name], repo_type="dataset", revision=commit, allow_patterns=list(files)
        )
    except Exception as error:  # whatever stops a download, the reason is passed on
        raise _Unavailable(_first_line(error)) from error
    return Found("hub", Path(path), commit, reason)


def _commit(name: str, revision: str) -> str:
    """The commit behind `revision`; raises `_Unavailable`."""
    global _unreachable
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.is_offline_mode():
        raise _Unavailable("HF_HUB_OFFLINE is set")
    if _unreachable is not None:
        raise _Unavailable(_unreachable)
    try:
        info = HfApi().dataset_info(HUB_IDS[name], revision=revision, timeout=HUB_TIMEOUT_SECONDS)
    except HfHubHTTPError as error:  # an answer: no such dataset or revision, no access
        raise _Unavailable(_first_line(error)) from error
    except Exception as error:  # the HTTP library differs between versions of huggingface_hub
        _unreachable = f"cannot reach the hub ({_first_line(error)})"
        raise _Unavailable(_unreachable) from error
    return str(info.sha)


def _cached(
    name: str, files: tuple[str, ...] | None, revision: str
) -> tuple[Path | None, str | None] | None:
    """Path and commit of the copy in the local cache, None where there is none."""
    if files is None:
        import datasets

        cache = Path(datasets.config.HF_DATASETS_CACHE) / HUB_IDS[name].replace("/", "___")
        return (None, None) if cache.is_dir() else None
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(
                HUB_IDS[name],
                repo_type="dataset",
                revision=revision,
                allow_patterns=list(files),
                local_files_only=True,
            )
        )
    except Exception:  # no copy of this revision
        return None
    # A snapshot folder is named after its commit.
    return (path, path.name) if any(any(path.glob(pattern)) for pattern in files) else None


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def table(
    name: str, found: Found, config: str | None = None, *, split: str, columns: Sequence[str]
) -> datasets.Dataset:
    """The rows of one split, through `datasets.load_dataset`.

    name: as for `locate`; found: its answer; config: the dataset's configuration, if it has any.
    A folder (local or bundled) holds ``<config>/<split>.jsonl`` (or .json, .parquet, .csv, or the
    hub's ``<split>-*.parquet``), or is a copy of the hub's repository with its README.
    Raises `DataError` for what cannot be loaded, an empty split, and missing columns.
    """
    import datasets

    where = str(found.path) if found.path is not None else HUB_IDS[name]
    what = f"{where}, config {config}, split {split}" if config else f"{where}, split {split}"
    try:
        with _without_progress_bars():
            own = None if found.path is None else _split_files(found.path, config, split)
            if own is not None:
                builder, paths = own
                rows = datasets.load_dataset(builder, data_files={split: paths}, split=split)
            else:
                rows = datasets.load_dataset(where, config, split=split, revision=found.revision)
            rows.data.validate(full=True)  # bytes that are no UTF-8 fail here, not in some row
    except Exception as error:  # every builder raises its own, and `datasets` wraps it
        reason = _first_line(error.__cause__ or error)
        raise DataError(
            f"cannot load {what}: {reason}. Expected rows with {', '.join(columns)}; in JSONL one "
            "object a line."
        ) from error
    absent = [column for column in columns if column not in rows.column_names]
    if absent:
        raise DataError(
            f"{what}: no column {', '.join(absent)}. "
            f"Seen: {', '.join(rows.column_names)}; expected: {', '.join(columns)}."
        )
    if len(rows) == 0:
        raise DataError(f"{what}: no rows. Expected rows with {', '.join(columns)}.")
    return rows


def _split_files(folder: Path, config: str | None, split: str) -> tuple[str, list[str]] | None:
    """The builder and the files of ``<config>/<split>.*`` in a plain folder."""
    base = folder / config if config else folder
    for suffix, builder in _SUFFIXES.items():
        plain = base / f"{split}{suffix}"
        if plain.is_file():
            return builder, [str(plain)]
        shards = sorted(base.glob(f"{split}-*{suffix}"))
        if shards:
            return builder, [str(path) for path in shards]
    return None


@contextlib.contextmanager
def _without_progress_bars():  # noqa: ANN202
    """Small local files do not need a bar each."""
    import datasets

    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
