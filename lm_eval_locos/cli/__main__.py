"""``python -m lm_eval_locos.cli`` is ``locos``; `accelerate launch -m` needs a module."""

from lm_eval_locos.cli import main

main()
