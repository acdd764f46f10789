"""``locos detect``: scores every head of a model and writes a ranking for each method."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from lm_eval_locos.cli import loading
from lm_eval_locos.cli.arguments import Formatter, whole

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
        "--num-trials",
        type=whole(1),
        metavar="N",
        help="how many (default: 100; of a file: all rows)",
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
        "--max-new-tokens",
        type=whole(1),
        default=50,
        metavar="N",
        help="limit of a generation (default: 50)",
    )
    run.add_argument(
        "--no-prefix-reuse",
        action="store_true",
        help="prefill every prompt in full, also where many share the text before the needle",
    )
    parser.set_defaults(run=detect)


def detect(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from lm_eval_locos.detect import check
    from lm_eval_locos.detect import detect as run
    from lm_eval_locos.detection import runner
    from lm_eval_locos.errors import LocosError

    batch_size = arguments.batch_size
    if batch_size != "auto":
        if not batch_size.isdecimal() or int(batch_size) < 1:
            raise LocosError(f"--batch-size {batch_size}: expected auto, or a number from 1.")
        batch_size = int(batch_size)
    same = (
        "data",
        "num_trials",
        "lengths",
        "depths",
        "methods",
        "max_new_tokens",
        "output",
        "resume",
    )
    options = {name: getattr(arguments, name) for name in same} | {"batch_size": batch_size}
    check(**options)  # before the model is loaded, which takes long
    model, tokenizer = loading.load(arguments)
    found = run(
        model,
        tokenizer,
        **options,
        needle_set=arguments.needle_set,
        seed=arguments.seed,
        chat_template=arguments.chat_template,
        share=not arguments.no_prefix_reuse,
        name=arguments.name or "/".join(filter(None, (arguments.model, arguments.gguf_file))),
        revision=arguments.revision,
        peft=arguments.peft,
    )
    state = runner.processes()
    if state is None or state.is_main_process:
        _report(found, arguments.output)
    return 0


def _report(found: Any, output: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from lm_eval_locos.detection.rankings import UNFILTERED, guessing, listed, near_guessing
    from lm_eval_locos.files import shown

    passed = sum(result.passed for result in found.results)
    console = Console(width=None if sys.stdout.isatty() else 200)
    meta = next(iter(found.rankings.values())).meta
    mark = " [bundled sample]" if meta["data"]["source"] == "bundled" else ""
    unfiltered = UNFILTERED.issuperset(found.rankings)
    scored = len(found.results) if unfiltered else passed
    title = f"{passed} of {len(found.results)} trials passed ({found.pass_rate:.2f}){mark}"
    if unfiltered:
        title = f"{scored} trials scored, {passed} passed{mark}"
    table = Table(title=Text(title), title_justify="left")
    for column in ("method", "trials", "top heads (layer-head), highest first", "file"):
        table.add_column(column, justify="right" if column == "trials" else "left")
    for method, ranking in found.rankings.items():
        file = f"{shown(output)}/{method}.json"
        table.add_row(method, str(len(ranking.trial_ids or ())), listed(ranking), file)
    console.print(table)
    if scored < 20:
        console.print(
            f"Only {scored} trials {'were scored' if unfiltered else 'passed'}: the order of the "
            "heads is uncertain (see the intervals in `locos heads show`). Use more trials"
            f"{'' if unfiltered else ', or easier ones'}."
        )
    if not unfiltered and near_guessing(meta):
        console.print(
            f"The pass rate is {found.pass_rate:.2f}, and guessing {guessing(meta)}: many of the "
            "trials that passed may be guesses. Use easier trials, or a larger model."
        )
