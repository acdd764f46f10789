"""``locos sweep``: evaluates a model with the top heads of rankings ablated, for several k."""

from __future__ import annotations

import argparse
import json
from typing import Any

from lm_eval_locos.cli.arguments import Formatter

EPILOG = """\
controls:
  random:N        N draws of k heads without the top k
  layer-random:N  the same, with as many heads in each layer as the top k has there
  bottom          the k heads with the lowest scores

examples:
  locos sweep --model MODEL --heads out/locos.json out/wu.json --k 5,10,20,50 \\
      --controls layer-random:10,bottom --tasks locos --limit 100 --output sweep
  locos report sweep

Every run is a folder with a results file and samples as `lm_eval --output_path --log_samples`
writes them. A killed sweep goes on with --resume; more k and controls can be added in the same way.
"""


def add_parser(commands: Any) -> None:
    """Adds ``sweep``."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "sweep",
        help="evaluate with the top k heads ablated, for several rankings, k and controls",
        description="Loads a model once, runs the baseline once, and then every ranking, k and "
        "control; each run is a results file of the harness's own.",
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    parser.add_argument("--model", required=True, metavar="ID", help="hub id or folder")
    parser.add_argument(
        "--model-args",
        default="",
        metavar="A=B,...",
        help="everything else that --model_args takes: gguf_file, dtype, site, mode, peft ...",
    )
    parser.add_argument(
        "--heads", nargs="+", metavar="FILE", help="rankings (default: the model's bundled one)"
    )
    parser.add_argument(
        "--k",
        default="1,5,10,20,50",
        metavar="K,...",
        help="numbers of heads (default: %(default)s)",
    )
    parser.add_argument("--controls", default="", metavar="C,...", help="see below (default: none)")
    parser.add_argument("--tasks", required=True, metavar="T,...", help="tasks of the harness")
    parser.add_argument("--metadata", metavar="JSON", help="for the tasks, as lm_eval's")
    parser.add_argument("--limit", type=float, metavar="N", help="documents a task, as lm_eval's")
    parser.add_argument("--batch-size", default="1", metavar="N", help="or auto (default: 1)")
    parser.add_argument("--device", metavar="D", help="as lm_eval's")
    parser.add_argument(
        "--apply-chat-template", action="store_true", help="use the model's chat template"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--resume", action="store_true", help="run what is missing in the folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    from lm_eval.utils import simple_parse_args_string

    from lm_eval_locos import sweep
    from lm_eval_locos._autoload import install
    from lm_eval_locos.bundled import bundled_ranking
    from lm_eval_locos.errors import LocosError, RankingError
    from lm_eval_locos.model import LocosAblatedLM
    from lm_eval_locos.ranking import HeadRanking
    from lm_eval_locos.reporting.grid import best_k_lines
    from lm_eval_locos.reporting.leaderboard import leaderboard
    from lm_eval_locos.reporting.results import load

    install(force=True)  # the tasks, also where the start-up file is switched off
    extra = simple_parse_args_string(arguments.model_args)
    taken = {"pretrained", "heads", "num_heads", "select", "head_list"} & set(extra)
    if taken:
        raise LocosError(f"--model-args {min(taken)}=...: use --model, --heads, --k, --controls.")
    paths = arguments.heads
    if not paths:
        bundled = bundled_ranking(arguments.model, extra.get("gguf_file"))
        if bundled is None:
            raise RankingError(
                "--heads is missing, and no ranking of this model is bundled. Make one with "
                f"locos detect --model {arguments.model} --output DIR"
            )
        paths = [str(bundled)]
    rankings = {name: HeadRanking.load(path) for name, path in sweep.names(paths).items()}
    runs = sweep.plan(
        rankings,
        [_whole(text) for text in arguments.k.split(",")],
        [text for text in arguments.controls.split(",") if text],
    )
    model_args = {"pretrained": arguments.model, **extra}
    tasks, metadata = arguments.tasks.split(","), _metadata(arguments.metadata)
    limit = _limit(arguments.limit)
    sweep.check_limit(limit)
    manager = sweep.manager_of(tasks, model_args, metadata)  # before the model is loaded
    size = arguments.batch_size
    lm = LocosAblatedLM(
        **{"device": arguments.device, **model_args},
        num_heads=0,
        batch_size=int(size) if size.isdecimal() else size,
    )
    folders = sweep.sweep(
        lm,
        rankings,
        runs,
        tasks=tasks,
        output=arguments.output,
        model_args=model_args,
        limit=limit,
        apply_chat_template=arguments.apply_chat_template,
        metadata=metadata,
        resume=arguments.resume,
        manager=manager,
    )
    if lm.rank == 0:
        for line in best_k_lines(leaderboard(load([arguments.output]))):
            print(line)
        print(f"{len(folders)} runs in {arguments.output}. Next: locos report {arguments.output}")
    return 0


def _whole(text: str) -> int:
    from lm_eval_locos.errors import LocosError

    if not text.strip().isdecimal():
        raise LocosError(f"--k {text!r}: expected whole numbers with commas, such as 5,10,20.")
    return int(text)


def _limit(value: float | None) -> int | float | None:
    """The harness takes a number of documents, or below 1 a share of them."""
    return int(value) if value is not None and value >= 1 else value


def _metadata(text: str | None) -> dict[str, Any]:
    from lm_eval_locos.errors import LocosError

    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise LocosError(f"--metadata is not JSON ({error}). Expected an object.") from None
    if not isinstance(found, dict):
        raise LocosError(f"--metadata {text}: expected a JSON object.")
    return found
