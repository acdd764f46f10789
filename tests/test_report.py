"""`locos report`: reading files, pairing runs, numbers, refusals."""

from __future__ import annotations

import argparse
import json
import math
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_files import METRIC, TASK, documents, sample, sha, study, write_ranking, write_run

from lm_eval_locos.cli import report
from lm_eval_locos.errors import LocosError
from lm_eval_locos.reporting.html import page
from lm_eval_locos.reporting.leaderboard import leaderboard
from lm_eval_locos.reporting.results import load
from lm_eval_locos.reporting.tables import to_csv, to_json
from lm_eval_locos.statistics import FamilyScores, specificity

FAST = {"resamples": 200}


def scored(family: str, scores) -> list[dict]:
    docs = documents(family, len(scores))
    return [sample(doc, METRIC[family], float(s)) for doc, s in zip(docs, scores, strict=True)]


def tasks(**scores) -> dict[str, list[dict]]:
    return {family: scored(family, values) for family, values in scores.items()}


def only(board, **wanted):
    found = [r for r in board.rows if all(getattr(r, k) == v for k, v in wanted.items())]
    assert len(found) == 1, [r.name for r in found]
    return found[0]


def board_of(path, **more):
    return leaderboard(load([path]), **(FAST | more))


BASE = {"nolima": [1, 1, 1, 0] * 5, "parametric": [1, 1, 1, 1, 1, 1, 1, 0] * 2}
HURT = {"nolima": [1, 0, 0, 0] * 5, "parametric": [1, 1, 1, 0, 1, 1, 1, 0] * 2}
DROPS = {"nolima": (15 - 5) / 15, "parametric": (14 - 12) / 14}


@pytest.fixture
def ranking(tmp_path):
    return write_ranking(tmp_path / "locos.json")


@pytest.fixture
def pair(tmp_path, ranking):
    """A baseline and top:5, in one folder."""
    out = tmp_path / "out"
    write_run(out, tasks(**BASE))
    write_run(out, tasks(**HURT), condition="top:5", ranking=ranking, number=1)
    return out


# -- numbers -------------------------------------------------------------------------------


def test_drops_and_specificity_are_the_ones_by_hand(pair):
    row = only(board_of(pair), condition="top:5")
    for family, drop in DROPS.items():
        cell = row.cells[family]
        assert cell.drop.value == pytest.approx(drop)
        assert cell.score.value == pytest.approx(sum(HURT[family]) / len(HURT[family]))
        assert cell.baseline.value == pytest.approx(sum(BASE[family]) / len(BASE[family]))
        assert cell.difference.value == pytest.approx(cell.baseline.value - cell.score.value)
        assert cell.paired
        assert cell.documents == len(BASE[family])
    assert (row.cells["nolima"].lost, row.cells["nolima"].gained) == (10, 0)
    assert row.specificity.value == pytest.approx(DROPS["nolima"] - DROPS["parametric"])
    assert row.retrieval_drop.value == pytest.approx(DROPS["nolima"])
    assert row.k == 5
    assert len(row.heads) == 5


def test_intervals_are_those_of_the_statistics_whatever_the_order_of_the_lines(pair):
    row = only(board_of(pair), condition="top:5")
    families = {}
    for family in ("nolima", "parametric"):
        docs = documents(family, len(BASE[family]))
        order = sorted(range(len(docs)), key=lambda i, d=docs: sha(json.dumps(d[i])))
        families[family] = FamilyScores(
            [BASE[family][i] for i in order],
            [HURT[family][i] for i in order],
            clusters=[docs[i]["cluster"] for i in order],
            side="control" if family == "parametric" else "retrieval",
        )
    expected = specificity(families, **FAST)
    assert row.specificity == expected.specificity
    assert row.controls == expected.controls
    assert row.cells["nolima"].drop == expected.families["nolima"].drop
    for path in pair.rglob("samples_*.jsonl"):
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[::-1]))
    assert only(board_of(pair), condition="top:5").specificity == row.specificity


