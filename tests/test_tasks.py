"""Every task of the five families in the harness, on the bundled sample."""

from __future__ import annotations

import importlib.util
import json

import lm_eval
import pytest
from conftest import REPOSITORY
from lm_eval import evaluator
from lm_eval.tasks import TaskManager

from lm_eval_locos.families import parametric

METRICS = {
    "nolima": ["rouge_l", "rouge_1_recall", "contains"],
    "musique": ["acc", "f1", "em", "tag_present"],
    "musique_2hop": ["acc", "f1", "em", "tag_present"],
    "musique_3hop": ["acc", "f1", "em", "tag_present"],
    "musique_4hop": ["acc", "f1", "em", "tag_present"],
    "locos_parametric": ["exact_match", "exact_match_tolerant"],
    "locos_arithmetic": ["exact_match", "exact_match_tolerant"],
    "locos_arithmetic_2da": ["exact_match", "exact_match_tolerant"],
    "locos_arithmetic_3da": ["exact_match", "exact_match_tolerant"],
} | {
    f"locos_babilong_qa{n}_{length}": ["acc", "tag_present"]
    for n in range(1, 6)
    for length in ("0k", "1k")
}
"""Every task that the bundled sample has data for, apart from NoLiMa's variants."""

LOCOS = [
    "nolima",
    "musique",
    "locos_babilong_qa2_0k",
    "locos_parametric",
    "locos_arithmetic",
]


@pytest.fixture(autouse=True)
def bundled(monkeypatch):
    """The bundled sample, and no report of the machine at the end of an evaluation."""
    monkeypatch.setenv("LOCOS_DATA", "bundled")
    monkeypatch.setattr(evaluator, "add_env_info", lambda results: None)
    monkeypatch.setattr(evaluator, "add_tokenizer_info", lambda results, lm: None)


@pytest.fixture(scope="module")
def manager():
    return TaskManager(include_path=str(REPOSITORY / "tasks"), include_defaults=False)


def evaluate(manager, tasks, **options):
    return lm_eval.simple_evaluate(
        model="dummy",
        tasks=tasks,
        task_manager=manager,
        limit=4,
        bootstrap_iters=0,
        log_samples=True,
        **options,
    )


def test_every_task_runs_and_reports_its_metrics(manager):
    found = evaluate(manager, list(METRICS))
    for task, metrics in METRICS.items():
        result = found["results"][task]
        assert result["sample_len"] == 4, task
        seen = [key.removesuffix(",none") for key in result if key.endswith(",none")]
        assert [key for key in seen if not key.endswith("_stderr")] == metrics
        generated = "_2da" in task or "_3da" in task
        assert ("[bundled sample]" in result["alias"]) is not generated


def test_the_groups(manager):
    assert list(evaluate(manager, ["locos"])["n-samples"]) == LOCOS
    found = evaluate(manager, ["locos_babilong"])
    assert len(found["n-samples"]) == 5
    assert "acc,none" in found["results"]["locos_babilong"]


@pytest.mark.parametrize("task", METRICS)
def test_a_perfect_answer_scores_one_and_a_wrong_one_zero(manager, task):
    (loaded,) = manager.load([task])["tasks"].values()
    metrics = [metric for metric in METRICS[task] if metric != "tag_present"]
    for doc in loaded.test_docs():
        for answer in doc["answers"]:
            right = loaded.process_results(doc, [answer])
            assert {metric: right[metric] for metric in metrics} == dict.fromkeys(metrics, 1)
        thought = f"<think>Nobody knows.</think>\n{doc['answers'][0]}"
        assert loaded.process_results(doc, [thought])[metrics[0]] == 1
        for wrong in ("", "...", "Zanzibar", f"<think>{doc['answers'][0]}"):
            assert not any(loaded.process_results(doc, [wrong]).values())


def test_the_yaml_files_of_babilong_are_what_the_script_writes(tmp_path):
    folder = REPOSITORY / "tasks" / "babilong"
    spec = importlib.util.spec_from_file_location("_write", folder / "_write.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in folder.glob("locos_babilong_*.yaml")}
    assert written == shipped
    assert len(written) == 175


def prompt_of(results, task):
    return results["samples"][task][0]["arguments"][0][0]


@pytest.mark.parametrize("task", ["locos_parametric", "locos_arithmetic", "locos_arithmetic_2da"])
def test_examples_stand_before_the_question_without_a_chat_template(manager, task):
    prompt = prompt_of(evaluate(manager, [task]), task)
    turns = [f"{parametric.prompt(question)} {answer}" for question, answer in parametric.EXAMPLES]
    assert prompt.startswith("\n\n".join(turns) + "\n\n")
    assert prompt.count("Question:") == 5
    assert prompt.endswith("\nAnswer:")


def test_results_hold_the_examples_themselves(manager):
    """Not the function that gives them, whose address differs from run to run."""
    config = evaluate(manager, ["locos_parametric"])["configs"]["locos_parametric"]
    question, answer = parametric.EXAMPLES[0]
    first = {"prompt": parametric.prompt(question), "answers": [answer]}
    assert config["fewshot_config"]["samples"][0] == first
    assert " at 0x" not in json.dumps(config, default=str)


def test_examples_are_turns_with_a_chat_template(manager, tokenizer):
    (task,) = manager.load(["locos_parametric"])["tasks"].values()
    chats = []

    def template(chat, add_generation_prompt=True):
        chats.append(chat)
        return ""

    task.fewshot_context(
        task.test_docs()[0],
        num_fewshot=4,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        chat_template=template,
    )
    (chat,) = chats
    assert [turn["role"] for turn in chat] == ["user", "assistant"] * 4 + ["user"]
    for i, (question, answer) in enumerate(parametric.EXAMPLES):
        assert chat[2 * i]["content"] == parametric.prompt(question)
        assert chat[2 * i + 1]["content"] == answer
    assert chat[-1]["content"] == task.test_docs()[0]["prompt"]
