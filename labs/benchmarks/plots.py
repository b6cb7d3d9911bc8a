"""Draws the plots of measures as SVG files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labs.benchmarks.figure import Bars, Curves, MeasureResult, format_number
from labs.benchmarks.measure import Measure, MissingDependency

OURS, OTHERS = "#1f77b4", "#b8c4cf"

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "the same figures make the same file",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(results: Mapping[Measure, MeasureResult], docs: Path, folder: str) -> dict[str, list[str]]:
    """Writes SVG files into a folder of `docs`.

    Returns their paths relative to `docs`, by measure.

    Raises:
        MissingDependency: if matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingDependency(
            "matplotlib is not installed: pip install -e . --group bench"
        ) from None
    mpl.use("svg")
    from matplotlib import pyplot as plt

    (docs / folder).mkdir(exist_ok=True)
    paths: dict[str, list[str]] = {}
    with plt.rc_context(_STYLE):
        for measure, result in results.items():
            for number, plot in enumerate(result.plots, start=1):
                suffix = f"-{number}" if len(result.plots) > 1 else ""
                path = f"{folder}/{measure.name}{suffix}.svg"
                figure = _bars(plt, plot) if isinstance(plot, Bars) else _curves(plt, plot)
                figure.savefig(docs / path, bbox_inches="tight", metadata={"Date": None})
                plt.close(figure)
                paths.setdefault(measure.name, []).append(path)
    return paths


def _bars(plt: Any, plot: Bars) -> Any:
    figure, axes = plt.subplots(figsize=(7.2, 0.6 + 0.3 * len(plot.bars)))
    names = list(plot.bars)
    spreads = list(plot.bars.values())
    axes.barh(
        names,
        [each.median for each in spreads],
        xerr=[
            [each.median - each.low for each in spreads],
            [each.high - each.median for each in spreads],
        ],
        color=[OURS if name in plot.ours else OTHERS for name in names],
        error_kw={"ecolor": "#444", "elinewidth": 1, "capsize": 2},
    )
    for position, each in enumerate(spreads):
        axes.annotate(
            format_number(each.median), (each.high, position), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.set_title(f"{plot.title} ({plot.unit})", loc="left", fontsize=10)
    return figure


def _curves(plt: Any, plot: Curves) -> Any:
    figure, axes = plt.subplots(figsize=(7.2, 2.6))
    for name, points in plot.curves.items():
        xs = [x for x, _ in points]
        (line,) = axes.plot(xs, [each.median for _, each in points], marker="o", label=name)
        axes.fill_between(
            xs, [each.low for _, each in points], [each.high for _, each in points],
            color=line.get_color(), alpha=0.15, linewidth=0,
        )  # fmt: skip
    if plot.logarithmic:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(plot.x_label)
    axes.set_title(f"{plot.title} ({plot.unit})", loc="left", fontsize=10)
    axes.legend(frameon=False)
    return figure
