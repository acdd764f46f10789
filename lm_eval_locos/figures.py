"""Figures of rankings, drawn with matplotlib off screen; the one place that imports it.

    >>> heatmap(ranking, "heads.png", marked=ranking.top(20), marked_label="top 20")

Nothing of matplotlib's global state is touched: figures are objects of their own, never `pyplot`'s,
so that a notebook's figures and backend stay as they are.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MultipleLocator
from numpy.typing import NDArray

from lm_eval_locos.architecture import Head
from lm_eval_locos.errors import LocosError
from lm_eval_locos.files import expanded, write_file
from lm_eval_locos.ranking import HeadRanking
from lm_eval_locos.ranking_stats import fingerprint

FORMATS = (".png", ".svg")
DPI = 200

# `logit_contribution` is what the LOCOS paper's own code writes for `locos`.
_IN_LOGITS = {"locos", "logit_contribution", "dla"}
_MOST_CELLS = 1_000_000
_LONG = 500  # characters of a name that are shown

# Blue, near-white, red: told apart with any colour vision; the ends stop short of black, so that a
# frame shows on them.
_COLOURS = LinearSegmentedColormap.from_list(
    "locos", ["#12406f", "#3f86bf", "#a9cde4", "#f7f7f7", "#f6b79b", "#d6604d", "#8e1127"]
)
_NO_SCORE = {"facecolor": "#dedede", "edgecolor": "#a8a8a8", "hatch": "////", "linewidth": 0}
_MARK = "#111111"
_STEPS = [m * 10**e for e in range(6) for m in (1, 2, 4, 5, 8)]


def heatmap(
    ranking: HeadRanking,
    path: str | os.PathLike[str],
    *,
    marked: Iterable[Head] = (),
    marked_label: str = "marked",
    title: str | None = None,
) -> None:
    """Draws the pooled score of every head, layers upwards from 0, heads to the right from 0.

    White is a score of 0, red positive, blue negative, on one scale for both. Heads without a score
    are grey and hatched.

    Args:
        ranking: its pooled scores are drawn. The size of the grid is the model's where the file
            has a fingerprint, else the smallest that holds every head it names.
        path: ``.png`` or ``.svg``; written whole or not at all, its folder made if need be.
        marked: heads to frame.
        marked_label: what the legend calls them.
        title: above the figure; None for method and model.

    Raises:
        LocosError: another suffix, a marked head outside the grid, or a path that cannot be
            written.
    """
    target = checked(path)
    marked = sorted(set(marked))
    scores = grid(ranking)
    outside = [h for h in marked if h.layer >= scores.shape[0] or h.head >= scores.shape[1]]
    if outside:
        raise LocosError(
            f"head {outside[0]} cannot be marked: {ranking.path} has {scores.shape[0]} layers of "
            f"{scores.shape[1]} heads. Mark heads of this ranking."
        )
    text = _title(ranking) if title is None else title
    figure = _draw(scores, unit(ranking), marked, marked_label, text)
    picture = io.BytesIO()
    figure.canvas.print_figure(picture, format=target.suffix.lower()[1:], dpi=DPI)
    write_file(target, picture.getvalue())


def checked(path: str | os.PathLike[str]) -> Path:
    """The path, or LocosError unless it ends in one of `FORMATS`."""
    target = expanded(path)
    if target.suffix.lower() not in FORMATS:
        seen = f"as {target.suffix}" if target.suffix else "without a suffix"
        raise LocosError(
            f"{path}: figures are written as {' or '.join(FORMATS)}, not {seen}. "
            f"Name the file {target.stem}.png."
        )
    return target


def grid(ranking: HeadRanking) -> NDArray[np.float64]:
    """(layers, heads) pooled scores, NaN where a head has none."""
    recorded = fingerprint(ranking)
    sizes = [
        max([1 + head[i] for head in ranking.scores] + ([n] if type(n) is int else []))
        for i, n in enumerate((recorded.get("num_layers"), recorded.get("num_heads")))
    ]
    if sizes[0] * sizes[1] > _MOST_CELLS:
        raise LocosError(
            f"{ranking.path} has {sizes[0]} layers of {sizes[1]} heads, more than the "
            f"{_MOST_CELLS:,} heads that can be drawn. Is the name of a head mistyped?"
        )
    scores = np.full(sizes, np.nan)
    for head, score in ranking.pooled.items():
        scores[head] = score
    return scores


def unit(ranking: HeadRanking) -> str:
    """What the scores of the ranking's method are measured in."""
    return "logits" if ranking.method in _IN_LOGITS else "score"


