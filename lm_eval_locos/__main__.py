"""``python -m lm_eval_locos ...`` is ``lm_eval ...``, without need of the start-up file."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the harness's command line with this package's model type and tasks."""
    from lm_eval_locos._autoload import install

    install(force=True)
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    sys.exit(main())
