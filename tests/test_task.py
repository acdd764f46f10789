"""The harness task class: marks, provenance, request cache, skipped prompts, thinking, errors."""

from __future__ import annotations

import json
import sys

import datasets
import lm_eval
import pytest
from conftest import REPOSITORY
from lm_eval import evaluator
from lm_eval.caching import cache
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from lm_eval_locos.errors import SKIPPED, DataError
from lm_eval_locos.families import documents, nolima
from lm_eval_locos.families.documents import package
from lm_eval_locos.families.task import LocosTask

TASKS = REPOSITORY / "tasks" / "nolima"
ALL = sorted(path.stem for path in TASKS.glob("nolima*.yaml"))
METRICS = ["rouge_l", "rouge_1_recall", "contains"]


def manager(metadata=None):
    return TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)


def evaluate(tasks, metadata=None, **options):
    return lm_eval.simple_evaluate(
        model="dummy",
        tasks=tasks,
        task_manager=manager(metadata),
        limit=options.pop("limit", 3),
        bootstrap_iters=0,
        **options,
    )


def load(task, **metadata):
    return manager(metadata).load([task])["tasks"][task]


@pytest.fixture(autouse=True)
def no_report_of_the_machine(monkeypatch):
    """After an evaluation the harness lists all packages and asks the hub for dummy's tokenizer."""
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(evaluator, "add_tokenizer_info", lambda results, lm: None)


@pytest.fixture
def bundled(monkeypatch):
    monkeypatch.setenv("LOCOS_DATA", "bundled")


def test_the_index_knows_our_tasks_and_no_include():
    names = manager().all_tasks
    assert set(ALL) <= set(names)
    assert len(ALL) == 13
    assert not [name for name in names if name.startswith("_")]


def test_a_bundled_sample_is_marked_in_the_table_and_the_results(bundled):
    results = evaluate(["nolima", "nolima_full"])
    assert results["results"]["nolima"]["alias"] == "nolima [bundled sample]"
    assert (
        results["results"]["nolima_full"]["alias"] == "nolima_full (not held out) [bundled sample]"
    )
    table = make_table(results)
    assert "|nolima [bundled sample]" in table
    assert all(metric in table for metric in METRICS)


def test_the_provenance_is_in_the_results_file_s_configs(bundled):
    metadata = {"pretrained": object(), "lengths": [200, 300]}
    results = evaluate(["nolima"], metadata)
    config = json.loads(json.dumps(results["configs"]["nolima"], default=str))
    data = config["metadata"]["locos_data"]
    assert data == load("nolima", **metadata).provenance
    assert data["source"] == "bundled"
    assert data["split"] == "evaluation"
    assert data["grid"]["lengths"] == [200, 300]
    assert data["documents"] == results["n-samples"]["nolima"]["original"]
    assert len(data["sha256"]) == 64
    assert config["metadata"]["pretrained"] == "object"  # a model object is not copied or dumped
    assert results["versions"]["nolima"] == 1.0


def test_a_local_folder_is_not_marked(monkeypatch, goldens):
    monkeypatch.setenv("LOCOS_DATA_DIR", str(goldens))
    monkeypatch.delenv("LOCOS_DATA", raising=False)
    results = evaluate(["nolima"], {"lengths": 300})
    assert results["results"]["nolima"]["alias"] == "nolima"
    data = results["configs"]["nolima"]["metadata"]["locos_data"]
    assert (data["source"], data["folder"]) == ("local", str(goldens / "nolima"))


@pytest.mark.parametrize("name", [name for name in ALL if name[-1] != "k"])
def test_every_task_declares_its_metrics_and_stops(bundled, name):
    task = load(name)
    assert list(task.aggregation()) == METRICS
    assert task.higher_is_better() == dict.fromkeys(METRICS, True)
    doc = task.test_docs()[0]
    assert list(task.process_results(doc, ["x"])) == METRICS
    kwargs = task.config.generation_kwargs
    assert kwargs == {"do_sample": False, "max_gen_toks": 100, "until": ["\n"]}
    assert task.config.num_fewshot == 0
    assert not hasattr(task, "sampler")  # no second copy of the documents
    assert task.doc_to_text(doc) == doc["prompt"]
    assert task.doc_to_target(doc) == doc["answers"]


def test_dummy_answers_score_zero_and_count(bundled):
    results = evaluate(["nolima"], limit=4)
    scores = results["results"]["nolima"]
    assert [scores[f"{metric},none"] for metric in METRICS] == [0, 0, 0]
    assert results["n-samples"]["nolima"]["effective"] == 4
    sample = results["samples"]["nolima"][0]
    assert sample["arguments"][0][0] == sample["doc"]["prompt"]


def test_thinking_does_not_count_and_unclosed_thinking_is_empty(bundled):
    task = load("nolima")
    doc = task.test_docs()[0]
    name = doc["answers"][0]
    right = dict.fromkeys(METRICS, 1.0)
    assert task.process_results(doc, [f"<think>Maybe Megan.</think>{name}"]) == right
    wrong = dict.fromkeys(METRICS, 0.0)
    assert task.process_results(doc, [f"<think>It is {name}"]) == wrong
    assert task.process_results(doc, [""]) == wrong


