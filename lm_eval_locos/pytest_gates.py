"""Gates as a test: results that a scheduled job wrote are checked where the other tests run.

A whole test file; a failed gate fails it with the table of `locos check`:

    from lm_eval_locos.pytest_gates import assert_gates

    def test_retrieval_heads_are_specific():
        assert_gates("evals/out", config="evals/gates.toml")

Without a file, gates are dicts of the same keys:

    def test_controls_hold():
        assert_gates("evals/out", gates=[
            {"metric": "specificity", "min": 0.3},
            {"metric": "control_drop", "max": 0.05, "condition": "top:20"},
        ])

which fails like this:

    AssertionError: 1 of 2 gates passed.
    gate                              number  interval              threshold  verdict  reason
    specificity >= 0.3                0.61    [0.44, 0.76] 95%      >= 0.3     pass
    control_drop <= 0.05 (condit...)  0.031   [-0.012, 0.079] 95%   <= 0.05    FAIL     the ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from lm_eval_locos.errors import LocosError
from lm_eval_locos.gates.config import gates_from, read_gates
from lm_eval_locos.gates.evaluate import Outcome, evaluate
from lm_eval_locos.gates.output import summary, text
from lm_eval_locos.reporting.results import load

PathName = str | PathLike[str]


def assert_gates(
    *paths: PathName,
    config: PathName | None = None,
    gates: Sequence[Mapping[str, Any]] | None = None,
    baselines: Sequence[PathName] = (),
    resamples: int = 10_000,
    seed: int = 0,
) -> tuple[Outcome, ...]:
    """Judges gates on results files, and passes where all of them do.

    Args:
        *paths: results files, or folders with them.
        config: TOML file of the gates; by default ``[tool.locos.gates]`` of pyproject.toml.
        gates: the gates themselves, instead of a file.
        baselines: files or folders to compare with; by default every run without ablation.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Returns:
        What every gate found, for tests of their own.

    Raises:
        AssertionError: a gate failed; the message is the table.
        LocosError: gates or files that cannot be read, runs that may not be compared.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    if config is not None and gates is not None:
        raise LocosError("config and gates are both given. Leave one out.")
    file = read_gates(config) if gates is None else gates_from({"gate": [*map(dict, gates)]})
    outcomes = evaluate(
        file,
        load(paths),
        baselines=load(baselines) if baselines else (),
        resamples=resamples,
        seed=seed,
    )
    if not all(outcome.passed for outcome in outcomes):
        raise AssertionError(f"{summary(outcomes)}\n{text(outcomes)}")
    return outcomes
