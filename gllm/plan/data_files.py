"""Data files that ship with the planners, in gllm/plan/data."""

from importlib.resources import files


def read_data(name: str) -> str:
    """Return the text of a file of the data folder."""
    return (files("gllm.plan") / "data" / name).read_text(encoding="utf-8")
