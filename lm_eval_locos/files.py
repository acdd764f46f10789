"""Files that are written whole or not at all.

>>> with replacing("ranking.json") as temporary:
...     temporary.write_text(text)
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lm_eval_locos.errors import DataError, LocosError


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ``~`` as the home folder; as it is where nobody is called so."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def shown(path: str | os.PathLike[str]) -> str:
    """The path as text that any file can hold: a name may have bytes that are no UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


def check_folder(folder: Path) -> None:
    """Raises DataError where ``--output``, a folder, is a file."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file, and --output is a folder. Choose another one.")


def clear_temporaries(folder: Path) -> None:
    """Removes what a process that was killed inside `replacing` left in a folder."""
    for left in folder.glob(".*-*.tmp"):
        left.unlink(missing_ok=True)


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary file beside ``path``, which takes its place when the block ends.

    Nothing changes when the block raises. Folders are made as needed.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files private; a result is as readable as any other new file.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file that a user named, whole or not at all.

    Raises:
        LocosError: it cannot be written there.
    """
    try:
        with replacing(expanded(path)) as temporary:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise LocosError(
            f"{path}: cannot be written ({error.strerror}). Name a file in a folder that you may "
            "write to."
        ) from error
