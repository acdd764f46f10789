"""kill -9 at many points of `locos detect` and `locos sweep`: after --resume nothing is different.

A process that has imported everything forks a child for each command. The child kills itself right
before the n-th change that Python makes to files of the output folder (its audit events: a file
opened for writing, a rename, a folder made, something removed), or is killed after a while.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest
from tiny import tiny_model

SERVER = """
import json, os, signal, sys, time
import torch
torch.set_num_threads(1)
import lm_eval.evaluator, lm_eval.loggers, lm_eval.tasks
import lm_eval_locos.detect, lm_eval_locos.model, lm_eval_locos.sweep
from lm_eval.tasks import _index
from lm_eval_locos.cli import main

# Listing the harness's own tasks takes seconds, and none is run here.
listed = _index.TaskIndex._iter_yaml_files
theirs = os.path.dirname(lm_eval.tasks.__file__)
_index.TaskIndex._iter_yaml_files = staticmethod(
    lambda root: () if str(root) == theirs else listed(root)
)
CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "tempfile.mkstemp"}

def child(job):
    count = 0
    def watch(event, args):
        nonlocal count
        writes = event == "open" and set(str(args[1] or "")) & set("wax+")
        if not (writes or event in CHANGES) or not str(args[0]).startswith(job["output"]):
            return
        if count == job["at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1
    os.environ.update(job["environment"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.addaudithook(watch)
    try:
        main(job["words"])
    except SystemExit as ended:
        sys.stdout.flush()
        os.write(1, f"\\nchanges {count}".encode())
        os._exit(ended.code or 0)
    finally:
        import traceback
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(99)

for line in sys.stdin:
    job = json.loads(line)
    start = time.monotonic()
    if not (pid := os.fork()):
        child(job)
    ended = 0
    while not ended:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended and job["after"] and time.monotonic() - start > job["after"]:
            os.kill(pid, signal.SIGKILL)
            job["after"] = None
        time.sleep(0.002)
    print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - start]), flush=True)
