"""The task locos_specificity: prompts and scores are the families' own, numbers add up."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import lm_eval
import pytest
from conftest import REPOSITORY
from lm_eval import evaluator
from lm_eval.api.model import LM
from lm_eval.caching import cache
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from tiny import tiny_model

from lm_eval_locos import specificity as module
from lm_eval_locos.conditions import REQUEST_KEY, Condition
from lm_eval_locos.errors import SKIPPED, DataError
from lm_eval_locos.families import FAMILIES
from lm_eval_locos.model import LocosAblatedLM
from lm_eval_locos.specificity import RESULTS_KEY
from lm_eval_locos.specificity_numbers import metrics, summarise
from lm_eval_locos.specificity_plan import MEMBERS, Plan

RETRIEVAL, CONTROL = FAMILIES[:3], FAMILIES[3:]
TASKS = [MEMBERS[family].task for family in FAMILIES]
SMALL = {"k": 2, "random_seeds": 3, "per_family": 12}


@pytest.fixture(autouse=True)
def bundled(monkeypatch):
    """The bundled sample, and no report of the machine at the end of an evaluation."""
    monkeypatch.setenv("LOCOS_DATA", "bundled")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(evaluator, "add_tokenizer_info", lambda results, lm: None)


def manager(**metadata):
    return TaskManager(
        include_path=str(REPOSITORY / "tasks"), include_defaults=False, metadata=metadata
    )


def load(task="locos_specificity", **metadata):
    return manager(**metadata).load([task])["tasks"][task]


def draw(*parts):
    """A number in [0, 1) that depends on nothing but the parts."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


class Stub(LM):
    """Answers right or wrong by document and condition alone."""

    def __init__(self, condition="baseline", wrong=None, skip=()):
        super().__init__()
        self.condition, self.skip = condition, skip
        self.wrong = wrong or self.usual

    @staticmethod
    def usual(doc, condition):
        odds = {"baseline": 0.2, "top": 0.7 if doc["family"] in RETRIEVAL else 0.3}
        return draw(doc["id"], condition) < odds.get(condition.partition(":")[0], 0.25)

    def generate_until(self, requests, disable_tqdm=False):
        answers = []
        for request in requests:
            condition = request.args[1].get(REQUEST_KEY, self.condition)
            wrong = self.wrong(request.doc, condition)
            text = "Zanzibar" if wrong else f"<think>So.</think>{request.doc['answers'][0]}"
            answers.append(SKIPPED if (request.doc["id"], condition) in self.skip else text)
        return answers

    def loglikelihood(self, requests, disable_tqdm=False):
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def evaluate(model, tasks=("locos_specificity",), metadata=SMALL, **options):
    return lm_eval.simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager(**metadata), **options
    )


def shown(results, task="locos_specificity"):
    """The numbers of the results by metric."""
    return {
        key.removesuffix(",none"): value
        for key, value in results["results"][task].items()
        if key.endswith(",none") and not key.endswith("_stderr_stderr,none")
    }


