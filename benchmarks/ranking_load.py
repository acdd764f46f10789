"""How long a large ranking takes to load and to sort: 100 layers of 128 heads, 20 trials a head.

python benchmarks/ranking_load.py [--layers 100 --heads 128 --trials 20 --rounds 5]

Times are of this process's CPU, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from lm_eval_locos.architecture import Head
from lm_eval_locos.ranking import HeadRanking


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=100)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rng = random.Random(0)
    scores = {
        Head(layer, head): tuple(rng.gauss(0, 1) for _ in range(given.trials))
        for layer in range(given.layers)
        for head in range(given.heads)
    }
    trials = range(given.trials)
    made = HeadRanking(
        scores,
        meta={"method": "locos"},
        trial_ids=tuple(f"trial-{trial}" for trial in trials),
        answer_steps=tuple(1 + trial % 3 for trial in trials),
    )
    load, top = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranking.json"
        made.save(path)
        size = path.stat().st_size
        for _ in range(given.rounds):
            start = time.process_time()
            ranking = HeadRanking.load(path)
            loaded = time.process_time()
            ranking.top(50)
            load.append(loaded - start)
            top.append(time.process_time() - loaded)
    print(
        f"{len(scores)} heads, {given.trials} trials, {size / 1e6:.1f} MB: load "
        f"{statistics.median(load):.3f} s, top 50 {statistics.median(top):.3f} s, together at most "
        f"{max(a + b for a, b in zip(load, top, strict=True)):.3f} s ({given.rounds} rounds)"
    )
    print(f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
