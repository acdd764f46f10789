"""Results of finished batches on disk, so that a run that was killed goes on where it was.

folder/run.json             what the run is; another run's checkpoint is refused
folder/000003.safetensors   the results of batch 3, written whole or not at all
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lm_eval_locos.detection.generate import TrialResult
from lm_eval_locos.errors import DataError
from lm_eval_locos.files import check_folder, replacing

FOLDER = "checkpoint"
"""Where in the output folder the batches of an unfinished run are."""


def check_output(output: Path, record: str, *, resume: bool) -> None:
    """Refuses an output folder that a run cannot write to; writes nothing that stays.

    Args:
        output: the folder, which need not exist.
        record: name of the file in it that a finished run has.
        resume: whether the run goes on with what is there.

    Raises:
        DataError: it, or one of the folders above it, is a file or cannot be written to; or it has
            results that are not to be resumed.
    """
    try:
        existing = next(path for path in (output, *output.absolute().parents) if path.exists())
        check_folder(existing)
        # Rights do not tell everything: nothing can be made in /proc. The suffix is of files that
        # are cleared away where a process was killed before it could.
        handle, name = tempfile.mkstemp(dir=existing, prefix=".output-", suffix=".tmp")
        os.close(handle)
        Path(name).unlink(missing_ok=True)  # or another process has cleared it away
        finished, begun = (output / record).exists(), (output / FOLDER).exists()
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DataError(
            f"--output {output}: cannot be written to ({reason}). Choose a folder in which you "
            "may make files."
        ) from error
    if resume:
        return
    if finished:
        raise DataError(
            f"{output} holds the results of a finished run. Choose another --output, or delete it."
        )
    if begun:
        raise DataError(
            f"{output} holds an unfinished run. Add --resume to go on with it, or choose another "
            "--output."
        )


class Checkpoint:
    """The finished batches of one run.

    Args:
        folder: made when something is saved.
        identity: what results depend on, JSON-able.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.identity = dict(identity)

    def begin(self) -> None:
        """Notes the run's identity in a new folder.

        Raises:
            DataError: the folder holds another run.
        """
        found = recorded(self.folder)
        if found is None:
            with replacing(self.folder / "run.json") as temporary:
                temporary.write_text(json.dumps(self.identity, indent=1) + "\n", encoding="utf-8")
            return
        for key in sorted({*found, *self.identity}):
            if found.get(key) != self.identity.get(key):
                raise DataError(
                    f"{self.folder} belongs to another run: {key} was {found.get(key)!r} and is "
                    f"{self.identity.get(key)!r}. Repeat the former arguments, or choose another "
                    "--output."
                )

    def save(self, number: int, results: Mapping[int, TrialResult]) -> None:
        """Keeps the results of batch ``number``, by the trials' indices."""
        tensors = {
            f"{index}.{method}": scores.contiguous()
            for index, result in results.items()
            for method, scores in result.scores.items()
        }
        facts = {
            index: {"ids": r.ids, "text": r.text, "steps": r.steps, "passed": r.passed}
            for index, r in results.items()
        }
        with replacing(self._path(number)) as temporary:
            save_file(tensors, temporary, metadata={"results": json.dumps(facts)})

    def load(self, number: int, members: Sequence[int]) -> dict[int, TrialResult] | None:
        """The results of batch ``number``, or None where they are not there, or damaged."""
        try:
            with safe_open(self._path(number), framework="pt") as file:
                facts = json.loads(file.metadata()["results"])
                scores: dict[str, dict[str, torch.Tensor]] = {index: {} for index in facts}
                for key in file.keys():  # noqa: SIM118 (no iterator)
                    index, method = key.split(".")
                    scores[index][method] = file.get_tensor(key)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError):
            return None
        if sorted(map(int, facts)) != sorted(members):
            return None
        return {
            int(index): TrialResult(
                tuple(fact["ids"]),
                fact["text"],
                tuple(fact["steps"]),
                fact["passed"],
                scores[index],
            )
            for index, fact in facts.items()
        }

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"


def recorded(folder: Path) -> dict[str, Any] | None:
    """The identity of the run that a folder holds, or None where it holds none."""
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{folder / 'run.json'} cannot be read ({error}). Delete {folder}."
        ) from error
