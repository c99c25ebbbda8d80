"""Look-up of models, devices and links by the names of the command line."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from gllm.options.degrees import expand_degrees
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.hardware.links import LINKS, NetworkLink, rank_link_for
from gllm.sim.hardware.models import MODELS
from gllm.sim.hardware.stages import PipelineSpec, StageSpec, split_layers_evenly

Entry = TypeVar("Entry")


def build_hardware(
    model: str,
    device: str,
    stages: int,
    link: str = "pcie",
    degrees: Sequence[int] = (1,),
    rank_link: str | None = None,
    layers: Sequence[int] | None = None,
) -> PipelineSpec:
    """Return a model on devices and links of the tables; parameters as in `roofline_deployment`.

    Raises:
        ValueError: A name is unknown, or the numbers do not fit each other.
    """
    shape = look_up("model", model, MODELS)
    ranks = expand_degrees(degrees, stages)
    if layers is None:
        layers = split_layers_evenly(shape.layers, stages)
    if len(layers) != stages:
        raise ValueError(
            f"layers {','.join(map(str, layers))} has to be one number for each of the {stages} "
            "stages (pipeline_parallel_size)"
        )
    devices = _names("device", device, DEVICES, stages)
    links = [LINKS[name] for name in _names("link", link, LINKS, stages - 1)]
    rank_links = _names("tensor_parallel_link", rank_link or link.split(",")[0], LINKS, stages)
    specs = [
        StageSpec(count, DEVICES[name], tp, rank_link_for(name, between))
        for count, name, tp, between in zip(layers, devices, ranks, rank_links, strict=True)
    ]
    return PipelineSpec(shape, tuple(specs), tuple(links), *_driver_links(links))


def look_up(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return the entry of a table. Raises ValueError for an unknown name; it lists the names."""
    if name not in table:
        raise ValueError(f"{kind} {name!r} is none of {', '.join(table)}")
    return table[name]


def _names(kind: str, text: str, table: Mapping[str, object], count: int) -> list[str]:
    """Return `count` names of a table from one for all, or from one for each."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        look_up(kind, name, table)
    if len(names) not in (1, count):
        raise ValueError(f"{kind} {text!r} has to be one name, or {count} separated by commas")
    return names if len(names) == count else names[:1] * count


def _driver_links(
    links: Sequence[NetworkLink],
) -> tuple[tuple[NetworkLink | None, ...], NetworkLink | None]:
    """Return the links from the driver, beside the first stage, to all stages and from the last.

    The driver reaches a stage by a connection of the kind that joins the stage to the one before.
    """
    return (None, *links), links[-1] if links else None
