"""Installs into fresh environments: wheel and editable, with pip and uv; and uninstalls again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.install
PROBE = """
import lm_eval.tasks, lm_eval_locos
from lm_eval.api.registry import get_model
import lm_eval.models
names = lm_eval.tasks.TaskManager().all_tasks
print("nolima" in names, "locos_babilong_qa2_0k" in names, get_model("locos-ablated").__name__)
print(lm_eval_locos.tasks_dir())
"""


@pytest.fixture
def environment(tmp_path):
    """A fresh environment that sees this one's libraries, but not this package; its Python."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    # A plain path line: the start-up and path files in that folder are not run.
    (site / "zz_libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


@pytest.fixture
def source(tmp_path):
    """A copy of what is packaged, so that builds leave nothing in the repository."""
    target = tmp_path / "source"
    target.mkdir()
    for name in ("lm_eval_locos", "tasks"):
        shutil.copytree(REPOSITORY / name, target / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, target / name)
    return target


def call(*command, cwd, **variables):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("installer", ["pip", "uv"])
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_install_use_uninstall(environment, source, tmp_path, installer, editable):
    if installer == "uv":
        if shutil.which("uv") is None:
            pytest.skip("uv is not installed")
        tool, flags = ["uv", "pip"], ["--python", environment]
        remove = ["uv", "pip", "uninstall", "--python", environment, "lm-eval-locos"]
    else:
        tool, flags = [environment, "-m", "pip"], []
        remove = [environment, "-m", "pip", "uninstall", "-y", "lm-eval-locos"]
    target = ["-e", source] if editable else [source]
    call(*tool, "install", *flags, "--no-deps", "--no-build-isolation", *target, cwd=tmp_path)
    found, tasks = call(environment, "-c", PROBE, cwd=tmp_path).splitlines()[-2:]
    assert found == "True True LocosAblatedLM"
    assert Path(tasks).is_relative_to(source) == editable
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    assert (site / "lm_eval_locos_autoload.pth").is_file()
    assert not (editable and (site / "lm_eval_locos").exists())

    call(*remove, cwd=tmp_path)
    assert not list(site.glob("*locos*"))
    assert call(environment, "-c", "print(1)", cwd=tmp_path) == "1\n"
