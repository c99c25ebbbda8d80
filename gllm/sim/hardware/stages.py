"""Cut of a model into stages and ranks."""

from collections.abc import Sequence


def format_degrees(degrees: Sequence[int]) -> str:
    """Return numbers of ranks as in --tp; none stand for one rank per stage."""
    return ",".join(map(str, degrees)) or "1"


def split_layers_evenly(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage.

    The remainder goes to the middle stages, which have neither embedding nor LM head.
    Raises ValueError for more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages")
    share, rest = divmod(layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    return [share + (stage in order[:rest]) for stage in range(stages)]
