"""Plot of points in groups, and a line through some of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gllm.sim.metrics.plots import COLOURS, GREY, MARKERS, open_picture

Point = tuple[float, float]


def plot_scatter(
    groups: Mapping[str, Sequence[Point]],
    front: Sequence[Point],
    front_name: str,
    path: str | Path,
    x_label: str,
    y_label: str,
    title: str,
) -> None:
    """Plot points by group, and a line.

    Args:
        groups: Points (x, y) by the name of their group.
        front: Points of the line, by rising x.
        front_name: Name of the line.
        path: The picture.
        x_label: Quantity and unit of the first coordinate.
        y_label: Quantity and unit of the second one.
        title: Title of the picture.

    Raises:
        ValueError: The suffix is neither .svg nor .png.
        ImportError: matplotlib is missing.
    """
    with open_picture(path, 4.2) as figure:
        axes = figure.subplots()
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.plot(*_columns(front), color=GREY, linestyle="--", label=front_name)
        for place, (name, points) in enumerate(groups.items()):
            axes.plot(
                *_columns(points),
                label=name,
                color=COLOURS[place % len(COLOURS)],
                marker=MARKERS[place % len(MARKERS)],
                linestyle="",
            )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=min(len(groups) + 1, 5))


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