def test_random_control_and_holm_over_k(tmp_path, ranking):
    out = tmp_path / "out"
    write_run(out, tasks(**BASE))
    n = BASE["nolima"]
    top = {2: [1, 1, 0, 0] * 5, 5: [1, 0, 0, 0] * 5}
    # By k and seed: nolima's scores; parametric stays as it is.
    drawn = {2: [n, [1, 1, 0, 0] * 5, n], 5: [n, n, n]}
    number = 0
    for k in (2, 5):
        runs = [(f"top:{k}", top[k])]
        runs += [(f"random:{k}:{seed}", scores) for seed, scores in enumerate(drawn[k])]
        for condition, scores in runs:
            number += 1
            found = tasks(nolima=scores, parametric=BASE["parametric"])
            write_run(out, found, condition=condition, ranking=ranking, number=number)
    board = board_of(out)
    two, five = only(board, condition="top:2"), only(board, condition="top:5")
    assert two.random.values == pytest.approx((0, 1 / 3, 0))
    assert two.random.p == pytest.approx((1 + 1) / (1 + 3))  # one random set is as specific
    assert five.random.p == pytest.approx((1 + 0) / (1 + 3))
    assert five.random.p_holm == pytest.approx(2 * 0.25)
    assert two.random.p_holm == pytest.approx(0.5)
    control = only(board, condition="random:2")
    assert control.seeds == (0, 1, 2)
    assert control.specificity.value == pytest.approx((1 / 3) / 3)
    assert control.spread["nolima"] == pytest.approx((0.5, 0.75))
    assert any("3 seeds" in warning and "0.25" in warning for warning in board.warnings)


def holm_slowly(ps: list[float]) -> list[float]:
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted = [0.0] * len(ps)
    for place, i in enumerate(order):
        earlier = [(len(ps) - q) * ps[j] for q, j in enumerate(order[: place + 1])]
        adjusted[i] = min(1.0, max(earlier))
    return adjusted


def test_family_p_values_are_adjusted_over_k_and_families(tmp_path, ranking):
    out = tmp_path / "out"
    write_run(out, tasks(**BASE))
    for number, (k, lost) in enumerate([(2, 4), (5, 9), (8, 12)], start=1):
        hurt = [0] * lost + BASE["nolima"][lost:]
        found = tasks(nolima=hurt, parametric=HURT["parametric"])
        write_run(out, found, condition=f"top:{k}", ranking=ranking, number=number)
    rows = [row for row in board_of(out).rows if row.kind == "top"]
    cells = [row.cells[family] for row in rows for family in ("nolima", "parametric")]
    assert len(cells) == 6
    expected = holm_slowly([cell.p for cell in cells])
    assert [cell.p_holm for cell in cells] == pytest.approx(expected)


def test_tasks_of_one_family_are_put_together(tmp_path, ranking):
    base, hurt = tasks(nolima=BASE["nolima"]), tasks(nolima=HURT["nolima"])

    def two(run):
        entries = run["nolima"]
        return {"nolima_250": entries[:8], "nolima_500": entries[8:]}

    metric = {"nolima_250": "contains", "nolima_500": "contains"}
    out = tmp_path / "out"
    METRIC.update(metric)
    try:
        write_run(out, two(base))
        write_run(out, two(hurt), condition="top:5", ranking=ranking, number=1)
    finally:
        for name in metric:
            del METRIC[name]
    cell = only(board_of(out), condition="top:5").cells["nolima"]
    assert cell.tasks == ("nolima_250", "nolima_500")
    assert cell.documents == 20
    assert cell.drop.value == pytest.approx(DROPS["nolima"])


def test_a_baseline_at_the_floor_has_no_drop(tmp_path, ranking):
    out = tmp_path / "out"
    zero = {"nolima": [0] * 20, "parametric": BASE["parametric"]}
    write_run(out, tasks(**zero))
    write_run(out, tasks(**zero), condition="top:5", ranking=ranking, number=1)
    row = only(board_of(out), condition="top:5")
    assert row.cells["nolima"].status == "undefined (floor)"
    assert row.cells["nolima"].drop.value is None
    assert row.specificity.value is None
    assert json.loads(to_json(board_of(out)))