@pytest.fixture(scope="module")
def whole():
    """One evaluation with the stub, and the task's documents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCOS_DATA", "bundled")
        patch.setattr(evaluator, "add_env_info", lambda results: None)
        patch.setattr(evaluator, "add_tokenizer_info", lambda results, lm: None)
        return evaluate(Stub()), list(load(**SMALL).test_docs())


# -- numbers ----------------------------------------------------------------------------------


def test_numbers_are_those_of_separate_runs_of_the_families_tasks(whole):
    results, documents = whole
    samples = {task: sorted(d["number"] for d in documents if d["task"] == task) for task in TASKS}
    conditions = ["baseline", "top:2", *(f"layer-random:2:{seed}" for seed in range(3))]
    means = {}
    for condition in conditions:
        single = evaluate(Stub(condition), TASKS, {}, samples=samples)["results"]
        means[condition] = {
            family: single[MEMBERS[family].task][f"{MEMBERS[family].metric},none"]
            for family in FAMILIES
        }

    def drops(condition):
        base = means["baseline"]
        return {f: (base[f] - means[condition][f]) / base[f] for f in FAMILIES}

    def dissociation(condition):
        found = drops(condition)
        return sum(found[f] for f in RETRIEVAL) / 3 - sum(found[f] for f in CONTROL) / 2

    numbers = shown(results)
    for family in FAMILIES:
        assert numbers[f"{family}_baseline"] == pytest.approx(means["baseline"][family])
        assert numbers[f"{family}_ablated"] == pytest.approx(means["top:2"][family])
        assert numbers[f"{family}_drop"] == pytest.approx(drops("top:2")[family])
    assert len({means["baseline"][f] for f in FAMILIES}) > 1
    assert numbers["specificity"] == pytest.approx(dissociation("top:2"))
    assert numbers["retrieval_drop"] - numbers["control_drop"] == pytest.approx(
        numbers["specificity"]
    )
    random = [dissociation(c) for c in conditions[2:]]
    assert numbers["random_specificity"] == pytest.approx(sum(random) / 3)
    as_high = sum(value >= numbers["specificity"] for value in random)
    assert numbers["p_random"] == pytest.approx((1 + as_high) / 4)
    for name in ("specificity", "retrieval_drop", "control_drop", "nolima_drop"):
        assert 0 < numbers[f"{name}_stderr"] < 1
    assert numbers["controls_held"] == 0


def test_controls_hold_where_enough_documents_show_no_drop():
    def wrong(doc, condition):
        return condition.startswith("top") and doc["family"] in RETRIEVAL

    options = {"k": 2, "random_seeds": 0, "families": ["babilong", "arithmetic"]}
    found = shown(evaluate(Stub(wrong=wrong), metadata=options))
    assert (found["specificity"], found["controls_held"]) == (1, 1)
    assert (found["random_specificity"], found["p_random"]) == ("N/A", "N/A")
    few = shown(evaluate(Stub(wrong=wrong), metadata=options, limit=10))
    assert (few["specificity"], few["controls_held"]) == (1, 0)


def test_the_table_shows_every_metric_with_its_error(whole):
    rows = {}
    for line in make_table(whole[0]).splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[4]] = cells
    assert rows["arithmetic_ablated"][0] == "locos_specificity [bundled sample]"
    names = [name for name in metrics(FAMILIES) if not name.endswith("_stderr")]
    assert len(names) == 21
    for name in names:
        assert float(rows[name][6]) == pytest.approx(shown(whole[0])[name], abs=5e-5)
        error = shown(whole[0]).get(f"{name}_stderr", "N/A")
        assert rows[name][8] == ("N/A" if error == "N/A" else f"{error:.4f}")
    assert rows["specificity"][5] == "↑"
    assert rows["control_drop"][5] == "↓"


# -- what is not defined ----------------------------------------------------------------------


def test_a_baseline_at_the_floor_is_not_a_pass(caplog):
    results = evaluate(Stub(wrong=lambda doc, condition: True), metadata=SMALL | {"k": 3})
    numbers = shown(results)
    undefined = {name for name, value in numbers.items() if value == "N/A"}
    both = {"specificity", "retrieval_drop", "control_drop", *(f"{f}_drop" for f in FAMILIES)}
    assert undefined >= both | {f"{name}_stderr" for name in both}
    assert undefined >= {"random_specificity", "p_random"}
    assert numbers["controls_held"] == 0
    assert numbers["nolima_baseline"] == 0
    assert "N/A" in make_table(results)
    text = json.dumps(results["results"], allow_nan=False)
    assert json.loads(text)["locos_specificity"]["specificity,none"] == "N/A"
    statistics = results["configs"]["locos_specificity"]["metadata"][RESULTS_KEY]["statistics"]
    assert statistics["families"]["nolima"]["status"] == "undefined (floor)"
    assert "no answer changed under any condition" in caplog.text
    assert "Left out, undefined (floor): parametric, arithmetic" in caplog.text


def test_one_control_at_the_floor_keeps_controls_from_holding():
    def wrong(doc, condition):
        return doc["family"] == "parametric" or (
            condition.startswith("top") and doc["family"] in RETRIEVAL
        )

    found = shown(evaluate(Stub(wrong=wrong), metadata={"k": 2, "random_seeds": 1}))
    assert (found["parametric_drop"], found["arithmetic_drop"]) == ("N/A", 0)
    assert (found["control_drop"], found["controls_held"]) == (0, 0)


@pytest.mark.parametrize("limit", [1, 3, 4])
def test_families_that_a_limit_leaves_out_are_undefined_and_named(limit):
    results = evaluate(Stub(), limit=limit)
    numbers = shown(results)
    recorded = results["configs"]["locos_specificity"]["metadata"][RESULTS_KEY]
    assert recorded["missing"] == list(FAMILIES[limit:])
    assert numbers[f"{FAMILIES[limit]}_baseline"] == "N/A"
    assert (numbers["control_drop"] == "N/A") == (limit < 4)
    assert numbers["controls_held"] == 0
    assert recorded["controls_held"] is False


def test_a_missing_control_family_is_no_pass_however_well_the_other_holds():
    scores = {"baseline": 1.0, "top:2": 1.0}
    records = [
        {"id": f"{family}{i}", "family": family, "cluster": f"{i}", "scores": scores}
        for family in ("nolima", "arithmetic")
        for i in range(200)
    ]
    assert summarise(records, ["nolima", "arithmetic"], list(scores)).numbers["controls_held"] == 1
    found = summarise(records, ["nolima", "parametric", "arithmetic"], list(scores))
    assert found.result.controls_held
    assert found.numbers["controls_held"] == 0
    assert found.missing == ("parametric",)


def test_a_prompt_skipped_under_one_condition_is_left_out_of_all_and_counted(whole, caplog):
    nolima = [doc["id"] for doc in whole[1] if doc["family"] == "nolima"]
    skip = {(nolima[0], "baseline"), (nolima[0], "top:2"), (nolima[1], "layer-random:2:1")}
    results = evaluate(Stub(skip=skip))
    recorded = results["configs"]["locos_specificity"]["metadata"][RESULTS_KEY]
    assert recorded["skipped"] == dict.fromkeys(FAMILIES, 0) | {"nolima": 2}
    assert recorded["documents"] == dict.fromkeys(FAMILIES, 12) | {"nolima": 10}
    assert "nolima: 2 documents skipped" in caplog.text
    kept = [not Stub.usual({"family": "nolima", "id": i}, "baseline") for i in nolima[2:]]
    assert shown(results)["nolima_baseline"] == pytest.approx(sum(kept) / 10)
    sample = next(s for s in results["samples"]["locos_specificity"] if s["doc"]["id"] == nolima[0])
    assert sample["doc"]["locos"]["conditions"]["top:2"] == {"answer": None, "score": None}


def test_all_prompts_skipped(whole):
    ids = [doc["id"] for doc in whole[1]]
    results = evaluate(Stub(skip=set(itertools.product(ids, Plan.of(SMALL).conditions))))
    values = {v for n, v in shown(results).items() if n != "controls_held"}
    assert (values, shown(results)["controls_held"]) == ({"N/A"}, 0)
    recorded = results["configs"]["locos_specificity"]["metadata"][RESULTS_KEY]
    assert recorded["statistics"] is None


def test_the_order_of_documents_does_not_matter():
    conditions = Plan.of(SMALL).conditions
    records = [
        {
            "id": f"{i}",
            "family": FAMILIES[i % 5],
            "cluster": f"{i % 7}",
            "scores": {c: float(draw(i, c) < 0.6) for c in conditions},
        }
        for i in range(100)
    ]
    one = summarise(records, FAMILIES, conditions)
    assert summarise(records[::-1], FAMILIES, conditions).numbers == one.numbers
    assert one.numbers["specificity"] != "N/A"


# -- documents and requests -------------------------------------------------------------------


def test_any_beginning_is_balanced():
    task = load()
    families = [doc["family"] for doc in task.test_docs()]
    total = Counter(families)
    assert total["nolima"] == 200  # the default of per_family
    seen = Counter()
    for family in families:
        seen[family] += 1
        most = max(seen.values())
        assert all(seen[name] >= min(most - 1, total[name]) for name in total)
    lite = Counter(doc["family"] for doc in load("locos_specificity_lite").test_docs())
    assert lite == dict.fromkeys(FAMILIES, 20)


def test_documents_are_the_first_of_their_task_or_spread_over_it():
    task = load(per_family=30)
    numbers = {f: [d["number"] for d in task.test_docs() if d["family"] == f] for f in FAMILIES}
    assert all(numbers[f] == list(range(30)) for f in FAMILIES if f != "musique")
    size = len(task.members["musique"].test_docs())
    gaps = [b - a for a, b in itertools.pairwise(sorted(numbers["musique"]))]
    assert max(gaps) <= 3 * size / 30
    for size in (1, 2, 3, 7, 10, 150, 2417):
        assert sorted(module._spread(size)) == list(range(size))
    for doc in task.test_docs():
        own = task._own(doc)
        assert {key: own[key] for key in ("id", "prompt", "answers", "cluster")} == {
            key: doc[key] for key in ("id", "prompt", "answers", "cluster")
        }


def chat(messages, add_generation_prompt=True):
    return json.dumps([*messages, add_generation_prompt])


@pytest.mark.parametrize(
    "style",
    [
        {},
        {"system_instruction": "Be brief."},
        {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": chat},
        {"apply_chat_template": True, "fewshot_as_multiturn": False, "chat_template": chat},
    ],
    ids=["plain", "system", "turns", "one turn"],
)
def test_requests_are_those_of_the_families_own_tasks(style):
    options = {"lengths": [200, 300], "k": 2, "random_seeds": 1, "per_family": 4}
    task = load(**options)
    task.build_all_requests(**style)
    own = {}
    for name, member in manager(lengths=[200, 300]).load(TASKS)["tasks"].items():
        numbers = [doc["number"] for doc in task.test_docs() if doc["task"] == name]
        member.build_all_requests(samples=numbers, **style)
        own |= {i.doc["id"]: i for i in member.instances}
    assert len(own) == 20
    asked = Counter()
    for instance in task.instances:
        context, kwargs = instance.args
        alone = own[instance.doc["id"]]
        assert context == alone.args[0]
        assert kwargs == alone.args[1] | {REQUEST_KEY: task.plan.conditions[instance.idx]}
        asked[instance.doc["family"], kwargs[REQUEST_KEY]] += 1
    conditions = ("baseline", "top:2", "layer-random:2:0")
    assert asked == dict.fromkeys(itertools.product(FAMILIES, conditions), 4)


def test_generation_arguments_from_the_command_line_reach_every_family():
    results = evaluate(Stub(), limit=5, gen_kwargs={"max_gen_toks": 7}, log_samples=True)
    for sample in results["samples"]["locos_specificity"]:
        kwargs = sample["arguments"][0][1]
        assert kwargs["max_gen_toks"] == 7
        assert kwargs["until"] == load(sample["doc"]["task"]).config.generation_kwargs["until"]


def test_cached_requests_never_meet_other_conditions(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "PATH", str(tmp_path))

    def conditions(**metadata):
        task = load(**(SMALL | metadata))
        task.build_all_requests(limit=2, cache_requests=True)
        return [i.args[1][REQUEST_KEY] for i in task.instances]

    assert conditions() == list(Plan.of(SMALL).conditions) * 2
    assert "top:3" in conditions(k=3)
    assert len(conditions(random_seeds=1)) == 6
    assert len(list(tmp_path.iterdir())) == 3
    assert conditions() == list(Plan.of(SMALL).conditions) * 2
    assert len(list(tmp_path.iterdir())) == 3


# -- metadata ---------------------------------------------------------------------------------


def test_the_plan_s_defaults_and_where_k_comes_from():
    plan = Plan.of({"version": 1.0, "pretrained": "x"})
    assert plan.families == FAMILIES
    assert plan.conditions[:2] == ("baseline", "top:50")
    assert plan.conditions[2:] == tuple(f"layer-random:50:{seed}" for seed in range(10))
    assert [str(Condition.parse(text)) for text in plan.conditions] == list(plan.conditions)
    assert Plan.of({"k": 7}).k == Plan.of({"num_heads": 7}).k == 7
    assert Plan.of({"k": 7, "num_heads": 7}).k == 7
    assert Plan.of({"random_seeds": [4, 2], "random": "random", "k": 1}).conditions[2:] == (
        "random:1:4",
        "random:1:2",
    )
    assert Plan.of({"families": "parametric,nolima"}).families == ("nolima", "parametric")
    assert Plan.of({"per_family": "all"}).per_family is None


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"k": 0}, "k=0: expected a whole number, at least 1 heads"),
        ({"k": 2.5}, "k=2.5: expected a whole number"),
        ({"num_heads": 0}, "num_heads=0: expected"),
        ({"k": 3, "num_heads": 4}, "num_heads=4 in --model_args and k=3 in --metadata disagree"),
        ({"random_seeds": -1}, "random_seeds=-1: expected how many"),
        ({"random_seeds": [1, 1]}, r"random_seeds=\[1, 1\]: .*different"),
        ({"random_seeds": True}, "random_seeds=True"),
        ({"random_seeds": "ten"}, "random_seeds='ten'"),
        ({"random": "none"}, "random='none': expected one of layer-random, random"),
        ({"families": ["nolima", "squad"]}, "families=.*squad.*expected different names out of"),
        ({"families": ["nolima", "nolima"]}, "families=.*different"),
        ({"families": []}, "families=.*retrieval family"),
        ({"families": 3}, "families=3"),
        ({"families": ["nolima", "musique"]}, "Name at least one of each"),
        ({"per_family": 0}, "per_family=0: expected a whole number, at least 1, 'all'"),
        ({"select": "bottom"}, "select=bottom: .*Leave select out"),
        ({"lengths": "x"}, "lengths='x'"),
    ],
)
def test_wrong_metadata_is_a_data_error(metadata, message):
    with pytest.raises(DataError, match=message):
        load(**metadata)


# -- records of a run -------------------------------------------------------------------------


def test_the_results_file_holds_provenance_and_statistics(whole):
    results, documents = whole
    config = json.loads(json.dumps(results["configs"], default=str, allow_nan=False))
    metadata = config["locos_specificity"]["metadata"]
    data = metadata["locos_data"]
    assert (data["source"], data["documents"]) == ("bundled", len(documents))
    assert set(data["families"]) == set(FAMILIES)
    assert data["families"]["nolima"]["split"] == "evaluation"
    found = metadata[RESULTS_KEY]
    assert found["k"] == 2
    assert found["conditions"] == list(Plan.of(SMALL).conditions)
    assert found["families"]["parametric"] == {
        "task": "locos_parametric",
        "side": "control",
        "metric": "exact_match",
        "floor": 0.0,
        "num_fewshot": 4,
        "generation_kwargs": {"do_sample": False, "max_gen_toks": 32, "until": ["\n"]},
    }
    assert found["documents"] == dict.fromkeys(FAMILIES, 12)
    statistics = found["statistics"]
    assert statistics["specificity"]["value"] == shown(results)["specificity"]
    assert statistics["families"]["nolima"]["clusters"] < 12  # needles, not documents
    assert len(statistics["random"]["values"]) == 3


def test_samples_show_answers_and_scores_by_condition(whole, tmp_path):
    results = whole[0]
    tracker = EvaluationTracker(output_path=str(tmp_path))
    tracker.general_config_tracker.model_name_sanitized = "stub"
    tracker.save_results_aggregated(results={"results": results["results"]}, samples=None)
    tracker.save_results_samples("locos_specificity", results["samples"]["locos_specificity"])
    (path,) = (tmp_path / "stub").glob("samples_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 60
    for line in lines:
        doc = line["doc"]
        answers = doc["locos"]["conditions"]
        assert list(answers) == list(Plan.of(SMALL).conditions)
        assert doc["locos"]["metric"] == MEMBERS[doc["family"]].metric
        for number, (condition, found) in enumerate(answers.items()):
            wrong = Stub.usual(doc, condition)
            assert found["score"] == (not wrong)
            assert found["answer"] == ("Zanzibar" if wrong else doc["answers"][0])
            assert line["arguments"][f"gen_args_{number}"]["arg_1"][REQUEST_KEY] == condition
        scores = {condition: found["score"] for condition, found in answers.items()}
        assert line["specificity"]["scores"] == scores


def test_answers_only(whole):
    results = evaluate(Stub(), predict_only=True, limit=5)
    sample = results["samples"]["locos_specificity"][0]
    assert sample["doc"]["locos"]["conditions"]["baseline"]["answer"]
    assert list(shown(results)) == ["bypass", "bypass_stderr"]


# -- models -----------------------------------------------------------------------------------


def test_another_model_is_told_what_to_use(monkeypatch):
    monkeypatch.delitem(sys.modules, "lm_eval_locos.model")
    with pytest.raises(DataError, match=r"Use --model locos-ablated .*num_heads=2"):
        evaluate("dummy")


RUN = {"families": ["nolima", "babilong", "parametric"], "per_family": 2, "lengths": [200]}


def test_a_real_model_answers_as_in_separate_runs(folder, tokenizer):
    model = tiny_model("llama")
    # Words of the sample are unknown to the tokenizer: only in the first layer, and whole, does a
    # head's output matter.
    first = {f"{i}-{j}": [float(8 - i * 4 + j)] for i in range(3) for j in range(4)}
    (folder / "first.json").write_text(json.dumps(first))

    def lm(**kwargs):
        return LocosAblatedLM(
            model,
            tokenizer=tokenizer,
            heads=str(folder / "first.json"),
            site="output",
            mode="zero",
            max_length=4096,
            batch_size=2,
            **kwargs,
        )

    options = {"gen_kwargs": {"max_gen_toks": 5}, "bootstrap_iters": 0}
    metadata = RUN | {"tokenizer": tokenizer}
    mixed = evaluate(lm(num_heads=1), metadata=metadata | {"k": 2, "random_seeds": 1}, **options)
    samples = mixed["samples"]["locos_specificity"]
    assert len(samples) == 6
    settings = [
        {"num_heads": 0},
        {"num_heads": 2},
        {"num_heads": 2, "select": "layer-random", "seed": 0},
    ]
    tasks = [MEMBERS[family].task for family in RUN["families"]]
    for number, setting in enumerate(settings):
        alone = evaluate(lm(**setting), tasks, metadata, limit=2, **options)["samples"]
        found = {s["doc"]["id"]: s["resps"][0] for task in tasks for s in alone[task]}
        assert {s["doc"]["id"]: s["resps"][number] for s in samples} == found
    assert any(s["resps"][0] != s["resps"][1] for s in samples)
    assert any(s["resps"][1] != s["resps"][2] for s in samples)
    assert mixed["config"]["locos"]["conditions"]["top:2"] == ["0-3", "0-2"]


ENVIRONMENT = os.environ | {"LOCOS_DATA": "bundled", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def test_a_process_without_our_model_type_is_told_what_to_use():
    """In a process of its own: here the model's module is imported already."""
    script = f"""
import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval_locos.errors import DataError
manager = TaskManager(
    include_path={str(REPOSITORY / "tasks")!r}, include_defaults=False, metadata={{"k": 2}}
)
try:
    lm_eval.simple_evaluate("dummy", tasks=["locos_specificity_lite"], task_manager=manager)
except DataError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert "Use --model locos-ablated" in done.stdout


def test_the_command_writes_table_results_and_samples(folder):
    model = {
        "pretrained": folder / "model",
        "heads": folder / "heads.json",
        "num_heads": 2,
        "calibration": folder / "prompts.txt",
        "num_calibration": 5,
        "max_length": 4096,
    }
    options = {
        "tasks": "locos_specificity",
        "model": "locos-ablated",
        "model_args": ",".join(f"{key}={value}" for key, value in model.items()),
        "device": "cpu",
        "limit": "3",
        "gen_kwargs": "max_gen_toks=4",
        "metadata": json.dumps(RUN),
        "output_path": str(folder / "out"),
    }
    flags = itertools.chain(*((f"--{key}", value) for key, value in options.items()))
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval_locos", "run", *flags, "--log_samples"],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "|locos_specificity [bundled sample]" in done.stdout
    assert "|specificity " in done.stdout
    (path,) = (folder / "out").rglob("results_*.json")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    results = json.loads(path.read_text(), parse_constant=refuse)
    found = results["configs"]["locos_specificity"]["metadata"][RESULTS_KEY]
    assert (found["k"], len(found["conditions"])) == (2, 12)
    assert found["statistics"]["families"]["babilong"]["documents"] == 1
    assert set(results["config"]["locos"]["conditions"]) >= {"top:2", "layer-random:2:9"}
    (path,) = (folder / "out").rglob("samples_*.jsonl")
    assert len(path.read_text().splitlines()) == 3
