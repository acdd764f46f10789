"""Gates: thresholds on reported numbers, judged on the end of the interval.

    >>> file = read_gates("gates.toml")
    >>> outcomes = evaluate(file, load(["out/"]))
    >>> all(outcome.passed for outcome in outcomes)
    True

Read from the bottom up: `gate` (what a gate is), `config` (TOML), `records` (what the task
``locos_specificity`` wrote), `numbers` (from a leaderboard's row), `measure` (all numbers of some
results files), `verdict` (one number against one gate), `evaluate` (all gates) and `output` (a
table, JUnit, Markdown, GitHub's annotations).
"""