def test_skipped_documents_are_left_out_of_both_sides(tmp_path, ranking):
    out = tmp_path / "out"
    write_run(out, tasks(**BASE))
    hurt = tasks(**HURT)
    del hurt["nolima"][0][METRIC["nolima"]]  # the baseline had it right
    write_run(out, hurt, condition="top:5", ranking=ranking, number=1)
    cell = only(board_of(out), condition="top:5").cells["nolima"]
    assert (cell.documents, cell.skipped) == (19, 1)
    assert cell.drop.value == pytest.approx((14 - 4) / 14)


def test_without_samples_drops_are_unpaired_and_marked(tmp_path, ranking):
    out = tmp_path / "out"
    write_run(out, tasks(**BASE))
    write_run(out, tasks(**HURT), condition="top:5", ranking=ranking, number=1, samples=False)
    for seed in range(3):
        write_run(
            out,
            tasks(**BASE),
            condition=f"random:5:{seed}",
            ranking=ranking,
            number=2 + seed,
            samples=False,
        )
    row = only(board_of(out), condition="top:5")
    cell = row.cells["nolima"]
    assert not cell.paired
    assert cell.drop.value == pytest.approx(DROPS["nolima"])
    assert cell.drop.interval is None
    assert "unpaired" in cell.drop.reason
    assert row.specificity.value == pytest.approx(DROPS["nolima"] - DROPS["parametric"])
    assert row.specificity.interval is None
    assert row.controls_held is None
    assert row.random.p == pytest.approx(1 / 4)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=4, max_size=12))
def test_paired_and_unpaired_agree_on_the_values(tmp_path_factory, scores):
    folder = tmp_path_factory.mktemp("runs")
    made = write_ranking(folder / "r.json")
    base, hurt = ([pair[side] for pair in scores] for side in (0, 1))
    values = []
    for samples in (True, False):
        out = folder / str(samples)
        write_run(out, tasks(nolima=base), samples=samples)
        write_run(
            out, tasks(nolima=hurt), condition="top:5", ranking=made, number=1, samples=samples
        )
        cell = only(board_of(out), condition="top:5").cells["nolima"]
        values.append((cell.score.value, cell.baseline.value, cell.difference.value))
    assert values[0] == pytest.approx(values[1])


def test_a_task_of_another_kind_is_shown_but_not_in_the_specificity(tmp_path, ranking):
    out = tmp_path / "out"
    METRIC["hellaswag"] = "acc"
    try:
        other = {"hellaswag": scored("hellaswag", [1, 0] * 8)}
        worse = {"hellaswag": scored("hellaswag", [1, 0, 0, 0] * 4)}
        write_run(out, tasks(**BASE) | other)
        write_run(out, tasks(**HURT) | worse, condition="top:5", ranking=ranking, number=1)
    finally:
        del METRIC["hellaswag"]
    board = board_of(out)
    assert board.families == ("nolima", "parametric", "hellaswag")
    row = only(board, condition="top:5")
    assert row.cells["hellaswag"].drop.value == pytest.approx(0.5)
    assert row.cells["hellaswag"].paired
    assert row.specificity.value == pytest.approx(DROPS["nolima"] - DROPS["parametric"])