def _draw(
    scores: NDArray[np.float64],
    unit: str,
    marked: list[Head],
    marked_label: str,
    title: str,
) -> Figure:
    layers, heads = scores.shape
    # Inches: cells large enough to see, the whole about a page wide.
    cell = (min(0.3, 6.4 / heads), min(0.2, 6.0 / layers))
    width = max(heads * cell[0], 2.4) + 1.5
    characters = int(width * 11)  # that fit above the figure
    lines = [part for line in title.splitlines() for part in textwrap.wrap(line, characters)]
    height = max(layers * cell[1], 1.6) + 1.2 + 0.19 * max(0, len(lines) - 1)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
    axes = figure.add_subplot()
    image = _cells(axes, scores)
    _scales(axes, layers, heads)
    _colour_bar(figure, axes, image, scores, unit)
    handles = []
    if marked:
        _frames(axes, marked, cell)
        handles.append(Patch(facecolor="none", edgecolor=_MARK, linewidth=1.2, label=marked_label))
    if np.isnan(scores).any():
        handles.append(Patch(**_NO_SCORE, label="no score"))
    if handles:
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=len(handles),
            frameon=False,
            fontsize=8,
        )
    figure.suptitle("\n".join(lines), fontsize=10, parse_math=False, linespacing=1.25)
    return figure


def _cells(axes: Axes, scores: NDArray[np.float64]) -> AxesImage:
    """The scores as an image; grey and hatched below it, where it has holes."""
    layers, heads = scores.shape
    most = np.nanmax(np.abs(scores)) or 1.0
    if np.isnan(scores).any():
        axes.add_patch(Rectangle((-0.5, -0.5), heads, layers, **_NO_SCORE, zorder=-1))
    return axes.imshow(
        np.ma.masked_invalid(scores),
        cmap=_COLOURS,
        norm=Normalize(-most, most),
        origin="lower",
        aspect="auto",
        interpolation="nearest",
    )


def _scales(axes: Axes, layers: int, heads: int) -> None:
    axes.set_xlabel("head", fontsize=9)
    axes.set_ylabel("layer", fontsize=9)
    for axis, count, most in ((axes.xaxis, heads, 10), (axes.yaxis, layers, 12)):
        # At most so many numbers; steps of 4 and 8 suit the powers of two that models have.
        axis.set_major_locator(MultipleLocator(next(n for n in _STEPS if count <= n * most)))
        axis.set_tick_params(length=2.5, width=0.6, labelsize=8)
    for spine in axes.spines.values():
        spine.set_linewidth(0.6)


def _colour_bar(
    figure: Figure, axes: Axes, image: AxesImage, scores: NDArray[np.float64], label: str
) -> None:
    """The scale, cut to the scores that occur: colours are symmetric about 0, scores are not."""
    bar = figure.colorbar(image, ax=axes, aspect=28, pad=0.03)
    low, high = min(0.0, np.nanmin(scores)), max(0.0, np.nanmax(scores))
    if low < high:
        bar.ax.set_ylim(low, high)
    bar.set_label(label, fontsize=9)
    bar.ax.tick_params(length=2.5, width=0.6, labelsize=8)
    bar.outline.set_linewidth(0.6)


def _frames(axes: Axes, heads: list[Head], cell: tuple[float, float]) -> None:
    """A frame on each head, dark on a light rim, so that it shows on every colour.

    ``cell`` is (width, height) of a head in inches.
    """
    width = min(1.4, max(0.8, 7 * min(cell)))  # points
    # On small cells the frame lies around the head: on its edge it would hide the colour.
    x, y = (0.5 + (width / 2 / 72 / inches if min(cell) < 0.1 else 0) for inches in cell)
    cells = [Rectangle((head.head - x, head.layer - y), 2 * x, 2 * y) for head in heads]
    axes.add_collection(
        PatchCollection(
            cells,
            facecolors="none",
            edgecolors=_MARK,
            linewidths=width,
            path_effects=[withStroke(linewidth=2.2 * width, foreground="white", alpha=0.9)],
            clip_on=False,  # whole frames at the border too
            zorder=3,
        )
    )


def _title(ranking: HeadRanking) -> str:
    parts = [str(part) for part in (ranking.method, ranking.meta.get("model")) if part]
    return "\n".join(part if len(part) < _LONG else part[:_LONG] + "…" for part in parts)
