"""Writes a YAML file for every BABILong task and length: python tasks/babilong/_write.py.

The harness finds a task by the name in a file of its own, so each name needs one.
"""

from __future__ import annotations

from pathlib import Path

TASKS = {
    20: ("0k", "1k", "2k", "4k", "8k", "16k", "32k"),
    10: ("64k", "128k"),
    5: ("256k", "512k", "1M"),
}
"""Number of tasks (from qa1 on) per length."""


def write(folder: Path) -> None:
    """Writes the files into ``folder``."""
    for count, lengths in TASKS.items():
        for length in lengths:
            for number in range(1, count + 1):
                name = f"locos_babilong_qa{number}_{length}"
                (folder / f"{name}.yaml").write_text(
                    f"include: _babilong.yaml\ntask: {name}\n"
                    f"dataset_kwargs:\n  task: qa{number}\n  length: {length}\n",
                    encoding="utf-8",
                )


if __name__ == "__main__":
    write(Path(__file__).parent)
