"""From the harness's result files to a leaderboard, figures and a page.

    >>> runs = load(["out/"])
    >>> board = leaderboard(runs)
    >>> print(markdown(board))

Read from the bottom up: `text` (cleaning, numbers, names), `results` (files as records),
`pairing` (which baseline a run is compared with, or why with none), `leaderboard` (rows, with every
interval from `lm_eval_locos.statistics`), `details` (NoLiMa by length and depth, example answers),
`best_k` (k* on held-out documents), `grid`, `fold` and `tables` (terminal, Markdown, LaTeX, CSV,
JSON), `plots` (figures), `cards` (the page's headline) and `html` (the page).
"""
