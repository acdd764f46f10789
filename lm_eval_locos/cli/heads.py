"""``locos heads show`` and ``locos heads compare``: what a ranking says, and how sure it is."""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lm_eval_locos.cli import tables
from lm_eval_locos.cli.arguments import Formatter, add_bootstrap, whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from lm_eval_locos.architecture import Head
    from lm_eval_locos.ranking import HeadRanking
    from lm_eval_locos.ranking_stats import Comparison

_LOG = logging.getLogger(__name__)

_SHOW = """\
examples:
  locos heads show out/locos.json
  locos heads show out/locos.json --top 50 --heatmap heads.png
  locos heads show hf://datasets/OWNER/REPO/locos.json --json | jq '.heads[0]'

The table has, per head (LAYER-HEAD, both from 0), its score pooled over all answer steps (over
trials where the file does not count steps), a 95% interval (the file's own, or a bootstrap over
trials; the line below says which), and "in top k": the share of bootstrap resamples of the trials
in which the head is among the top k. A head near 100% is there whatever trials were drawn; at 50%
its place is a matter of luck.
"""

_COMPARE = """\
examples:
  locos heads compare out/locos.json out/wu.json
  locos heads compare out/locos.json hf://datasets/OWNER/REPO/locos.json --k 20 --json

Overlap and Jaccard are of the two top-k sets; Spearman is over all heads that both files score.
Read the overlap beside the two stabilities: the share of a file's top k that survives a bootstrap
resample of its own trials. Two rankings can hardly agree with each other more than each agrees
with itself. Files of models with different numbers of layers or heads are refused.
"""


def add_parser(commands: Any) -> None:
    """Adds ``heads`` with its two subcommands to argparse's ``commands``."""
    heads = commands.add_parser(
        "heads",
        help="show a head ranking, or compare two",
        description="Shows a head ranking, or compares two. FILE is JSON as written by `locos "
        "detect`, by the LOCOS paper's code or by Wu et al.'s, or a path on the Hugging Face hub: "
        "hf://datasets/OWNER/REPO[@REVISION]/PATH.json.",
    )
    actions = heads.add_subparsers(required=True, metavar="ACTION")

    show = actions.add_parser(
        "show",
        help="the top heads with intervals and stability",
        description="Lists the top heads of a ranking, with intervals and how stable the top is.",
        epilog=_SHOW,
        formatter_class=Formatter,
    )
    show.add_argument("file", metavar="FILE", help="a ranking: a path or hf://...")
    show.add_argument(
        "--top", type=whole(1), default=20, metavar="N", help="list N heads (default: %(default)s)"
    )
    show.add_argument(
        "--k", type=whole(1), help="size of the top set whose stability is shown (default: N)"
    )
    show.add_argument(
        "--heatmap",
        metavar="OUT",
        help="draw all heads, layer by head, with the top N framed; OUT ends in .png or .svg",
    )
    show.set_defaults(run=run_show)

    compare = actions.add_parser(
        "compare",
        help="what two rankings of one model have in common",
        description="Compares two rankings of the same model's heads.",
        epilog=_COMPARE,
        formatter_class=Formatter,
    )
    compare.add_argument("a", metavar="A", help="a ranking: a path or hf://...")
    compare.add_argument("b", metavar="B", help="another")
    compare.add_argument(
        "--k", type=whole(1), default=50, help="size of the top sets (default: %(default)s)"
    )
    compare.set_defaults(run=run_compare)

    for parser in (show, compare):
        add_bootstrap(parser, over="trials", least=1, default=1000)
        parser.add_argument(
            "--json", action="store_true", help="print one JSON object instead of a table"
        )


# -- show ----------------------------------------------------------------------------------


def run_show(arguments: argparse.Namespace) -> None:
    """``locos heads show``; raises LocosError for a file or a value that does not do."""
    from lm_eval_locos import ranking_stats
    from lm_eval_locos.errors import RankingError
    from lm_eval_locos.ranking import HeadRanking

    if arguments.heatmap:
        from lm_eval_locos import figures

        figures.checked(arguments.heatmap)  # before the work that a wrong suffix would lose
    ranking = HeadRanking.load(arguments.file)
    top = ranking.top(min(arguments.top, len(ranking.order)))
    k = arguments.k or len(top)
    ranking_stats.check_k(ranking, k)
    bootstrap = {"resamples": arguments.resamples, "seed": arguments.seed}
    intervals = _recorded_intervals(ranking)
    source, stability, lacking = "file" if intervals else None, None, "there is only one trial"
    try:
        stability = ranking_stats.stability(ranking, k, **bootstrap)
        if not intervals and (drawn := ranking_stats.intervals(ranking, **bootstrap)):
            intervals, source = drawn, "bootstrap"
    except RankingError as error:  # uneven lists: order and scores can still be shown
        _LOG.warning("%s", error)
        lacking = "heads have different numbers of scores"
    share = stability.share if stability else {}
    rows = [
        {
            "rank": rank,
            "head": str(head),
            "score": ranking.pooled[head],
            "interval": list(intervals[head]) if head in intervals else None,
            "in_top_k": share.get(head),
        }
        for rank, head in enumerate(top, start=1)
    ]
    if arguments.heatmap:
        figures.heatmap(ranking, arguments.heatmap, marked=top, marked_label=f"top {len(top)}")
    if arguments.json:
        kept = stability.mean if stability else None
        tables.print_json(
            {**tables.facts(ranking), "bootstrap": bootstrap, "k": k, "stability": kept}
            | {"interval_source": source, "heatmap": arguments.heatmap, "heads": rows}
        )
        return

    trials = f"{arguments.resamples} resamples of the trials, seed {arguments.seed}"
    notes = {
        "file": "Intervals: as recorded in the file.",
        "bootstrap": f"Intervals: percentile bootstrap, {trials}.",
        None: f"No intervals: {lacking}.",
    }[source]
    if stability:
        notes += (
            f"\nStability: a resample keeps {stability.mean:.1%} of the top {k} on average "
            f"(bootstrap, {trials})."
        )
    elif source:
        notes += f"\nNo stability: {lacking}."
    if arguments.heatmap:
        notes += f"\nHeatmap: {arguments.heatmap}"
    console = tables.console()
    console.print(tables.facts_table([ranking]), "")
    console.print(_top_table(rows, k, console))
    console.print(notes, soft_wrap=True)


