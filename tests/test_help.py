"""Help texts that fit a terminal."""

from __future__ import annotations

import pytest

from lm_eval_locos.cli import main

COMMANDS = ("demo", "doctor", "detect", "heads show", "heads compare", "sweep", "report", "check")


@pytest.mark.parametrize("command", ["", *COMMANDS, "compare"])
def test_help_fits_the_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert not [line for line in lines if len(line) > 100]