"""
KILLED = -9


class Commands:
    """Runs commands in children of one process that has everything imported."""

    def __init__(self, folder):
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "LOCOS_DATA": "bundled",
            "TOKENIZERS_PARALLELISM": "false",
            "CUDA_VISIBLE_DEVICES": "",
            "TQDM_DISABLE": "1",
        }
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            text=True,
        )

    def __call__(self, output, *words, at=None, after=None):
        """(status, number of changes, seconds) of a command that writes into ``output``."""
        log = self.folder / "log"
        job = {
            "words": [*map(str, words), "--output", str(output)],
            "output": str(output),
            "at": at,
            "after": after,
            "log": str(log),
            "environment": {"LOCOS_CACHE_DIR": f"{output}-cache"},
        }
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        status, seconds = json.loads(self.process.stdout.readline())
        self.said = log.read_text()
        assert status in (0, KILLED), self.said
        changes = re.search(r"\nchanges (\d+)$", self.said)
        return status, int(changes[1]) if changes else None, seconds


@pytest.fixture(scope="module")
def locos(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("kill")
    tiny_model("llama", seed=3).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    scores = {f"{i}-{j}": [float(i * 4 + j)] for i in range(3) for j in range(4)}
    (folder / "heads.json").write_text(json.dumps(scores))
    rows = []
    for number in range(7):
        words = [f"w{5 + (7 * number + j) % 80}" for j in range(12 + 3 * number)]
        needle = f"w{40 + number} w{60 + number} w{20 + number}"
        rows.append(
            {
                "context": " ".join([*words[:4], needle, *words[4:]]),
                "needle": needle,
                "question": f"w{number}",
                "answer": "w1",
            }
        )
    (folder / "probes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    commands = Commands(folder)
    yield commands
    commands.process.stdin.close()
    commands.process.wait()


DETECT = ("detect", "--model", "model", "--data", "probes.jsonl", "--batch-size", "2")
DETECT += ("--methods", "headkv", "--max-new-tokens", "5", "--device", "cpu")
SWEEP = ("sweep", "--model", "model", "--heads", "heads.json", "--k", "1", "--controls", "random:1")
SWEEP += ("--tasks", "locos_arithmetic_2da", "--limit", "2", "--batch-size", "2")
SWEEP += ("--device", "cpu")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?")
_ADDRESS = re.compile(rb" at 0x[0-9a-f]+")  # of a function, as the harness writes it
_TIMES = ("date", "start_time", "end_time", "total_evaluation_time_seconds")


def contents(folder):
    """Every file below, hidden ones too, and every folder; times and addresses are left out."""
    found = {}
    for path in folder.rglob("*"):
        name = _DATE.sub("DATE", str(path.relative_to(folder)))
        found[name] = None
        if path.is_file():
            found[name] = path.read_bytes()
        if path.name.startswith("results_"):
            content = json.loads(_ADDRESS.sub(b"", found[name]))
            found[name] = {key: value for key, value in content.items() if key not in _TIMES}
    return found


@pytest.fixture(scope="module")
def whole(locos):
    """Per command: its words, what it writes uninterrupted, the number of changes, seconds."""
    found = {}
    for words in (DETECT, SWEEP):
        output = locos.folder / f"whole-{words[0]}"
        status, changes, seconds = locos(output, *words)
        assert status == 0, locos.said
        found[words[0]] = (words, contents(output), changes, seconds)
    return found


def test_what_is_compared(whole):
    """A run makes many changes, so that there are many points to be killed at."""
    _, files, changes, _ = whole["detect"]
    assert set(files) == {"headkv.json", "README.md", "detect.json"}
    assert changes > 20
    _, files, changes, _ = whole["sweep"]
    runs = {name.split("/")[0] for name in files}
    assert runs == {"sweep.json", "baseline", "heads-top-1", "heads-random-1-0"}
    assert sum("/results_DATE" in name for name in files) == 3
    assert sum("/samples_" in name for name in files) == 3
    assert changes > 20


def resumed(locos, words, output, expected):
    status, _, _ = locos(output, *words, "--resume")
    assert status == 0, locos.said
    found = contents(output)
    assert sorted(found) == sorted(expected)
    for name, content in expected.items():
        assert found[name] == content, name
    shutil.rmtree(output, ignore_errors=True)


@pytest.mark.parametrize("turn", range(12))
def test_detect_killed_before_a_change(locos, whole, turn):
    """Twelve changes, the first and the last ones among them."""
    words, expected, changes, _ = whole["detect"]
    others = random.Random("detect").sample(range(3, changes - 4), 5)
    at = [0, 1, 2, *others, *range(changes - 4, changes)][turn]
    output = locos.folder / f"detect-{turn}"
    assert locos(output, *words, at=at)[0] == KILLED
    resumed(locos, words, output, expected)


@pytest.mark.parametrize("turn", range(4))
def test_detect_killed_after_a_while(locos, whole, turn):
    words, expected, _, seconds = whole["detect"]
    after = seconds * random.Random(f"while-{turn}").uniform(0.1, 0.9)
    output = locos.folder / f"detect-after-{turn}"
    locos(output, *words, after=after)
    resumed(locos, words, output, expected)


def test_detect_killed_again_and_again(locos, whole):
    """Every resume is killed as well, some changes further on."""
    words, expected, changes, _ = whole["detect"]
    rng = random.Random("again")
    output = locos.folder / "detect-again"
    kills = 0
    for _ in range(6):
        more = ("--resume",) if output.exists() else ()
        kills += locos(output, *words, *more, at=rng.randrange(2, changes // 2))[0] == KILLED
    assert kills >= 3
    resumed(locos, words, output, expected)


@pytest.mark.parametrize("turn", range(6))
def test_sweep_killed_before_a_change(locos, whole, turn):
    words, expected, changes, _ = whole["sweep"]
    at = [2, *random.Random("sweep").sample(range(3, changes - 1), 4), changes - 1][turn]
    output = locos.folder / f"sweep-{turn}"
    assert locos(output, *words, at=at)[0] == KILLED
    resumed(locos, words, output, expected)


def test_sweep_killed_twice(locos, whole):
    words, expected, changes, seconds = whole["sweep"]
    output = locos.folder / "sweep-twice"
    assert locos(output, *words, at=changes // 3)[0] == KILLED
    locos(output, *words, "--resume", after=seconds * random.Random("twice").uniform(0.3, 0.8))
    resumed(locos, words, output, expected)