def test_the_specificity_tasks_own_numbers(tmp_path, ranking):
    conditions = ["baseline", "top:5", "layer-random:5:0", "layer-random:5:1"]
    result = specificity(
        {
            "nolima": FamilyScores(BASE["nolima"], HURT["nolima"]),
            "parametric": FamilyScores(BASE["parametric"], HURT["parametric"], side="control"),
        },
        random=[BASE, BASE],
        **FAST,
    )
    numbers = {
        "specificity": result.specificity.value,
        "specificity_stderr": result.specificity.standard_error,
        "retrieval_drop": result.retrieval_drop.value,
        "control_drop": result.control_drop.value,
        "controls_held": 0,
        "random_specificity": result.random_specificity,
        "p_random": result.p_random,
        "nolima_baseline": 0.75,
        "nolima_ablated": 0.25,
        "nolima_drop": DROPS["nolima"],
        "parametric_baseline": "N/A",
        "parametric_ablated": "N/A",
        "parametric_drop": "N/A",
    }
    own = {
        "k": 5,
        "conditions": conditions,
        "families": {"nolima": {"metric": "contains"}, "parametric": {"metric": "exact_match"}},
        "statistics": json.loads(json.dumps(result.as_dict())),
    }

    def change(content):
        content["results"] = {
            "locos_specificity": {f"{name},none": value for name, value in numbers.items()}
        }
        task = content["configs"].pop(TASK["nolima"])
        task["metadata"]["locos_specificity"] = own
        content["configs"] = {"locos_specificity": task}

    asked = tasks(nolima=[1, 1])
    answers = {"baseline": ("Here.", 1.0), "top:5": ("Nowhere.", 0.0)}
    asked["nolima"][0]["doc"]["locos"] = {
        "conditions": {c: {"answer": a, "score": s} for c, (a, s) in answers.items()}
    }
    asked["nolima"][1]["doc"]["locos"] = {  # its prompt did not fit
        "conditions": {c: {"answer": None, "score": None} for c in answers}
    }
    path = write_run(tmp_path, asked, condition="top:50", ranking=ranking, change=change)
    samples = next(path.parent.glob("samples_nolima_*"))
    samples.rename(str(samples).replace("samples_nolima", "samples_locos_specificity"))
    row = only(board_of(tmp_path), source="locos_specificity")
    assert len(row.cells["nolima"].pairs) == 1
    assert page(board_of(tmp_path)).count("Nowhere.") == 1
    assert (row.condition, row.k) == ("top:5", 5)  # not the model's own default
    assert row.specificity == result.specificity
    assert row.cells["nolima"].drop == result.families["nolima"].drop
    assert row.cells["nolima"].p == result.families["nolima"].p
    assert row.controls == result.controls
    assert (row.random.p, row.random.seeds, row.random.kind) == (1 / 3, 2, "layer-random")
    before, after = row.cells["nolima"].pairs[0]
    assert (before.response, after.response) == ("Here.", "Nowhere.")
    assert (before.scores, after.scores) == ({"contains": 1.0}, {"contains": 0.0})
    del own["statistics"]
    write_run(tmp_path, tasks(nolima=[1]), condition="top:50", ranking=ranking, change=change)
    row = only(board_of(tmp_path), source="locos_specificity")
    assert row.specificity.standard_error == result.specificity.standard_error
    assert row.specificity.interval is None
    assert row.cells["parametric"].score.value is None


def predicted(content):
    """A results file as the harness writes it with --predict_only."""
    for name, result in content["results"].items():
        kept = {key: value for key, value in result.items() if "," not in key}
        content["results"][name] = kept | {"bypass,none": 999, "bypass_stderr,none": "N/A"}
        content["configs"][name]["metric_list"] = [{"metric": "bypass"}]


def only_answers(**scores):
    found = tasks(**scores)
    for family, entries in found.items():
        for entry in entries:
            del entry[METRIC[family]]
            entry |= {"bypass": 0.0, "metrics": ["bypass"]}
            entry[METRIC[family]] = 0.0  # `write_run` averages it; `predicted` takes it out
    return found


def test_runs_with_predict_only_have_no_score(pair, ranking, capsys):
    before = board_of(pair)
    answers = only_answers(**HURT)
    path = write_run(pair, answers, condition="top:9", ranking=ranking, number=2, change=predicted)
    board = board_of(pair)
    assert [row.condition for row in board.rows] == ["baseline", "top:5"]
    assert only(board, condition="top:5") == only(before, condition="top:5")
    said = [warning for warning in board.warnings if "--predict_only" in warning]
    names = ", ".join(TASK[family] for family in HURT)
    assert said == [
        f"{path} (top:9): no score for {names} (--predict_only). Run it again without "
        "--predict_only."
    ]
    run_cli(pair, "--resamples", 200)
    printed = capsys.readouterr().out
    assert "no score for" in printed
    assert "floor" not in printed
    assert "bypass" not in printed
    assert "999" not in printed
    with pytest.raises(LocosError, match=r"none of the results files has a score.*predict_only"):
        board_of(path)


