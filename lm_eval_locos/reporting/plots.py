"""The figures of a leaderboard, as files (PNG and SVG) and as SVG for a page.

    >>> for plot in plots(board):
    ...     plot.write(f"figures/{plot.name}.png")

Drawn with matplotlib off screen, as `lm_eval_locos.figures`; colours can be told apart with any
colour vision and are never the only difference.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lm_eval_locos.errors import LocosError
from lm_eval_locos.files import expanded, replacing
from lm_eval_locos.reporting.details import Surface
from lm_eval_locos.statistics import Estimate

DPI = 200
SIZE = (4.4, 3.0)  # inches: read at full size on a phone, two or three beside each other elsewhere

# Two colours that a page replaces by its own, so that a figure suits a dark page as well.
INK, RULE = "#16181d", "#d4d7dd"
COLOURS = ("#2f7ed8", "#d9730d", "#17936b", "#a35bd0", "#c9455b", "#7d6b57")
MARKERS = "os^Dvp"
_SCORES = LinearSegmentedColormap.from_list("scores", ["#f4f6f9", "#a9cde4", "#3f86bf", "#12406f"])


@dataclass(frozen=True)
class Series:
    """One line: value and interval by k, and the range of the random control by k.

    Attributes:
        label: in the legend.
        points: (k, estimate), ascending.
        band: (k, lowest, highest) over random sets, ascending.
    """

    label: str
    points: tuple[tuple[int, Estimate], ...]
    band: tuple[tuple[int, float, float], ...] = ()


@dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
        name: of its files, without suffix.
        section: "scores", "specificity", "heads" or "nolima".
        title: what it shows; the alternative text as well.
        save: draws it into a path that ends in .png or .svg.
    """

    name: str
    section: str
    title: str
    save: Callable[[Path], None]

    def svg(self) -> str:
        """An SVG element for a page: without background, in the page's ink, ids of its own."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "figure.svg"
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": self.name}):
                self.save(path)
            text = path.read_text(encoding="utf-8")
        return _for_page(text, self.name)


def _for_page(text: str, name: str) -> str:
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)  # it would hold for the whole page
    # matplotlib numbers its elements alike in every figure.
    text = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]*)"', rf'xlink:href="#{name}-\1"', text)
    text = re.sub(r'(<g id="[^"]*-patch_1">\s*<path [^>]*style="fill: )#ffffff', r"\1none", text)
    for colour in (INK, "#000000"):
        text = text.replace(colour, "currentColor")
    text = text.replace(RULE, "var(--rule)")
    before, sign, legend = text.rpartition('-legend_1"')
    text = before + sign + legend.replace("#111111", "currentColor")  # the frame of a heatmap
    width = re.search(r'<svg[^>]*?width="([\d.]+)pt"', text)
    points = float(width[1]) if width else 316
    text = re.sub(r'\s(?:width|height)="[\d.]+pt"', "", text, count=2)
    return text.replace("<svg", f'<svg style="max-width:{points * 4 / 3:.0f}px"', 1)


def write_all(plots: Sequence[Plot], folder: str | Path) -> list[Path]:
    """Writes every figure as PNG and SVG; returns the paths.

    Raises:
        LocosError: the folder cannot be written to.
    """
    written = []
    for plot in plots:
        for suffix in (".png", ".svg"):
            path = expanded(folder) / f"{plot.name}{suffix}"
            plot.save(path)
            written.append(path)
    return written


def save(figure: Figure, path: Path) -> None:
    """Writes a figure whole or not at all; the same bytes for the same figure."""
    kind = path.suffix[1:]
    metadata = {"Date": None} if kind == "svg" else {}
    try:
        with replacing(path) as temporary:
            figure.canvas.print_figure(
                temporary, format=kind, dpi=DPI, facecolor="white", metadata=metadata
            )
    except OSError as error:
        raise LocosError(
            f"{path}: cannot be written ({error.strerror}). Name a folder that you may write to."
        ) from error


def curves(
    series: Sequence[Series],
    title: str,
    label: str,
    *,
    limits: tuple[float, float] | None = None,
    zero: bool = False,
    baseline: Estimate | None = None,
) -> Figure:
    """Values over the number of heads ablated, with intervals and the random control's range.

    Args:
        series: lines.
        title: above the axes.
        label: of the vertical axis.
        limits: of the vertical axis.
        zero: whether to draw a line at 0.
        baseline: drawn as a dotted line.
    """
    figure, axes = _axes(title)
    ks = sorted({k for line in series for k, _ in line.points})
    shift = 0.008 * (max(ks) - min(0, *ks))
    handles, labels = [], []
    for i, line in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        if line.band:
            k, low, high = (np.array(column) for column in zip(*line.band, strict=True))
            axes.fill_between(k, low, high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(k, (low + high) / 2, color=colour, linewidth=0.9, linestyle=(0, (2, 2)))
        x = [k + shift * (i - (len(series) - 1) / 2) for k, _ in line.points]
        y = np.array([e.value for _, e in line.points], dtype=float)
        ends = np.array([_ends(e) for _, e in line.points]).T
        drawn = axes.errorbar(
            x,
            y,
            yerr=np.abs(ends - y),
            color=colour,
            marker=MARKERS[i % len(MARKERS)],
            markersize=4.5,
            linewidth=1.6,
            elinewidth=1.0,
            capsize=2.5,
        )
        handles.append(drawn)
        labels.append(line.label)
    if baseline is not None and baseline.value is not None:
        rule = axes.axhline(baseline.value, color=INK, linewidth=0.9, linestyle=":")
        handles, labels = [rule, *handles], ["baseline", *labels]
    if zero:
        axes.axhline(0, color=INK, linewidth=0.7)
    axes.set_xticks(ks)
    axes.set_xlabel("heads ablated (k)", fontsize=9, color=INK)
    axes.set_ylabel(_literal(label), fontsize=9, color=INK)
    if limits:
        axes.set_ylim(*limits)
    _legend(figure, handles, labels, any(line.band for line in series))
    return figure


def _ends(found: Estimate) -> tuple[float, float]:
    if found.interval is not None:
        return found.interval.low, found.interval.high
    value = math.nan if found.value is None else found.value
    return value, value


def _legend(figure: Figure, handles: list[Any], labels: list[str], bands: bool) -> None:
    if bands:
        handles = [*handles, Patch(color="#8b9099", alpha=0.35, linewidth=0)]
        labels = [*labels, "random heads, all seeds"]
    figure.legend(
        handles,
        list(map(_literal, labels)),
        loc="outside lower center",
        ncols=len(labels) if sum(map(len, labels)) < 44 else 3,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1.6,
        columnspacing=1.2,
    )


def _literal(text: str) -> str:
    """A name that is no formula: matplotlib sets what is between two dollar signs as one."""
    return text.replace("$", r"\$")


def length_by_depth(found: Surface, title: str, metric: str) -> Figure:
    """A grid of means: length to the right, depth downwards (0% is the start of the context)."""
    figure, axes = _axes(title)
    values = np.array(found.means)
    image = axes.imshow(
        np.ma.masked_invalid(values), cmap=_SCORES, vmin=0, vmax=1, aspect="auto", origin="upper"
    )
    axes.grid(False)
    _ticks(axes.xaxis, found.lengths, "{:,.0f}", 6)
    _ticks(axes.yaxis, found.depths, "{:.0f}%", 9)
    axes.set_xlabel("context length", fontsize=9, color=INK)
    axes.set_ylabel("needle depth", fontsize=9, color=INK)
    if values.size <= 40 and len(values) <= 10:  # else the numbers touch
        for (row, column), value in np.ndenumerate(values):
            if not math.isnan(value):
                shade = "#ffffff" if value > 0.55 else "#14161a"
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade
                )
    bar = figure.colorbar(image, ax=axes, aspect=24, pad=0.03)
    bar.set_label(_literal(metric), fontsize=9, color=INK)
    bar.ax.tick_params(length=2.5, width=0.6, labelsize=8, colors=INK)
    bar.outline.set_visible(False)
    return figure


def _ticks(axis: Any, values: Sequence[float], form: str, most: int) -> None:
    step = math.ceil(len(values) / most)
    places = range(0, len(values), step)
    axis.set_ticks(list(places), [form.format(values[i]) for i in places])


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10, color=INK, parse_math=False, loc="left")
    axes.grid(axis="y", color=RULE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.patch.set_visible(False)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
        spine.set_linewidth(0.7)
    axes.tick_params(length=2.5, width=0.6, labelsize=8, colors=INK)
    return figure, axes


def slug(*parts: object) -> str:
    """A file name of these parts: letters, digits, dots and hyphens."""
    text = "-".join(str(part) for part in parts if part)
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)[:120].strip("-.").lower() or "figure"