def _recorded_intervals(ranking: HeadRanking) -> Mapping[Head, tuple[float, float]]:
    """The intervals in the file; raises RankingError where one is not (low, high)."""
    from lm_eval_locos.errors import RankingError

    for head, ends in ranking.confidence_intervals.items():
        if len(ends) != 2 or not all(map(math.isfinite, ends)) or ends[0] > ends[1]:
            raise RankingError(
                f"heads={ranking.path}: the confidence interval of head {head} is {list(ends)}. "
                "Expected [low, high]; remove confidence_intervals to have them computed."
            )
    return ranking.confidence_intervals


def _top_table(rows: Sequence[Mapping[str, Any]], k: int, console: Console) -> Table:
    table = tables.table(console, "rank", "head", "score", "95% interval", f"in top {k}")
    number = tables.decimals([row["score"] for row in rows])
    for row in rows:
        ends, share = row["interval"], row["in_top_k"]
        table.add_row(
            str(row["rank"]),
            row["head"],
            number(row["score"]),
            f"[{number(ends[0])}, {number(ends[1])}]" if ends else "-",
            "-" if share is None else f"{share:.1%}",
        )
    return table


# -- compare -------------------------------------------------------------------------------


def run_compare(arguments: argparse.Namespace) -> None:
    """``locos heads compare``; raises LocosError for files or a value that do not do."""
    from lm_eval_locos import ranking_stats
    from lm_eval_locos.errors import RankingError
    from lm_eval_locos.ranking import HeadRanking

    k, bootstrap = arguments.k, {"resamples": arguments.resamples, "seed": arguments.seed}
    rankings = [HeadRanking.load(path) for path in (arguments.a, arguments.b)]
    warnings = ranking_stats.mismatches(*rankings)
    comparison = ranking_stats.compare(*rankings, k)
    kept: list[float | None] = []
    for ranking in rankings:
        try:
            found = ranking_stats.stability(ranking, k, **bootstrap)
        except RankingError as error:  # uneven lists: the rest can still be compared
            warnings.append(str(error))
            found = None
        kept.append(found.mean if found else None)
    for warning in warnings:
        _LOG.warning("%s and %s: %s", arguments.a, arguments.b, warning)
    only = (comparison.only_a, comparison.only_b)
    if arguments.json:
        shared = asdict(comparison)
        sides = {}
        for name, ranking, mean, ones in zip("ab", rankings, kept, only, strict=True):
            del shared[f"only_{name}"]
            rows = [asdict(one) | {"head": str(one.head)} for one in ones]
            sides[name] = {**tables.facts(ranking), "stability": mean, "only": rows}
        tables.print_json(shared | {"bootstrap": bootstrap, "warnings": warnings} | sides)
        return

    console = tables.console()
    console.print(tables.facts_table(rankings), "")
    console.print(_agreement(comparison, kept))
    for name, other, ones in (("A", "B", only[0]), ("B", "A", only[1])):
        if ones:
            console.print(f"\nOnly in the top {k} of {name}:", soft_wrap=True)
            table = tables.table(console, "head", f"rank in {name}", f"rank in {other}")
            for one in ones:
                table.add_row(str(one.head), str(one.rank), str(one.other_rank or "no score"))
            console.print(table)


def _agreement(comparison: Comparison, kept: Sequence[float | None]) -> Table:
    k, rho = comparison.k, comparison.spearman
    table = tables.grid(1)
    table.add_row("overlap", f"{comparison.overlap} of the top {k} ({comparison.overlap / k:.1%})")
    table.add_row("Jaccard", f"{comparison.jaccard:.3f}")
    table.add_row(
        "Spearman",
        ("undefined" if rho is None else f"{rho:.3f}")
        + f" over the {comparison.common} heads that both score",
    )
    for name, mean in zip("AB", kept, strict=True):
        table.add_row(
            f"stability of {name}",
            "unknown (needs several trials)"
            if mean is None
            else f"{mean:.1%} of its top {k} kept by a resample of its trials",
        )
    return table
