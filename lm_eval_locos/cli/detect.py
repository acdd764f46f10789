"""``locos detect``: scores every head of a model and writes a ranking for each method."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lm_eval_locos.cli import loading
from lm_eval_locos.cli.arguments import Formatter

EPILOG = """\
methods:
  locos              logit contribution of the needle less that of the rest (arXiv 2607.01002)
  dla                direct logit attribution: the same without the contrast
  attention_spatial  the same contrast on attention alone, without values and output
  wu                 share of the needle's tokens that a head copies (Wu et al. 2025)
  contrastive        needle among the top 10 attended, answer steps less other steps
  contrastive_mean   its variant with mean attention (on request)
  headkv             attention on the needle from the prompt's last 8 tokens (no generation)
  cri                causal patching: a pass for every head and trial (on request; slow)
  all                locos, dla, attention_spatial, wu, contrastive, headkv: one pass together

examples:
  locos detect --model Qwen/Qwen3-4B --data nolima --num-trials 200 --output rankings/qwen3
  locos detect --model MODEL --data probes.jsonl --methods locos wu --output out
  accelerate launch --num_processes 4 -m lm_eval_locos.cli detect --model MODEL --output out
  torchrun --nproc-per-node 2 -m lm_eval_locos.cli detect ...    (the same on CPUs)
  lm_eval --model locos-ablated --model_args pretrained=MODEL,heads=out/locos.json ...

A killed run goes on with --resume, with the same result. probes.jsonl has one object a line with
context, needle, question and answer.
"""


def add_parser(commands: Any) -> None:
    """Adds ``detect``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "detect",
        help="score every head of a model: LOCOS and the baselines it is compared with",
        description="Scores every head of a model in one pass of ordinary generation over probe "
        "prompts, and writes a ranking (JSON) for every method with a card.",
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    loading.add_arguments(parser)
    probes = parser.add_argument_group("probes")
    probes.add_argument(
        "--data",
        default="nolima",
        metavar="nolima|niah|FILE",
        help="NoLiMa, a literal needle in the same books, or a JSONL file (default: %(default)s)",
    )
    probes.add_argument(
        "--num-trials", type=int, metavar="N", help="how many (default: 100; of a file: all rows)"
    )
    probes.add_argument(
        "--lengths",
        metavar="L",
        help="context lengths in tokens, START:STOP:COUNT or a list 500,1000 (default: "
        "1000:16000:5; on the bundled sample 200:400:5)",
    )
    probes.add_argument(
        "--depths", metavar="D", help="needle depths in percent, likewise (default: 0:100:5)"
    )
    probes.add_argument(
        "--needle-set",
        default="needle_set.json",
        metavar="FILE",
        help="NoLiMa's needle set, such as needle_set_hard.json (default: %(default)s)",
    )
    probes.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        help="put prompts through the model's chat template (default: if it has one)",
    )
    probes.add_argument(
        "--seed", type=int, default=42, help="of the choice of trials (default: %(default)s)"
    )
    run = parser.add_argument_group("run")
    run.add_argument(
        "--methods", nargs="+", default=["all"], metavar="M", help="see below (default: all)"
    )
    run.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
    run.add_argument(
        "--name", metavar="NAME", help="what the rankings call the model (default: ID)"
    )
    run.add_argument(
        "--resume", action="store_true", help="go on with the unfinished run in the folder"
    )
    run.add_argument(
        "--batch-size", default="auto", help="most trials at a time (default: auto, by memory)"
    )
    run.add_argument(
        "--max-new-tokens", type=int, default=50, help="limit of a generation (default: 50)"
    )
    run.add_argument(
        "--no-prefix-reuse",
        action="store_true",
        help="prefill every prompt in full, also where many share the text before the needle",
    )
    parser.set_defaults(run=detect)


def detect(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from lm_eval_locos.detect import detect as run
    from lm_eval_locos.detection import runner
    from lm_eval_locos.errors import LocosError
    from lm_eval_locos.families.grids import numbers

    batch_size = arguments.batch_size
    if batch_size != "auto":
        if not batch_size.isdecimal() or int(batch_size) < 1:
            raise LocosError(f"--batch-size {batch_size}: expected auto, or a number from 1.")
        batch_size = int(batch_size)
    lengths = numbers("lengths", arguments.lengths, least=1)
    depths = numbers("depths", arguments.depths, most=100)
    methods = _methods(arguments.methods)
    model, tokenizer = loading.load(arguments)
    found = run(
        model,
        tokenizer,
        data=arguments.data,
        num_trials=arguments.num_trials,
        lengths=lengths,
        depths=depths,
        needle_set=arguments.needle_set,
        methods=methods,
        seed=arguments.seed,
        chat_template=arguments.chat_template,
        batch_size=batch_size,
        share=not arguments.no_prefix_reuse,
        max_new_tokens=arguments.max_new_tokens,
        output=arguments.output,
        resume=arguments.resume,
        name=arguments.name or "/".join(filter(None, (arguments.model, arguments.gguf_file))),
        revision=arguments.revision,
    )
    state = runner.processes()
    if state is None or state.is_main_process:
        _report(found, arguments.output)
    return 0


def _methods(names: Sequence[str]) -> list[str]:
    """The methods that are meant; commas and blanks both separate them."""
    from lm_eval_locos.detection.scores import METHODS

    split = [name for text in names for name in text.split(",") if name]
    meant = [method for name in split for method in (METHODS if name == "all" else (name,))]
    return list(dict.fromkeys(meant))


def _report(found: Any, output: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from lm_eval_locos.files import shown

    passed = sum(result.passed for result in found.results)
    console = Console(width=None if sys.stdout.isatty() else 200)
    meta = next(iter(found.rankings.values())).meta
    mark = " [bundled sample]" if meta["data"]["source"] == "bundled" else ""
    title = f"{passed} of {len(found.results)} trials passed ({found.pass_rate:.2f}){mark}"
    table = Table(title=Text(title), title_justify="left")
    for column in ("method", "trials", "top heads (layer-head), highest first", "file"):
        table.add_column(column, justify="right" if column == "trials" else "left")
    for method, ranking in found.rankings.items():
        heads = ", ".join(map(str, ranking.top(min(10, len(ranking.order)))))
        file = f"{shown(output)}/{method}.json"
        table.add_row(method, str(len(ranking.trial_ids or ())), heads, file)
    console.print(table)
    if passed < 20:
        console.print(
            f"Only {passed} trials passed: the order of the heads is uncertain (see the intervals "
            "in `locos heads show`). Use more trials, or easier ones."
        )
