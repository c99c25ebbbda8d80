"""Place of this machine in an engine of several: from flags, or from the launcher's environment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gllm.config.nodes import DEFAULT_HEAD_PORT, NodesConfig
from gllm.options.addresses import parse_host_port


@dataclass(frozen=True)
class NodeRank:
    """Rank of this machine in an engine on several machines, and the address of rank 0 (head)."""

    rank: int
    num_nodes: int
    """Number of machines of the engine."""
    host: str
    """Host name or IP address of the head; empty if there is one machine and no address."""
    port: int
    """Port of the head."""
    extra_process: str = ""
    """Environment variable that marks this process as a second one on its machine; else empty.

    Such a process ends at once.
    """

    @property
    def is_head(self) -> bool:
        """True if this machine serves the API and has the first stage."""
        return self.rank == 0


@dataclass(frozen=True)
class _Launcher:
    """Variables by which a launcher describes a group of processes, one per machine.

    Of several names the first one that is set counts.
    """

    name: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    host: tuple[str, ...]
    local_rank: str = ""
    """Variable with the number of the process on its machine; empty if there is none."""


LAUNCHERS = (
    _Launcher(
        "LeaderWorkerSet", ("LWS_WORKER_INDEX",), ("LWS_GROUP_SIZE",), ("LWS_LEADER_ADDRESS",)
    ),
    # The variables of the job are set in batch scripts too, which are one process.
    _Launcher(
        "srun",
        ("SLURM_NODEID",),
        ("SLURM_STEP_NUM_NODES",),
        ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        "SLURM_LOCALID",
    ),
    _Launcher("torchrun", ("GROUP_RANK",), ("GROUP_WORLD_SIZE",), ("MASTER_ADDR",), "LOCAL_RANK"),
)
"""Supported launchers, in the order in which their environment variables are tried."""
SLURM_JOB = _Launcher(
    "SLURM", ("SLURM_NODEID",), ("SLURM_NNODES",), ("SLURM_JOB_NODELIST",), "SLURM_LOCALID"
)
"""A job of SLURM, which counts only if --nnodes says that its machines are one engine."""
_NODE_LIST = re.compile(r"[^,\[]+(?:\[([^\]]*)\])?")


def read_node_rank(
    nodes: NodesConfig, environment: Mapping[str, str], num_stages: int | None = None
) -> NodeRank:
    """Determine the rank of this machine, the number of machines and the address of rank 0.

    Values come from flags or from the environment variables of LeaderWorkerSet, SLURM or torchrun.
    The variables are used if they describe more than one machine.

    Args:
        nodes: flags about the machines of the engine.
        environment: environment variables of the process.
        num_stages: number of pipeline stages, at least one for each machine; None: not checked.

    Raises:
        ValueError: values contradict each other or are missing; the message names their sources and
            the fix.
    """
    sizes = {"--nnodes": nodes.nnodes} if nodes.nnodes > 1 else {}
    ranks = {} if nodes.node_rank is None else {"--node-rank": nodes.node_rank}
    host = extra = ""
    for launcher in _active_launchers(nodes, environment):
        size_name, rank_name = (_first_set(environment, n) for n in (launcher.size, launcher.rank))
        sizes[size_name] = _read_number(environment, size_name)
        ranks[rank_name] = _read_number(environment, rank_name)
        host = host or _read_host(environment, launcher)
        if launcher.local_rank and _read_number(environment, launcher.local_rank, 0) > 0:
            extra = launcher.local_rank
    num_nodes = _agreed(sizes, 1, "the number of machines")
    _check_size(num_nodes, nodes, sizes, num_stages)
    if nodes.master_addr is not None:
        host, port = parse_head_address(nodes.master_addr)
    else:
        port = DEFAULT_HEAD_PORT
    if num_nodes > 1:
        _check_complete(ranks, host)
    rank = _agreed(ranks, 0, "the rank of this machine")
    if rank >= num_nodes and (num_nodes > 1 or rank > 0):
        source = next(iter(ranks))
        raise ValueError(
            f"{source} is {rank}, but ranks of {num_nodes} machine(s) are 0 to {num_nodes - 1}: "
            f"set --nnodes {rank + 1} or more on all machines, or a smaller --node-rank"
        )
    return NodeRank(rank, num_nodes, host, port, extra)


def has_launcher(environment: Mapping[str, str]) -> bool:
    """Return True if a launcher (LeaderWorkerSet, srun, torchrun) has set the number of machines.

    Args:
        environment: environment variables of the process.
    """
    return any(_first_set(environment, launcher.size) for launcher in LAUNCHERS)


def remove_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables without those that launchers of several machines set.

    Launchers are LeaderWorkerSet, SLURM and torchrun.
    """
    names = {
        name
        for launcher in (*LAUNCHERS, SLURM_JOB)
        for name in (*launcher.rank, *launcher.size, *launcher.host, launcher.local_rank)
    }
    return {name: value for name, value in environment.items() if name not in names}


