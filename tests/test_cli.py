"""The real commands, in subprocesses, on a tiny model; and on SmolLM2 where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = "nolima_500,musique,locos_babilong_qa2_0k,locos_parametric,locos_arithmetic"
ALIASES = [f"{task} [bundled sample]" for task in TASKS.split(",")]


def run(*arguments, folder, **environment):
    """A command in ``folder``, offline, with its own cache; the finished process."""
    variables = os.environ | {
        "LOCOS_CACHE_DIR": str(folder / "cache"),
        "LOCOS_DATA": "bundled",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
        **environment,
    }
    return subprocess.run(
        list(map(str, arguments)), cwd=folder, env=variables, capture_output=True, text=True
    )


def lm_eval(*arguments, folder, **environment):
    return run(sys.executable, "-m", "lm_eval", *arguments, folder=folder, **environment)


def results(folder):
    """The results file under ``folder`` and the logged samples by task."""
    (path,) = folder.rglob("results_*.json")
    samples = {
        file.name.split("_20")[0].removeprefix("samples_"): [
            json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()
        ]
        for file in folder.rglob("samples_*.jsonl")
    }
    return json.loads(path.read_text(encoding="utf-8")), samples


def prompts(samples):
    return {
        task: [row["arguments"]["gen_args_0"]["arg_0"] for row in rows]
        for task, rows in samples.items()
    }


def test_all_five_families_as_typed_and_the_same_prompts_with_hf(folder):
    common = ("--tasks", TASKS, "--apply_chat_template", "--limit", "2", "--device", "cpu")
    common += ("--gen_kwargs", "max_gen_toks=4", "--log_samples", "--output_path")
    model = "pretrained=model,max_length=2000"
    ours = lm_eval(
        *("--model", "locos-ablated", "--model_args", f"{model},heads=heads.json,num_heads=4"),
        *common,
        "ours",
        folder=folder,
    )
    assert ours.returncode == 0, ours.stderr[-3000:]
    for alias in ALIASES:
        assert alias in ours.stdout
    theirs = lm_eval("--model", "hf", "--model_args", model, *common, "theirs", folder=folder)
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    found, samples = results(folder / "ours")
    plain, plain_samples = results(folder / "theirs")
    assert prompts(samples) == prompts(plain_samples)
    assert sum(map(len, prompts(samples).values())) == 10
    info = found["config"]["locos"]
    assert info["heads"] == ["2-3", "2-2", "2-1", "2-0"]
    assert set(info["calibration"]) == {
        "nolima",
        "musique",
        "babilong",
        "parametric",
        "arithmetic",
    }
    assert "locos" not in plain["config"]
    for task in TASKS.split(","):
        assert found["results"][task]["alias"].endswith("[bundled sample]")
        data = found["configs"][task]["metadata"]["locos_data"]
        assert data["source"] == "bundled"
        assert data["sha256"] == plain["configs"][task]["metadata"]["locos_data"]["sha256"]


def test_python_entry_points_know_model_and_tasks(folder):
    code = (
        "import lm_eval, json;"
        "r = lm_eval.simple_evaluate('locos-ablated', "
        "{'pretrained': 'model', 'heads': 'heads.json', 'num_heads': 2, 'device': 'cpu'}, "
        "['locos_arithmetic_2da'], limit=1);"
        "print(json.dumps(r['config']['locos']['heads']))"
    )
    done = run(sys.executable, "-c", code, folder=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["2-3", "2-2"]


def test_other_subcommands_and_launchers_know_model_and_tasks(folder):
    listed = lm_eval("ls", "tasks", folder=folder)
    assert listed.returncode == 0, listed.stderr[-3000:]
    for name in ("nolima_32k", "musique_4hop", "locos_babilong_qa20_32k", "locos_arithmetic_3da"):
        assert name in listed.stdout
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "-m", "lm_eval", "run")
    launched = run(
        *(sys.executable, *launcher, "--model", "locos-ablated", "--model_args", "site=key"),
        *("--tasks", "locos_arithmetic_2da"),
        folder=folder,
    )
    assert "lm_eval: site='key' is not known. Use one of query, output." in launched.stderr
    valid = lm_eval("validate", "--tasks", "locos,nolima_hard", folder=folder)
    assert valid.returncode == 0, valid.stdout + valid.stderr[-3000:]


def test_off_switch_and_the_command_that_needs_no_hook(folder):
    off = {"LM_EVAL_LOCOS_AUTOLOAD": "0"}
    arguments = ("--model", "locos-ablated", "--model_args", "site=key")
    arguments += ("--tasks", "locos_arithmetic_2da")
    hidden = lm_eval(*arguments, folder=folder, **off)
    assert hidden.returncode != 0
    assert "site='key'" not in hidden.stderr
    explicit = run(sys.executable, "-m", "lm_eval_locos", *arguments, folder=folder, **off)
    assert explicit.returncode == 1
    assert "lm_eval: site='key' is not known. Use one of query, output." in explicit.stderr


def test_a_users_mistake_is_a_message_without_traceback(folder):
    (folder / "bad.json").write_text('{"0-0": [NaN]}')
    done = lm_eval(
        *("--model", "locos-ablated", "--model_args", "pretrained=model,heads=bad.json"),
        *("--tasks", "locos_arithmetic_2da"),
        folder=folder,
    )
    assert done.returncode == 1
    assert "lm_eval: heads=bad.json: head 0-0 has the score nan" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_errors_and_other_programs_keep_their_traceback(folder):
    from_python = (
        "import lm_eval_locos.model; from lm_eval_locos.errors import LocosError;"
        "raise LocosError('mine')"
    )
    done = run(sys.executable, "-c", from_python, folder=folder)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    done = lm_eval(
        *("--model", "locos-ablated", "--model_args", "pretrained=nowhere,heads=heads.json"),
        *("--tasks", "locos_arithmetic_2da"),
        folder=folder,
    )
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_start_up_imports_nothing_heavy(folder):
    code = "import sys; print([m for m in sys.modules if m.split('.')[0] in %r])"
    heavy = ("torch", "transformers", "lm_eval", "datasets", "numpy", "typing", "logging")
    bare = run(sys.executable, "-I", "-S", "-c", code % (heavy,), folder=folder)
    program = "import lm_eval_locos._autoload as a; a.install(force=True);" + code % (heavy,)
    ours = run(
        sys.executable,
        "-S",
        "-c",
        program,
        folder=folder,
        PYTHONPATH=str(Path(__file__).resolve().parent.parent),
    )
    assert ours.stdout == bare.stdout, ours.stderr


@pytest.mark.parametrize("damage", ["missing harness", "syntax error", "no tasks"])
def test_python_starts_whatever_is_broken(folder, damage):
    package = folder / "lm_eval_locos"
    package.mkdir()
    real = Path(__file__).resolve().parent.parent / "lm_eval_locos"
    for name in ("__init__.py", "_autoload.py", "_plugin.py"):
        text = (real / name).read_text()
        if damage == "syntax error" and name == "_autoload.py":
            text = "def ("
        (package / name).write_text(text)
    (line,) = (real / "lm_eval_locos_autoload.pth").read_text().splitlines()
    code = f"{line}\nprint('started')"
    if damage == "no tasks":
        code += "\nimport lm_eval.tasks\nprint(len(lm_eval.tasks.TaskManager().all_tasks) > 100)"
    isolated = ("-S",) if damage == "missing harness" else ()
    done = run(sys.executable, *isolated, "-c", code, folder=folder, PYTHONPATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("started")


@pytest.mark.real_model
def test_smollm2_end_to_end(folder, smollm2, goldens):
    model = f"pretrained={smollm2['pretrained']},gguf_file={smollm2['gguf_file']}"
    ranking = goldens / "rankings" / "smollm2_logit_contrib.json"
    common = ("--tasks", TASKS, "--apply_chat_template", "--limit", "1", "--log_samples")
    common += ("--gen_kwargs", "max_gen_toks=4", "--output_path")
    ours = lm_eval(
        *("--model", "locos-ablated", "--model_args"),
        f"{model},heads={ranking},num_heads=20,num_calibration=5",
        *common,
        "ours",
        folder=folder,
    )
    assert ours.returncode == 0, ours.stderr[-3000:]
    theirs = lm_eval("--model", "hf", "--model_args", model, *common, "theirs", folder=folder)
    assert theirs.returncode == 0, theirs.stderr[-3000:]
    found, samples = results(folder / "ours")
    _, plain_samples = results(folder / "theirs")
    assert prompts(samples) == prompts(plain_samples)
    assert found["config"]["locos"]["heads"][:3] == ["23-2", "23-1", "28-0"]
    assert len(found["config"]["locos"]["heads"]) == 20
