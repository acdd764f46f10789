"""What the start-up file costs a bare `python -c pass`, with and without it, interleaved.

python benchmarks/startup.py [--rounds 60]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    sides = {"off": os.environ | {"LM_EVAL_LOCOS_AUTOLOAD": "0"}, "on": dict(os.environ)}
    times = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sorted(sides, reverse=turn % 2 == 0):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], env=sides[side], check=True)
            times[side].append(1000 * (time.perf_counter() - start))
    off, on = (statistics.median(times[side]) for side in ("off", "on"))
    paired = statistics.median(b - a for a, b in zip(times["off"], times["on"], strict=True))
    print(f"off {off:.2f} ms, on {on:.2f} ms, median difference {paired:+.2f} ms ({rounds} rounds)")
    print(f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