def test_one_task_without_a_score_leaves_the_others(tmp_path, ranking):
    write_run(tmp_path, tasks(**BASE))
    one = tasks(nolima=HURT["nolima"])
    write_run(tmp_path, one, condition="top:5", ranking=ranking, number=1)
    two = only_answers(parametric=HURT["parametric"])
    write_run(tmp_path, two, condition="top:5", ranking=ranking, number=2, change=predicted)
    board = board_of(tmp_path)
    assert set(only(board, condition="top:5").cells) == {"nolima"}
    assert any("no score for locos_parametric" in warning for warning in board.warnings)


# -- which runs belong together ------------------------------------------------------------


def test_rows_are_in_the_same_order_wherever_the_files_are(tmp_path):
    out = study(tmp_path / "s", ks=(5, 20), seeds=2, n=6)
    first = board_of(out)
    names = [(row.ranking, row.name) for row in first.rows]
    assert names[0] == ("", "baseline")
    kinds = ["top:5", "top:20", "layer-random:5 × 2 seeds", "layer-random:20 × 2 seeds"]
    assert names[1:] == [(m, k) for m in ("locos", "wu") for k in kinds]
    files = list(out.rglob("results_*.json"))
    assert [r.name for r in leaderboard(load(files[::-1]), **FAST).rows] == [n for _, n in names]
    assert to_csv(leaderboard(load(files[::-1]), **FAST)) == to_csv(first)


def test_names_of_rankings(tmp_path):
    write_run(tmp_path, tasks(**BASE))
    made = [("a", "locos"), ("b", "locos"), ("c", "unknown"), ("d", "wu")]
    for number, (name, method) in enumerate(made, start=1):
        path = write_ranking(tmp_path / f"{name}.json", method + name)
        write_run(
            tmp_path,
            tasks(**HURT),
            condition="top:5",
            ranking=path,
            method=method,
            number=number,
        )
    names = {row.ranking_path and row.ranking_path[-6:]: row for row in board_of(tmp_path).rows}
    assert names["c.json"].ranking == "c"
    assert names["d.json"].ranking == "wu"
    for name in "ab":
        row = names[f"{name}.json"]
        assert row.ranking == f"locos {row.ranking_sha256[:7]}"


def test_each_model_has_its_own_baseline(tmp_path, ranking):
    out = tmp_path / "out"
    for model, base in (("org/a", BASE), ("org/b", HURT)):
        write_run(out, tasks(**base), model=model)
        write_run(out, tasks(**HURT), model=model, condition="top:5", ranking=ranking, number=1)
    board = board_of(out)
    assert only(board, model="org/a", kind="top").cells["nolima"].drop.value > 0.5
    assert only(board, model="org/b", kind="top").cells["nolima"].drop.value == 0


def test_a_run_without_ablation_of_our_own_model_type_is_a_baseline(tmp_path, ranking):
    write_run(tmp_path, tasks(**BASE), condition="baseline", ranking=ranking)
    write_run(tmp_path, tasks(**HURT), condition="top:5", ranking=ranking, number=1)
    row = only(board_of(tmp_path), condition="top:5")
    assert row.cells["nolima"].paired


def test_tasks_of_several_commands_make_one_row(tmp_path, ranking):
    base, hurt = tasks(**BASE), tasks(**HURT)
    for number, family in enumerate(BASE):
        write_run(tmp_path, {family: base[family]}, number=number)
        one = {family: hurt[family]}
        write_run(tmp_path, one, condition="top:5", ranking=ranking, number=10 + number)
    row = only(board_of(tmp_path), condition="top:5")
    assert set(row.cells) == {"nolima", "parametric"}
    assert row.specificity.value == pytest.approx(DROPS["nolima"] - DROPS["parametric"])
    assert len(row.runs) == 2


def test_the_newer_of_two_equal_runs_counts(pair, ranking):
    write_run(pair, tasks(**BASE), condition="top:5", ranking=ranking, number=2)
    board = board_of(pair)
    assert only(board, condition="top:5").cells["nolima"].drop.value == 0
    assert any("twice" in warning for warning in board.warnings)


