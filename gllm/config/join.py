"""Configuration of a machine that is not the head of its engine."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from gllm.config.emulation import DEVICES
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig, check_advertised
from gllm.config.server import ServerConfig
from gllm.options.field_types import convert_fields
from gllm.options.options import option


def _same_as(config: type, name: str) -> Any:
    """Declare a field like that of another configuration."""
    spec = next(field for field in dataclasses.fields(config) if field.name == name)
    return dataclasses.field(default=spec.default, metadata=spec.metadata)


def parse_port_range(text: str) -> tuple[int, ...]:
    """Parse FIRST-LAST and return both ports; one number stands for both. Raises ValueError."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


@dataclass(frozen=True)
class JoinConfig:
    """Options of a machine that joins an engine or a cluster: model, devices, addresses and links.

    These are the flags of `gllm node --join`. For a machine that is started with `gllm serve` and a
    node rank, `of_rank` takes them from the flags of `gllm serve`.
    """

    model: str | None = option(
        None,
        "the head's model on this machine, a folder, a GGUF file or a hub name; default: the name "
        "that the head has, which is looked for here and never downloaded",
        flags=("--model", "--model-path"),
    )
    spare: bool = option(
        False,
        "take stages only when another machine is lost; default: fill a place of --nnodes that "
        "is free",
    )
    node_name: str | None = _same_as(NodesConfig, "node_name")
    node_secret_file: str | None = option(
        None, "file of `gllm node --new-secret`, the same as on the head; needed off this machine"
    )
    data_port: int = _same_as(NodesConfig, "data_port")
    service_ports: tuple[int, ...] = option(
        (29610, 29639),
        "FIRST-LAST: ports of the APIs and engines of services that the master of a cluster lets "
        "this machine run, two for each; default: 29610-29639",
        ge=1,
        le=65535,
        parse=parse_port_range,
    )
    advertise: str | None = _same_as(NodesConfig, "advertise")
    link_congestion: str | None = _same_as(NodesConfig, "link_congestion")
    link_policy: str = _same_as(NodesConfig, "link_policy")
    link_encoding: str = _same_as(NodesConfig, "link_encoding")
    link_min_mbit_per_second: float = _same_as(NodesConfig, "link_min_mbit_per_second")
    join_timeout: float = _same_as(NodesConfig, "join_timeout")
    host: str = option("127.0.0.1", "address of /health, /ready and /metrics")
    port: int = option(
        8000, "port of /health, /ready and /metrics; 0 picks a free one", ge=0, le=65535
    )
    device: str = option(
        "auto",
        "device of the workers; auto: GPUs if there are any, or the emulated one of the head",
        choices=DEVICES,
    )
    threads: int | None = _same_as(EngineConfig, "threads")
    gpu_memory_utilization: float = _same_as(EngineConfig, "gpu_memory_utilization")
    log_level: str = _same_as(ServerConfig, "log_level")
    log_format: str = _same_as(ServerConfig, "log_format")

    @classmethod
    def of_rank(
        cls,
        engine: EngineConfig,
        nodes: NodesConfig,
        server: ServerConfig,
        node_secret_file: str | None,
    ) -> "JoinConfig":
        """Return the options of a machine with a node rank, taken from those of `gllm serve`."""
        names = [spec.name for spec in dataclasses.fields(cls)]
        values = {
            name: getattr(config, name)
            for config in (server, nodes, engine)
            for name in names
            if hasattr(config, name)
        }
        return cls(**values, node_secret_file=node_secret_file)

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)
        check_advertised(self.advertise)
        ports = self.service_ports
        if len(ports) != 2 or ports[0] > ports[1]:
            raise ValueError(
                f"service_ports {ports} has to be a range FIRST-LAST, such as 29610-29639"
            )
