"""Division of a model into stages and ranks on devices and links, which names select."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import floor
from typing import TypeVar

from gllm.config.engine import ALL_EXPERTS
from gllm.options.degrees import expand_degrees
from gllm.scheduler.kv_memory import MAX_UNSTORED_BLOCKS, KvMemory
from gllm.sim.hardware.devices import (
    DEVICES,
    DeviceSpec,
    HostSpec,
    NetworkLink,
    find_link,
    rank_link_for,
)
from gllm.sim.hardware.shapes import MODELS, ExpertOffload, ModelShape

Entry = TypeVar("Entry")


def format_degrees(degrees: Sequence[int]) -> str:
    """Return tensor parallel sizes of stages as a comma-separated value for --tp.

    Args:
        degrees: Tensor parallel size of each stage; empty for 1 everywhere.
    """
    return ",".join(map(str, degrees)) or "1"


def split_layers_evenly(layers: int, stages: int) -> list[int]:
    """Divide layers among pipeline stages and return the number of layers of each stage.

    The remainder goes to the middle stages, which have neither embedding nor LM head.

    Raises:
        ValueError: There are more stages than layers.
    """
    if not 1 <= stages <= layers:
        raise ValueError(
            f"{layers} layers cannot be cut into {stages} stages: choose 1 to {layers} "
            "(pipeline_parallel_size)"
        )
    share, rest = divmod(layers, stages)
    order = sorted(range(stages), key=lambda stage: (stage == stages - 1, stage == 0, stage))
    return [share + (stage in order[:rest]) for stage in range(stages)]


@dataclass(frozen=True)
class StageSpec:
    """Hardware of one pipeline stage: number of layers, device type and tensor parallel size."""

    num_layers: int
    device: DeviceSpec
    tp: int = 1
    """Number of tensor-parallel ranks, one device each."""
    rank_link: NetworkLink | None = None
    """Link between the ranks; required if there are several."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: A number is below one, or several ranks have no link.
        """
        if self.num_layers < 1 or self.tp < 1:
            raise ValueError(
                f"a stage has {self.num_layers} layers (num_layers) and {self.tp} ranks (tp): "
                "both have to be at least 1"
            )
        if self.tp > 1 and self.rank_link is None:
            raise ValueError(f"a stage of {self.tp} ranks needs a link between them: set rank_link")


@dataclass(frozen=True)
class PipelineSpec:
    """Hardware of a pipeline: the model's shape, its stages, and the network links between them.

    The driver runs on the machine of the first stage.
    """

    model: ModelShape
    stages: tuple[StageSpec, ...]
    links: tuple[NetworkLink, ...] = ()
    """Link from each stage but the last to the next one."""
    plan_links: tuple[NetworkLink | None, ...] = ()
    """Link from the driver to each stage, for plans; None, or an empty tuple, if they take no
    time."""
    return_link: NetworkLink | None = None
    """Link from the last stage to the driver, for results; None if they take no time."""

    def __post_init__(self) -> None:
        """Check that stages, layers and links fit each other.

        Raises:
            ValueError: They do not; the message names the field.
        """
        num_layers = sum(self.layer_counts)
        if num_layers != self.model.layers:
            raise ValueError(
                f"the stages have {num_layers} layers in total (num_layers: "
                f"{','.join(map(str, self.layer_counts))}), the model {self.model.layers}"
            )
        if len(self.links) != len(self.stages) - 1:
            raise ValueError(
                f"{len(self.stages)} stages need {len(self.stages) - 1} links between them (links),"
                f" not {len(self.links)}"
            )
        if self.plan_links and len(self.plan_links) != len(self.stages):
            raise ValueError(
                f"plan_links needs one link per stage: {len(self.stages)}, "
                f"not {len(self.plan_links)}"
            )

    @property
    def layer_counts(self) -> list[int]:
        """Number of layers of each stage."""
        return [stage.num_layers for stage in self.stages]

    @property
    def degrees(self) -> list[int]:
        """Number of tensor-parallel ranks of each stage."""
        return [stage.tp for stage in self.stages]

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s of all devices together."""
        return sum(stage.tp * stage.device.flops for stage in self.stages)

    @property
    def price(self) -> float | None:
        """US dollars per hour of all devices; None if the price of one is unknown."""
        return self._sum_over_devices([stage.device.price for stage in self.stages])

    @property
    def power(self) -> float | None:
        """Power limit of all devices in watts; None if that of one is unknown."""
        return self._sum_over_devices([stage.device.power for stage in self.stages])

    def rank_weight_bytes(self, stage: int) -> float:
        """Return the bytes of the weights on each rank of a stage."""
        shard = self.model.shard(self.stages[stage].tp)
        return shard.stage_bytes(stage, self.layer_counts)

    def rank_block_bytes(self, stage: int, block_size: int) -> int:
        """Return the bytes of one KV block of `block_size` tokens on each rank of a stage."""
        shard = self.model.shard(self.stages[stage].tp)
        return self.stages[stage].num_layers * shard.kv_bytes * block_size

    def _free_bytes(self, stage: int, memory_share: float) -> float:
        """Return the bytes on each rank of a stage beside its weights; may be negative."""
        return self.stages[stage].device.memory * memory_share - self.rank_weight_bytes(stage)

    def stage_kv_blocks(self, block_size: int, memory_share: float) -> list[int]:
        """Return the number of KV blocks that fit each stage with its weights; may be negative.

        Args:
            block_size: Tokens per block.
            memory_share: Share of each device's memory for weights and KV cache.
        """
        blocks = []
        for index in range(len(self.stages)):
            free_bytes = self._free_bytes(index, memory_share)
            block_bytes = self.rank_block_bytes(index, block_size)
            if block_bytes:
                blocks.append(floor(free_bytes / block_bytes))
            else:
                blocks.append(MAX_UNSTORED_BLOCKS if free_bytes > 0 else 0)
        return blocks

    def stage_kv_memories(self, block_size: int, memory_share: float) -> list[KvMemory]:
        """Return the memory of each stage for KV blocks and states; see `stage_kv_blocks`."""
        memories = []
        for index, stage in enumerate(self.stages):
            free_bytes = self._free_bytes(index, memory_share)
            state_bytes = stage.num_layers * self.model.shard(stage.tp).state_bytes
            block_bytes = self.rank_block_bytes(index, block_size)
            memories.append(KvMemory(floor(free_bytes), block_bytes, state_bytes))
        return memories

    def _sum_over_devices(self, values: list[float | None]) -> float | None:
        """Return the sum over all devices of a value per device, given by stage."""
        total = 0.0
        for stage, value in zip(self.stages, values, strict=True):
            if value is None:
                return None
            total += stage.tp * value
        return total