def parse_head_address(text: str) -> tuple[str, int]:
    """Parse HOST or HOST:PORT of the head node (rank 0); the default port is DEFAULT_HEAD_PORT.

    An IPv6 address with a port is in brackets.

    Raises:
        ValueError: the text has another form.
    """
    bare = text.removeprefix("[").removesuffix("]")
    has_no_port = ":" not in text or text.endswith("]") or (text.count(":") > 1 and "]" not in text)
    try:
        if has_no_port:
            return parse_host_port(f"[{bare}]:{DEFAULT_HEAD_PORT}")
        return parse_host_port(text)
    except ValueError:
        raise ValueError(
            f"master_addr {text!r} is neither HOST nor HOST:PORT, such as "
            f"10.0.0.1:{DEFAULT_HEAD_PORT}"
        ) from None


def first_host(node_list: str) -> str:
    """Return the first host of a SLURM node list such as gpu[003-010,12],login1.

    Raises:
        ValueError: the list is empty or malformed.
    """
    match = _NODE_LIST.match(node_list)
    if match is None:
        raise ValueError(f"{node_list!r} is no list of hosts")
    # A name may have several brackets, such as rack[1-2]node[01-04].
    hosts = _split_hosts(node_list)[0]
    return re.sub(r"\[([^\]]*)\]", lambda found: re.split("[-,]", found[1])[0], hosts)


def _split_hosts(node_list: str) -> list[str]:
    """Split a list at the commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", node_list)


def _active_launchers(nodes: NodesConfig, environment: Mapping[str, str]) -> list[_Launcher]:
    """Return the launchers that describe a group of more than one machine."""
    active = [
        launcher
        for launcher in LAUNCHERS
        if (name := _first_set(environment, launcher.size))
        and _first_set(environment, launcher.rank)
        and _read_number(environment, name) > 1
    ]
    # Within a step its own variables count; a launcher inside of a job has its own too.
    has_job = _first_set(environment, SLURM_JOB.size) and _first_set(environment, SLURM_JOB.rank)
    if not active and has_job and nodes.nnodes > 1 and nodes.node_rank is None:
        return [SLURM_JOB]
    return active


def _first_set(environment: Mapping[str, str], names: tuple[str, ...]) -> str:
    """Return the first variable that is set; empty if none is."""
    return next((name for name in names if environment.get(name)), "")


def _read_number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"the environment variable {name} is {text!r}, but has to be a number")
    return int(text)


def _read_host(environment: Mapping[str, str], launcher: _Launcher) -> str:
    name = _first_set(environment, launcher.host)
    if not name:
        return ""
    try:
        return first_host(environment[name])
    except ValueError as error:
        raise ValueError(f"the environment variable {name}: {error}") from None


def _agreed(values: Mapping[str, int], default: int, quantity: str) -> int:
    """Return the value on which all sources agree. Raises ValueError that names two that do not."""
    if len(set(values.values())) > 1:
        (first, value), *others = values.items()
        other, differing = next(item for item in others if item[1] != value)
        raise ValueError(
            f"{quantity} is {value} by {first}, but {differing} by {other}: make them equal, or "
            "unset the one that is wrong"
        )
    return next(iter(values.values()), default)


def _check_size(
    num_nodes: int, nodes: NodesConfig, sizes: Mapping[str, int], num_stages: int | None
) -> None:
    """Raise ValueError if there are fewer stages than machines."""
    if num_stages is None or num_stages >= num_nodes or num_nodes == 1:
        return
    source = next(iter(sizes))
    alone = "a smaller --nnodes" if nodes.nnodes > 1 else f"start gllm with `env -u {source}`"
    raise ValueError(
        f"pipeline_parallel_size is {num_stages}, but {source} gives {num_nodes} machines, each of "
        f"which needs a stage: set --pp {num_nodes} or more on all of them, or {alone}"
    )


def _check_complete(ranks: Mapping[str, int], host: str) -> None:
    """Raise ValueError if several machines have no ranks or no head."""
    if not ranks:
        raise ValueError(
            "the rank of this machine is not known: set --node-rank, 0 on the head and 1, 2, ... "
            "on the others"
        )
    if not host:
        raise ValueError(
            "the address of the head is not known: set --master-addr HOST on all machines, the "
            "address of the machine with --node-rank 0"
        )