def test_without_a_baseline_scores_are_shown_and_the_next_step(tmp_path, ranking):
    write_run(tmp_path, tasks(**HURT), condition="top:5", ranking=ranking)
    board = board_of(tmp_path)
    assert only(board, condition="top:5").cells["nolima"].drop is None
    assert "--model hf" in board.warnings[0]


def test_a_named_baseline_is_used_alone(pair, tmp_path, ranking):
    other = write_run(tmp_path / "other", tasks(**HURT), number=3)
    board = leaderboard(load([pair]), baselines=load([other]), **FAST)
    assert only(board, condition="top:5").cells["nolima"].drop.value == 0
    assert [row.runs for row in board.rows if row.kind == "baseline"] == [(str(other),)]
    with pytest.raises(LocosError, match=r"ran under top:5.*num_heads=0"):
        leaderboard(load([pair]), baselines=load([pair]), **FAST)


# -- refusals ------------------------------------------------------------------------------


def test_other_documents_are_refused(tmp_path, ranking):
    write_run(tmp_path, tasks(nolima=[1] * 8))
    write_run(tmp_path, tasks(nolima=[1] * 12), condition="top:5", ranking=ranking, number=1)
    with pytest.raises(LocosError, match=r"nolima: .*differ: 8 there, 12 here, 8 in both"):
        board_of(tmp_path)
    for path in tmp_path.rglob("samples_*"):
        path.unlink()
    with pytest.raises(LocosError, match="documents differ: the hash of the data"):
        board_of(tmp_path)


def test_other_prompts_are_refused(tmp_path, ranking):
    write_run(tmp_path, tasks(nolima=[1] * 8))
    changed = tasks(nolima=[1] * 8)
    changed["nolima"][3]["prompt_hash"] = "another"
    write_run(tmp_path, changed, condition="top:5", ranking=ranking, number=1)
    with pytest.raises(LocosError, match="prompts of 1 of 8 documents differ"):
        board_of(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("chat_template_sha", None, None),  # not stated: the prompts themselves are compared
        ("chat_template_sha", "f00", "chat template .* there, f00 here"),
        ("n-shot", {TASK["nolima"]: 4}, "few-shot examples 0 there, 4 here"),
    ],
)
def test_other_settings_are_refused(tmp_path, ranking, key, value, said):
    write_run(tmp_path, tasks(nolima=[1] * 8))
    write_run(
        tmp_path,
        tasks(nolima=[1] * 8),
        condition="top:5",
        ranking=ranking,
        number=1,
        change=lambda content: content.update({key: value}),
    )
    if said is None:
        assert only(board_of(tmp_path), condition="top:5").cells["nolima"].paired
    else:
        with pytest.raises(LocosError, match=said):
            board_of(tmp_path)


def test_another_model_is_no_baseline(tmp_path, ranking):
    base = write_run(
        tmp_path / "base",
        tasks(nolima=[1] * 8),
        change=lambda content: content["config"].update(model_dtype="torch.float32"),
    )
    out = tmp_path / "out"
    write_run(out, tasks(nolima=[1] * 8), condition="top:5", ranking=ranking, number=1)
    board = leaderboard(load([out, base]), **FAST)
    assert only(board, condition="top:5").cells["nolima"].drop is None
    assert "model_dtype is torch.float32 there and torch.bfloat16 here" in " ".join(board.warnings)
    with pytest.raises(LocosError, match=r"different models: model_dtype is torch\.float32 there"):
        leaderboard(load([out]), baselines=load([base]), **FAST)


def test_a_random_control_on_other_documents_is_refused(pair, ranking):
    found = tasks(nolima=[1] * 6, parametric=BASE["parametric"])
    write_run(pair, found, condition="random:5:0", ranking=ranking, number=2)
    with pytest.raises(LocosError, match="documents differ: 20 there, 6 here"):
        board_of(pair)


def test_a_random_control_that_lacks_a_task_is_left_out(pair, ranking):
    found = tasks(nolima=BASE["nolima"])
    write_run(pair, found, condition="random:5:0", ranking=ranking, number=2)
    board = board_of(pair)
    assert only(board, condition="top:5").random is None
    assert any("has no locos_parametric" in warning for warning in board.warnings)