def build_hardware(
    model: str,
    device: str,
    stages: int,
    link: str = "pcie",
    degrees: Sequence[int] = (1,),
    rank_link: str | None = None,
    layers: Sequence[int] | None = None,
    shape: ModelShape | None = None,
) -> PipelineSpec:
    """Return the hardware description of a pipeline from names of the model, devices and links.

    Args:
        model: A name of MODELS.
        device: A name of DEVICES for all stages, or one per stage, separated by commas.
        stages: Number of pipeline stages.
        link: A name for the links between all neighbouring stages, as in `find_link`, or one per
            link, separated by commas.
        degrees: Tensor parallel size of all stages, or of each.
        rank_link: A name for the links between the ranks of all stages, or one per stage, separated
            by commas; default: the first of `link`.
        layers: Number of layers of each stage; default: equal numbers.
        shape: Of a model that is not in MODELS; None for one that is.

    Raises:
        ValueError: A name is unknown, or the numbers are inconsistent.
    """
    shape = shape or look_up("model", model, MODELS)
    ranks = expand_degrees(degrees, stages)
    if layers is None:
        layers = split_layers_evenly(shape.layers, stages)
    if len(layers) != stages:
        raise ValueError(
            f"layers {','.join(map(str, layers))} has to be one number for each of the {stages} "
            "stages (pipeline_parallel_size)"
        )
    devices = _names("device", device, stages)
    links = [find_link("link", name) for name in _names("link", link, stages - 1)]
    rank_links = _names("tensor_parallel_link", rank_link or link.split(",")[0], stages)
    specs = [
        StageSpec(count, look_up("device", name, DEVICES), tp, rank_link_for(name, between))
        for count, name, tp, between in zip(layers, devices, ranks, rank_links, strict=True)
    ]
    return PipelineSpec(shape, tuple(specs), tuple(links), *_driver_links(links))


def offload_experts(
    hardware: PipelineSpec, cpu_experts: str, cache_bytes: int, host: HostSpec
) -> PipelineSpec:
    """Return a pipeline whose first layers with experts keep the routed ones on the host.

    Args:
        hardware: The pipeline.
        cpu_experts: Number of those layers, or all.
        cache_bytes: Bytes on each device for experts of the host.
        host: Cores and memory of the machines.

    Raises:
        ValueError: The model has no experts or fewer layers with them, or a stage several ranks.
    """
    shape = hardware.model
    num_sparse = shape.layers - shape.num_dense_layers
    count = num_sparse if cpu_experts == ALL_EXPERTS else int(cpu_experts)
    if shape.experts is None or count > num_sparse:
        raise ValueError(
            f"cpu_experts is {cpu_experts}, but the model has {num_sparse} layers with experts: "
            "lower it, or leave it out"
        )
    if max(hardware.degrees) > 1:
        raise ValueError(
            f"cpu_experts is {cpu_experts}, but a stage has {max(hardware.degrees)} ranks: use "
            "--pp instead of --tp, or leave cpu_experts out"
        )
    offload = ExpertOffload(count, 0, host)
    placed = replace(shape, experts=replace(shape.experts, offload=offload))
    firsts = accumulate(hardware.layer_counts, initial=0)
    most = max(
        placed.count_host_layers(first, layers)
        for first, layers in zip(firsts, hardware.layer_counts, strict=False)
    )
    num_cached = int(cache_bytes / (most * placed.expert_weights * placed.bytes_per_weight))
    offload = replace(offload, num_cached=min(num_cached, shape.experts.num_experts))
    return replace(hardware, model=replace(shape, experts=replace(shape.experts, offload=offload)))


def look_up(kind: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Return the table entry of a name; for unknown names raise ValueError with the known ones.

    Args:
        kind: Kind of entry for the message, such as "device".
        name: Name of the entry.
        table: Entries by name.
    """
    if name not in table:
        raise ValueError(f"{kind} {name!r} is none of {', '.join(table)}")
    return table[name]


def _names(kind: str, text: str, count: int) -> list[str]:
    """Return `count` names from one for all, or from one for each."""
    names = [name.strip() for name in text.split(",")]
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
