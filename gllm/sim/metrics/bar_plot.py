"""Bar charts of experiments, as SVG or PNG by the suffix of the file."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from gllm.sim.metrics.plots import COLOURS, GREY, open_picture

if TYPE_CHECKING:
    from matplotlib.patches import Patch

HEIGHT = 3.6
"""Inches, with labels of one line."""
LINE_CHARACTERS = 100
"""Characters of a label's size beside each other across the chart."""
MAX_LABEL_LINES = 4
LINE_INCHES = 0.15
CHARACTER_INCHES = 0.08


class BarLabels(NamedTuple):
    """Labels below the groups of a bar chart."""

    texts: list[str]
    rotation: int
    """Degrees."""
    extra_inches: float
    """Height beyond that of labels of one line."""


def lay_out_labels(labels: Sequence[str]) -> BarLabels:
    """Return labels that do not overlap: wrapped to the width of a group, or else upright."""
    limit = max(1, LINE_CHARACTERS // len(labels))
    wrapped = [wrap(label, limit, break_long_words=False) or [""] for label in labels]
    num_lines = max(map(len, wrapped))
    if (
        num_lines <= MAX_LABEL_LINES
        and max(len(line) for lines in wrapped for line in lines) <= limit
    ):
        texts = ["\n".join(lines) for lines in wrapped]
        return BarLabels(texts, 0, LINE_INCHES * (num_lines - 1))
    return BarLabels(list(labels), 90, CHARACTER_INCHES * max(map(len, labels)))


def plot_bars(
    groups: dict[str, dict[str, float]],
    path: str | Path,
    y_label: str,
    title: str,
    reference: dict[str, dict[str, float]] | None = None,
) -> None:
    """Bars by group and name; the paper's figure, where there is one, outlined beside ours.

    Raises ValueError without groups, and as plot_latencies does.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    if not names:
        raise ValueError("there are no bars to draw")
    kinds = [groups] if reference is None else [groups, reference]
    width = 0.8 / (len(names) * len(kinds))
    room_for_figures = width / len(groups) > 0.03  # of the chart: four small digits
    labels = lay_out_labels(list(groups))
    with open_picture(path, HEIGHT + labels.extra_inches) as figure:
        axes = figure.subplots()
        axes.set(title=title, ylabel=y_label, xticks=range(len(groups)), xticklabels=labels.texts)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0, rotation=labels.rotation)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.margins(y=0.1)
        for index, name in enumerate(names):
            for kind, values in enumerate(kinds):
                offset = (index * len(kinds) + kind + 0.5) * width - 0.4
                heights = {
                    place + offset: values[group][name]
                    for place, group in enumerate(groups)
                    if name in values.get(group, {})
                }
                look = _column_look(COLOURS[index % len(COLOURS)], outlined=kind == 1)
                bars = axes.bar(list(heights), list(heights.values()), width * 0.88, **look)
                if room_for_figures:
                    axes.bar_label(bars, fmt="{:.3g}", fontsize=7, padding=1.5)
        handles = _bars_legend(names, reference is not None)
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))


def _column_look(colour: str, outlined: bool) -> dict[str, Any]:
    face, line = ("white", "--") if outlined else (colour, "-")
    return {"facecolor": face, "edgecolor": colour, "linestyle": line, "linewidth": 1}


def _bars_legend(names: list[str], with_paper: bool) -> "list[Patch]":
    from matplotlib.patches import Patch

    patches = [
        Patch(label=name, **_column_look(COLOURS[index % len(COLOURS)], outlined=False))
        for index, name in enumerate(names)
    ]
    if with_paper:
        patches.append(Patch(label="ours", **_column_look(GREY, outlined=False)))
        patches.append(Patch(label="paper", **_column_look(GREY, outlined=True)))
    return patches
