"""locos-mini as shipped: what it promises, which heads are found, the decoy, the demo."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY

from lm_eval_locos.architecture import Head
from lm_eval_locos.bundled import MINI
from lm_eval_locos.model import LocosAblatedLM
from lm_eval_locos.ranking import HeadRanking

sys.path.insert(0, str(REPOSITORY / "examples" / "mini"))
check = pytest.importorskip("check", reason="examples/mini is not beside the tests")

RETRIEVAL = ("nolima", "musique", "qa1", "qa2")
CONTROLS = ("parametric", "arithmetic")
DOCUMENTS = 60  # of each task; the script in examples/mini measures all of them
DRAWS = 50
PLANTED = {Head(1, 0), Head(1, 1), Head(3, 0), Head(3, 1)}
FIRST_HOP = {Head(2, 0), Head(2, 1)}
DECOY = Head(3, 2)


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCOS_DATA", "bundled")
        yield check.Bench(str(MINI), DOCUMENTS)


@pytest.fixture(scope="module")
def ranking():
    return HeadRanking.load(MINI / "locos.json")


@pytest.fixture(scope="module")
def scores(bench, ranking):
    """(baseline, ablated): per task the mean of every metric."""
    return bench.run(), bench.run(ranking.top(ranking.meta["k"]))


def test_files():
    lines = (MINI / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    recorded = {name: digest for digest, name in (line.split("  ") for line in lines)}
    files = {path.name: path for path in MINI.iterdir() if path.name != "SHA256SUMS"}
    assert set(recorded) == set(files)
    for name, path in files.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == recorded[name], name
    assert files["model.safetensors"].stat().st_size <= 4 * 10**6
    card = files["README.md"].read_text(encoding="utf-8")
    for words in ("planted", "not a discovery", "real models", "decoy", "first hop"):
        assert words in " ".join(card.lower().split()), words


def test_size(bench):
    assert len(bench.architecture.heads) >= 32
    assert bench.model.config.model_type == "llama"


def test_baseline(scores):
    base = check.main_scores(scores[0])
    for task in ("nolima", "qa1", *CONTROLS):
        assert base[task] >= 0.95, (task, base)
    for task in ("qa2", "musique"):
        assert base[task] >= 0.90, (task, base)


def test_retrieval_collapses_and_nothing_else(scores, ranking):
    assert ranking.meta["k"] <= 6
    base, ablated = map(check.main_scores, scores)
    for task, lost in check.losses(base, ablated).items():
        assert lost >= 0.8, (task, base[task], ablated[task])
    assert scores[1]["nolima"]["rouge_l"] <= 0.10
    for task in CONTROLS:
        assert base[task] - ablated[task] <= 0.03


@pytest.mark.parametrize(("match_layers", "most"), [(True, 0.05), (False, 0.10)])
def test_random_heads_are_harmless(bench, ranking, match_layers, most):
    few = 5
    base = check.main_scores(bench.run(most=few, tasks=RETRIEVAL))
    losses = []
    for seed in range(DRAWS):
        heads = ranking.random(
            ranking.meta["k"], seed, bench.architecture.heads, match_layers=match_layers
        )
        assert not set(heads) & PLANTED
        drawn = check.main_scores(bench.run(heads, most=few, tasks=RETRIEVAL))
        losses.append(check.mean_loss(base, drawn))
    assert sum(losses) / DRAWS <= most


def test_the_planted_heads_lead(ranking):
    assert set(ranking.top(ranking.meta["k"])) == PLANTED
    fifth = ranking.pooled[ranking.order[len(PLANTED)]]
    assert min(ranking.pooled[head] for head in PLANTED) > 20 * abs(fifth)
    # A limit of the method: heads of the first hop write no answer token.
    least = min(ranking.pooled[head] for head in PLANTED)
    assert all(abs(ranking.pooled[head]) < 0.05 * least for head in FIRST_HOP)


def test_detection_again_and_the_decoy(bench, ranking):
    """Our own detection gives the shipped ranking; attention alone falls for the decoy."""
    found = check.detected(bench, 12)
    k = ranking.meta["k"]
    assert set(found["locos"].top(k)) == PLANTED
    assert DECOY in found["attention_spatial"].top(k)
    assert DECOY in found["headkv"].top(k)
    least = min(found["locos"].pooled[head] for head in PLANTED)
    assert abs(found["locos"].pooled[DECOY]) < 0.02 * least
    for head in PLANTED:
        assert found["locos"].pooled[head] == pytest.approx(ranking.pooled[head], rel=0.2)


def test_first_hop_heads_are_needed_all_the_same(bench):
    base = check.main_scores(bench.run(most=20, tasks=("nolima", "musique")))
    without = check.main_scores(bench.run(FIRST_HOP, most=20, tasks=("nolima", "musique")))
    assert without["musique"] <= 0.4 < base["musique"]
    assert without["nolima"] >= 0.95


def test_the_default_of_the_model_type(monkeypatch):
    lm = LocosAblatedLM()
    info = lm.get_model_info()["locos"]
    assert info["model"] == "locos-mini"
    assert set(info["heads"]) == {str(head) for head in PLANTED}
    assert LocosAblatedLM("locos-mini", num_heads=0).get_model_info()["locos"]["heads"] == []
    with torch.inference_mode():
        assert next(lm.model.parameters()).device.type in ("cpu", "cuda", "mps")


def command(folder, *arguments, **environment):
    import os

    variables = os.environ | {"LOCOS_CACHE_DIR": str(folder / "cache"), "TQDM_DISABLE": "1"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=variables | environment,
        capture_output=True,
        text=True,
    )


def test_the_first_command(tmp_path):
    """As typed: no model, no ranking, no data, no network."""
    line = ("lm_eval", "--model", "locos-ablated", "--tasks", "nolima,musique", "--limit", "12")
    found = {}
    for name, more in (("ablated", ()), ("baseline", ("--model_args", "num_heads=0"))):
        done = command(
            tmp_path, *line, *more, "--output_path", name, HF_HUB_OFFLINE="1", LOCOS_DATA="bundled"
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "nolima [bundled sample]" in done.stdout
        assert "musique [bundled sample]" in done.stdout
        assert "counted in words" not in done.stderr
        (path,) = (tmp_path / name).rglob("results_*.json")
        found[name] = json.loads(path.read_text(encoding="utf-8"))["results"]
    assert found["baseline"]["nolima"]["contains,none"] >= 0.9
    assert found["ablated"]["nolima"]["contains,none"] <= 0.1
    assert found["baseline"]["musique"]["acc,none"] >= 0.7
    assert found["ablated"]["musique"]["acc,none"] <= 0.3


def test_demo(tmp_path):
    done = command(tmp_path, "lm_eval_locos.cli", "demo", "--seeds", "1", "--output", "out")
    assert done.returncode == 0, done.stderr[-3000:]
    for text in ("[bundled sample]", "Specificity: ", "Controls held: yes", "out/report.html"):
        assert text in done.stdout.replace("\n", " ")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "locos-mini" in page
    assert list(Path(tmp_path / "out" / "figures").glob("*.png"))
    again = command(tmp_path, "lm_eval_locos.cli", "demo", "--output", "out")
    assert again.returncode == 2
    assert "out is not empty" in again.stderr
