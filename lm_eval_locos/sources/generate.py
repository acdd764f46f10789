"""Makes the bundled sample: our own text in the shapes of the benchmarks' data.

    python -m lm_eval_locos.sources.generate --output lm_eval_locos/data/sample

Everything follows from the word lists of a `World` and a seed, so the files are the same byte for
byte on every run. Each family's function yields as many examples as are asked for:

    rows = babilong(10_000, "qa2", "training", world=smaller)

Parts: ``evaluation``, ``detection``, ``calibration``, ``training``. What is asked in one part (a
person in a place) and its filler sentences never occur in another: both are assigned by hash. In
NoLiMa's layout needles, characters and books are divided by `lm_eval_locos.sources.needles`; no
filler sentence stands in two books or in a training example. Facts and sums are knowledge: the
training part has all of them, the others divide them.

So that guessing scores little, every context names at least five candidates, and neither a uniform
guess nor the candidate named last is right in more than one document in five. (In qa5 that holds
over the benchmark's seven labels; it has only four people, so a guess among them scores more.)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from lm_eval_locos.sources.synthetic.babilong import babilong
from lm_eval_locos.sources.synthetic.musique import musique
from lm_eval_locos.sources.synthetic.nolima import book, nolima_entries
from lm_eval_locos.sources.synthetic.parametric import parametric
from lm_eval_locos.sources.synthetic.text import Row
from lm_eval_locos.sources.world import WORLD, World


def write_sample(folder: Path, world: World = WORLD) -> list[Path]:
    """Writes the whole sample under ``folder``; the paths, sorted."""
    files: dict[str, str] = {}
    for name, kind in (("", "world"), ("_hard", "hard"), ("_ONLYDirect", "direct")):
        entries = json.dumps(nolima_entries(world, kind), indent=1, ensure_ascii=False)
        files[f"nolima/needlesets/needle_set{name}.json"] = entries + "\n"
    for number in range(1, 6):
        files[f"nolima/haystack/rand_shuffle/rand_book_{number}.txt"] = book(world, number)
    rows: dict[str, Iterable[Row]] = {
        "musique/answerable/validation": [
            *musique(100, 2, "evaluation", world=world),
            *musique(25, 3, "evaluation", world=world),
            *musique(25, 4, "evaluation", world=world),
        ],
        "musique/answerable/train": musique(50, 2, "calibration", world=world),
        "parametric/train": parametric("evaluation", count_sums=120, world=world),
        "parametric/calibration": parametric("calibration", count_sums=60, world=world),
    }
    for task in ("qa1", "qa2", "qa3", "qa4", "qa5"):
        main = task in ("qa1", "qa2")
        for config, count, part, fillers in (
            ("0k", 120 if main else 40, "evaluation", 12),
            ("1k", 10, "evaluation", 80),
            ("calibration", 20, "calibration", 12),
        ):
            stories = babilong(count, task, part, fillers=fillers, world=world)
            rows[f"babilong/{config}/{task}"] = (
                {column: story[column] for column in ("input", "question", "target")}
                for story in stories
            )
    for name, found in rows.items():
        lines = (json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in found)
        files[f"{name}.jsonl"] = "\n".join(lines) + "\n"
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return sorted(folder / name for name in files)


def main() -> None:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Writes the bundled sample of lm-eval-locos.")
    default = Path(__file__).resolve().parent.parent / "data" / "sample"
    parser.add_argument(
        "--output", type=Path, default=default, help="folder (default: %(default)s)"
    )
    for path in write_sample(parser.parse_args().output):
        print(path)


if __name__ == "__main__":
    main()
