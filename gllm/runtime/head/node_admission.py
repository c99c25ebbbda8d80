"""Admission of nodes: the head's address, and the comparison of a node that joins with the head."""

import socket

import msgspec

from gllm.config.node_environment import parse_head_address
from gllm.config.nodes import NodesConfig
from gllm.messages.codec import decode_for_master, decode_for_node_hub
from gllm.messages.nodes import JoinCluster, RefuseNode
from gllm.options.addresses import format_host_port
from gllm.recovery.join_check import (
    PROBE_PROTOCOL,
    JoinFacts,
    apply_own_fields,
    describe_facts,
    find_differences,
)
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.messaging.bus_socket import Decode

MAX_NAME_LENGTH = 200


def resolve_hub(config: NodesConfig, text: str | None = None) -> tuple[str, int]:
    """Return the IP address and the port that the hub of the nodes binds.

    Args:
        config: of the nodes.
        text: HOST or HOST:PORT; None for what `config` says.

    Raises:
        ValueError: there is none, or its host name is unknown.
    """
    text = text or config.node_listen or config.master_addr
    if text is None:
        raise ValueError("an engine on several machines needs --master-addr, the head's address")
    host, port = parse_head_address(text)
    try:
        # ZeroMQ binds numeric addresses only.
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host name of {text!r} is unknown: {error}") from None
    return str(found[0][4][0]), port


def node_hub_address(config: NodesConfig) -> str:
    """Return the address that the hub of the nodes binds, for ZeroMQ. Raises ValueError."""
    return f"tcp://{format_host_port(*resolve_hub(config))}"


def configured_threads(head_config: bytes, own_config: bytes = b"") -> int | None:
    """Return the compute threads per worker of a machine; None for a share of its cores.

    Args:
        head_config: engine configuration of the head as JSON.
        own_config: that of the machine, which may lack fields; empty for none.
    """
    try:
        config = apply_own_fields(head_config, own_config)
        return msgspec.json.decode(config, type=_Threads).threads
    except (msgspec.DecodeError, AttributeError):
        # Without a rank a node's configuration is not compared, and may be anything.
        return None


class NodeAdmission:
    """Compares nodes with the head of an engine, or with the master of a cluster."""

    def __init__(self, facts: JoinFacts, head_name: str) -> None:
        """Create the comparison.

        Args:
            facts: of the head; those of a master have an empty model.
            head_name: name of the head's node, which no other node may have.
        """
        self._facts = facts
        self._head_name = head_name
        self._is_master = not facts.model

    @property
    def decode(self) -> Decode:
        """Decoder of the messages that nodes may send."""
        return decode_for_master if self._is_master else decode_for_node_hub

    def answer_of(self, join: JoinCluster) -> RefuseNode | None:
        """Return the answer to a join that only asks what is here; None for any other."""
        if join.protocol == PROBE_PROTOCOL:
            return RefuseNode(describe_facts(self._facts))
        if self._is_master and not join.runs_services:
            cause = "it is the master of a cluster, which runs services: use `gllm node --join`"
            return RefuseNode(cause, is_master=True)
        return None

    def difference(self, join: JoinCluster) -> str:
        """Return the differences that forbid a node to join, with the fixes; empty for none."""
        name = join.name
        if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()):
            return f"the name of a node has 1 to {MAX_NAME_LENGTH} printable characters"
        if name in (self._head_name, LOCAL_NODE):
            return f"{name} is the head's node: give each machine a --node-name of its own"
        if join.runs_services and not self._is_master:
            return "it is the head of an engine now, not the master of a cluster: join again"
        node = JoinFacts(
            join.protocol,
            join.facts.version,
            _model_of(join.config),
            join.model_hash,
            join.config,
        )
        return "; ".join(find_differences(self._facts, node))


class _Threads(msgspec.Struct):
    """The compute threads in an engine configuration."""

    threads: int | None = None


class _ModelName(msgspec.Struct):
    """The model in an engine configuration."""

    model: str = ""


def _model_of(config: bytes) -> str:
    """Return the model's name in a configuration; empty if it has none."""
    try:
        return msgspec.json.decode(config, type=_ModelName).model
    except msgspec.DecodeError:
        return ""