# -- files that are not what they should be ------------------------------------------------


def run_cli(*words: str) -> None:
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["report", *map(str, words)])
    arguments.run(arguments)


def test_what_is_said_about_files_that_do_not_do(tmp_path, pair):
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "results_2026-01-01T00-00-00.json"
    broken.write_text('{"results": ')
    other = tmp_path / "other.json"
    other.write_text('{"a": 1, "b": 2}')
    listed = tmp_path / "list.json"
    listed.write_text("[1]")
    odd = tmp_path / "odd.json"
    odd.write_text('{"results": {"x": 3}, "configs": {"x": {}}, "config": {}}')
    lines = next(pair.rglob("samples_*.jsonl"))
    for path, said in (
        (tmp_path / "empty", "no results_DATE.json in this folder.*--output_path"),
        (tmp_path / "gone", "no such file or folder.*--output_path"),
        (broken, "not JSON.*Run it again"),
        (other, r"not a results file.*seen \['a', 'b'\].*--output_path"),
        (listed, "not a results file.*seen list"),
        (odd, "shape that is not known"),
        (lines, "sample file. Give the results file"),
    ):
        with pytest.raises(LocosError, match=said):
            run_cli(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 21: not a sample"),
        ("[1]", "line 21: not a sample"),
        ('{"filter": "none"}', "line 21: not a sample"),
        (None, "line 21: document .* occurs twice"),
    ],
)
def test_broken_sample_files(pair, line, said):
    path = next(pair.rglob("samples_nolima_*.jsonl"))
    text = path.read_text()
    path.write_text(text + (text.splitlines()[0] if line is None else line) + "\n")
    with pytest.raises(LocosError, match=said):
        board_of(pair)


def test_a_condition_of_a_later_version(pair):
    path = sorted(pair.rglob("results_*.json"))[-1]
    path.write_text(path.read_text().replace('"condition": "top:5"', '"condition": "upside:5"'))
    with pytest.raises(LocosError, match=r"upside:5.*later version"):
        board_of(pair)


def test_metrics(pair):
    with pytest.raises(LocosError, match=r"no metric 'nix'; it has contains.*--metric nolima=NAME"):
        board_of(pair, metrics={"nolima": "nix"})
    assert only(board_of(pair, metrics={"nolima": "contains"}), condition="top:5")


# -- the command ---------------------------------------------------------------------------


def test_the_command_writes_and_prints(pair, tmp_path, capsys):
    run_cli(pair, "--resamples", 200)
    printed = capsys.readouterr().out
    assert "top:5" in printed
    assert f"({100 * DROPS['nolima']:.1f}%)" in printed
    run_cli(pair, "--resamples", 200, "--output", tmp_path / "deep" / "t.txt")
    assert (tmp_path / "deep" / "t.txt").read_text() == printed
    with pytest.raises(LocosError, match="html needs --output"):
        run_cli(pair, "--format", "html")
    (tmp_path / "file").touch()
    with pytest.raises(LocosError, match="cannot be written"):
        run_cli(pair, "--resamples", 200, "--output", tmp_path / "file" / "t.txt")


@pytest.mark.parametrize(
    "words", [["--metric", "nolima"], ["--margin", "5"], ["--resamples", "5"], ["--seed", "x"]]
)
def test_wrong_arguments(pair, words, capsys):
    with pytest.raises(SystemExit):
        run_cli(pair, *words)
    assert words[-1] in capsys.readouterr().err


def test_the_margin_decides_whether_controls_held(pair):
    assert not only(board_of(pair), condition="top:5").controls_held
    assert only(board_of(pair, margin=0.99), condition="top:5").controls_held


def test_a_file_given_twice_counts_once(pair):
    copy = pair / "copy"
    assert len(load([pair, pair])) == 2
    shutil.copytree(pair, copy, ignore=shutil.ignore_patterns("copy"))
    board = board_of(pair)
    assert len(board.rows) == 2
    assert math.isclose(only(board, condition="top:5").cells["nolima"].drop.value, DROPS["nolima"])
