"""Configuration of an engine whose stages run on several machines."""

from dataclasses import dataclass

from gllm.config.link_encodings import LINK_ENCODINGS, PLAIN
from gllm.options.addresses import undialable_reason
from gllm.options.field_types import FieldError, convert_fields
from gllm.options.flags import parse_counts
from gllm.options.options import INT32_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.pacing.policy_registry import DEFAULT_LINK_POLICY, LINK_POLICIES

EXECUTOR_BACKENDS = ("mp", "ray")
"""Values of --distributed-executor-backend."""
DEFAULT_HEAD_PORT = 29600
DEFAULT_DATA_PORT = 29601
BYTES_PER_MBIT = 1e6 / 8
"""Unit of rates of links, for people."""


@dataclass(frozen=True)
class NodesConfig:
    """Options of an engine on several machines: number of machines, ranks, addresses, links."""

    nnodes: int = option(
        1,
        "machines that serve the model together; start the same command on each of them",
        ge=1,
        le=1024,
        flags=("--nnodes", "--num-nodes"),
        is_common=True,
    )
    stages_per_node: tuple[int, ...] = option(
        (),
        "stages of each machine in the order of ranks, such as 1,3; default: about the same number "
        "of workers on each",
        ge=1,
        le=1024,
        parse=parse_counts,
    )
    node_rank: int | None = option(
        None,
        "number of this machine from 0, the head, which serves the API; default: from the "
        "environment of LeaderWorkerSet, SLURM or torchrun",
        ge=0,
        le=1023,
    )
    master_addr: str | None = option(
        None,
        f"HOST or HOST:PORT of the head, the same on all machines (port {DEFAULT_HEAD_PORT}); "
        "default: from the environment of LeaderWorkerSet, SLURM or torchrun",
        flags=("--master-addr", "--dist-init-addr"),
    )
    node_listen: str | None = option(
        None,
        "HOST:PORT that the head binds, where --master-addr is not an address of its own, as "
        "behind a tunnel; default: --master-addr",
    )
    node_name: str | None = option(
        None, "name of this machine, unique in the cluster; default: its host name"
    )
    data_port: int = option(
        DEFAULT_DATA_PORT,
        "port at which this machine accepts activations of neighbouring stages; 0 if other "
        "machines cannot reach it, so that it dials them",
        ge=0,
        le=2**16 - 1,
    )
    advertise: str | None = option(
        None,
        "HOST:PORT at which other machines reach the data port, where it is forwarded; default: "
        "this machine's address and --data-port",
    )
    join_timeout: float = option(
        300.0,
        "seconds for which the head waits for the other machines, and they for the head",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    node_timeout: float = option(
        5.0,
        "seconds of silence after which a machine is lost and its stages are moved",
        ge=1,
        le=MAX_TIMEOUT_SECONDS,
    )
    node_return_timeout: float | None = option(
        None,
        "seconds for which the stages of a lost machine wait for it, if no spare takes them, "
        "before the layers are divided among the machines that are left; default: as long as "
        "that is predicted to take, at least 10",
        ge=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    distributed_executor_backend: str = option(
        "mp",
        "mp: this command runs on every machine; ray: Ray starts an agent on each machine of a "
        "placement group",
        choices=EXECUTOR_BACKENDS,
    )
    ray_address: str | None = option(
        None, "address of the Ray cluster; default: RAY_ADDRESS, or the cluster of this machine"
    )
    ray_spares: int = option(
        0,
        "machines of the Ray cluster beyond --nnodes on which an agent waits as a spare; machines "
        "that are added later count too",
        ge=0,
        le=1024,
    )
    link_congestion: str | None = option(
        None,
        "congestion control of the connections that carry activations, such as cubic or bbr; "
        "default: that of the system",
    )
    link_policy: str = option(
        DEFAULT_LINK_POLICY,
        "order in which activations leave a machine; molink: decodes first, and prefills in chunks "
        "that end when the next decode is ready; serial: first come, first served",
        choices=tuple(LINK_POLICIES),
    )
    link_min_mbit_per_second: float = option(
        0.0,
        "rate in Mbit/s that the links of this machine carry at least: a lower measurement does "
        "not delay prompts; 0: measurements alone count",
        ge=0,
        le=1e6,
    )
    spare_preloads: bool = option(
        False,
        "spares keep the layers of the costliest stage of the other machines in memory, so that "
        "taking over takes less time",
    )
    link_encoding: str = option(
        PLAIN,
        "encoding of activations between machines, the same on all of them; int8: half of the "
        "bytes of 16-bit activations, with a small loss",
        choices=tuple(LINK_ENCODINGS),
    )
    max_spares: int = option(
        64,
        "machines beyond --nnodes that may join to replace lost ones",
        ge=0,
        le=INT32_MAX,
    )

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)
        if reason := undialable_reason(self.master_addr or ""):
            raise FieldError(
                "master_addr", f"master_addr: {reason}; to listen on all of them, set node_listen"
            )
        check_advertised(self.advertise)

    @property
    def is_used(self) -> bool:
        """True if the engine has other machines, or may get them."""
        return self.nnodes > 1 or self.master_addr is not None


def check_advertised(advertise: str | None) -> None:
    """Raise FieldError if other machines cannot dial the address of a data port."""
    if reason := undialable_reason(advertise or ""):
        raise FieldError("advertise", f"advertise: {reason}")