def test_a_skipped_prompt_does_not_count(bundled, monkeypatch):
    assert load("nolima").process_results(load("nolima").test_docs()[0], [SKIPPED]) == {}
    from lm_eval.models.dummy import DummyLM

    def generate_until(self, requests, disable_tqdm=False):
        return [SKIPPED if n % 2 else r.doc["answers"][0] for n, r in enumerate(requests)]

    monkeypatch.setattr(DummyLM, "generate_until", generate_until)
    results = evaluate(["nolima"], limit=10)
    assert results["results"]["nolima"]["contains,none"] == 1
    assert results["n-samples"]["nolima"]["effective"] == 5


def test_cached_requests_never_meet_other_documents(bundled, monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "PATH", str(tmp_path / "requests"))

    def prompts(lengths):
        task = load("nolima", lengths=lengths)
        task.build_all_requests(limit=5, cache_requests=True)
        return [instance.args[0] for instance in task.instances]

    short = prompts(200)
    assert prompts(400) != short
    assert len(list((tmp_path / "requests").iterdir())) == 2
    assert prompts(200) == short
    assert len(list((tmp_path / "requests").iterdir())) == 2
    # The third call really came from the cache.
    monkeypatch.setattr(LocosTask, "doc_to_text", lambda self, doc: "rebuilt")
    assert prompts(200) == short
    assert prompts(300) == ["rebuilt"] * 5


def test_a_system_prompt_is_folded_into_the_user_turn(bundled):
    task = load("nolima")
    doc = task.test_docs()[0]
    seen = []

    def template(messages, add_generation_prompt):
        seen.append(messages)
        return messages[-1]["content"]

    plain = task.fewshot_context(doc, num_fewshot=0)
    chat = task.fewshot_context(
        doc, num_fewshot=0, apply_chat_template=True, chat_template=template
    )
    assert plain == chat == doc["prompt"]
    assert [message["role"] for message in seen[0]] == ["user"]


def test_a_limit_of_shots_from_the_command_line_changes_nothing(bundled):
    plain = evaluate(["nolima"])["samples"]["nolima"]
    shots = evaluate(["nolima"], num_fewshot=3)["samples"]["nolima"]
    assert [s["arguments"] for s in plain] == [s["arguments"] for s in shots]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({"depths": 200}, "depths=200"), ({"lengths": "x"}, "lengths='x'")],
)
def test_wrong_metadata_is_a_data_error(bundled, metadata, message):
    with pytest.raises(DataError, match=message):
        load("nolima", **metadata)


def test_a_loader_must_return_documents():
    rows = datasets.Dataset.from_list([{"prompt": "a", "answers": ["b"]}])
    config = {
        "task": "t",
        "custom_dataset": lambda **_: {"test": rows},
        "process_results": nolima.score,
        "test_split": "test",
        "doc_to_text": "prompt",
        "doc_to_target": "answers",
        "generation_kwargs": {"until": ["\n"]},
        "metric_list": [{"metric": "m", "aggregation": "mean", "higher_is_better": True}],
    }
    with pytest.raises(DataError, match=r"task t: custom_dataset returned dict.*package"):
        LocosTask(config=config)


def test_the_error_hook_is_installed_with_the_task():
    assert getattr(sys.excepthook, "_locos", False)


# -- packages of documents --------------------------------------------------------------------

DOCUMENT = {"id": "1", "family": "f", "cluster": "c", "prompt": "p", "answers": ["a"]}


def test_a_package_carries_its_provenance():
    made = package([DOCUMENT], {"source": "generated"}, split="evaluation", digits=1)
    assert made.provenance == {
        "source": "generated",
        "split": "evaluation",
        "documents": 1,
        "sha256": documents.sha256_of([DOCUMENT]),
        "grid": {"digits": 1},
    }
    assert list(made["test"]) == [DOCUMENT]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no documents"),
        ([DOCUMENT, DOCUMENT], "two documents have the id '1'"),
        ([{"id": "1"}], "expected .*answers"),
        ([DOCUMENT, DOCUMENT | {"id": "2", "more": 1}], "document '2': keys"),
    ],
)
def test_wrong_packages(rows, message):
    with pytest.raises(DataError, match=message):
        package(rows, {"source": "generated"}, split="evaluation")


def test_the_hash_depends_on_content_and_order():
    other = DOCUMENT | {"id": "2"}
    hashes = {
        documents.sha256_of(rows)
        for rows in ([DOCUMENT], [other], [DOCUMENT, other], [other, DOCUMENT])
    }
    assert len(hashes) == 4
    assert documents.sha256_of([DOCUMENT]) == documents.sha256_of([dict(sorted(DOCUMENT.items()))])


def test_predict_only(folder):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from lm_eval_locos import tasks_dir

    found = simple_evaluate(
        "dummy",
        {},
        ["locos_arithmetic_2da"],
        limit=1,
        predict_only=True,
        task_manager=TaskManager(include_path=tasks_dir(), include_defaults=False),
    )
    assert len(found["samples"]["locos_arithmetic_2da"]) == 1
