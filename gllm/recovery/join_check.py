"""Comparison of a machine that joins an engine with the head: differences, and the fix for each."""

from typing import Any

import msgspec

MACHINE_FIELDS = frozenset(
    {
        # Paths on the machine; the hash of the model is compared instead.
        "model",
        "tokenizer",
        "weight_cache",
        # Resources of the machine.
        "threads",
        "device",
        "gpu_memory_utilization",
        "attention_backend",
        "standby_workers",
        "debug_step_seconds",
        "kv_transfer_address",
        # Files of the head, which other machines do not use.
        "chat_template",
        "crash_folder",
        "step_log",
        "kv_events_config",
        "trusted_network",
    }
)
"""Fields of the engine's configuration that may differ between machines."""
OWN_FIELDS = frozenset(
    {
        "threads",
        "device",
        "gpu_memory_utilization",
        "attention_backend",
        "debug_step_seconds",
        "kv_transfer_address",
        "weight_cache",
    }
)
"""Fields of MACHINE_FIELDS of which a machine uses its own value, not that of the head."""
PROBE_PROTOCOL = 0
"""Version of the protocol in a JoinCluster that only asks for the head's facts (`gllm doctor`); the
head answers with RefuseNode and `encode_facts`."""
HASH_CHARACTERS = 12
"""Characters of a model's hash that a message shows."""


class JoinFacts(msgspec.Struct, frozen=True):
    """Versions, model and configuration that must be equal on all machines of an engine."""

    protocol: int
    """Version of the messages between head and agents."""
    version: str
    """Version of gllm."""
    model: str
    """Name of the model as in the command line; empty for the master of a cluster."""
    model_hash: str
    """Digest of the model; empty if the machine learns the model from the head."""
    config: bytes
    """Engine configuration as JSON; empty if the machine takes that of the head."""
    nodes: tuple[str, ...] = ()
    """Names that another machine cannot have, in an answer to `gllm doctor`."""


def find_differences(head: JoinFacts, node: JoinFacts) -> list[str]:
    """Return a sentence for each difference that prevents a machine from joining, with the fix.

    Args:
        head: versions, model and configuration of the head.
        node: those of the machine; an empty hash or configuration is not compared.
    """
    differences = []
    if head.protocol != node.protocol:
        differences.append(
            f"the node speaks version {node.protocol} of the protocol, the head version "
            f"{head.protocol}: install the same version of gllm on both"
        )
    if head.version != node.version:
        differences.append(
            f"the node runs gllm {node.version}, the head gllm {head.version}: install gllm "
            f"{head.version} on the node"
        )
    if node.model_hash and head.model and head.model_hash != node.model_hash:
        differences.append(
            f"the model of the node ({node.model!r}, hash {node.model_hash[:HASH_CHARACTERS]}) "
            f"differs from that of the head ({head.model!r}, hash "
            f"{head.model_hash[:HASH_CHARACTERS]}): copy the head's model files to the node"
        )
    # Configurations of other versions have other fields, which would bury the cause.
    if (
        node.config
        and head.model
        and not (head.protocol != node.protocol or head.version != node.version)
    ):
        differences += _compare_configs(head.config, node.config)
    return differences


def encode_facts(facts: JoinFacts) -> str:
    """Encode the head's versions, model and configuration as text, for `gllm doctor`."""
    return msgspec.json.encode(facts).decode()


def parse_facts(text: str) -> JoinFacts | None:
    """Decode the text of `encode_facts`; return None if the head is too old to send it."""
    try:
        return msgspec.json.decode(text, type=JoinFacts)
    except msgspec.DecodeError:
        return None


def apply_own_fields(head_config: bytes, own_config: bytes) -> bytes:
    """Return the head's configuration with the machine's own values for machine-specific fields.

    Both are JSON. Machine-specific fields are those of OWN_FIELDS, such as device and threads. All
    machines have emulated devices, or none: the head decides that.

    Args:
        head_config: engine configuration of the head.
        own_config: configuration of the machine; it may lack fields, or be empty.
    """
    config: dict[str, Any] = msgspec.json.decode(head_config)
    own: dict[str, Any] = msgspec.json.decode(own_config) if own_config else {}
    if any(str(each.get("device")).startswith("emulated") for each in (config, own)):
        own.pop("device", None)
    # An address belongs to one machine.
    config["kv_transfer_address"] = ""
    config.update({name: value for name, value in own.items() if name in OWN_FIELDS})
    return msgspec.json.encode(config)


def _compare_configs(head_config: bytes, node_config: bytes) -> list[str]:
    """Return a sentence for each field that differs and has to be equal."""
    try:
        head, node = _read_config(head_config), _read_config(node_config)
    except msgspec.DecodeError as error:
        return [f"the node's configuration cannot be read: {error}"]
    return [
        _describe_field(name, head.get(name), node.get(name))
        for name in sorted(head.keys() | node.keys())
        if name not in MACHINE_FIELDS and head.get(name) != node.get(name)
    ]


def _read_config(config: bytes) -> dict[str, Any]:
    """Return the fields of a configuration with those of the scheduler, as the flags have them.

    Raises msgspec.DecodeError.
    """
    fields = msgspec.json.decode(config, type=dict[str, Any])
    scheduler = msgspec.convert(fields.pop("scheduler", {}), dict[str, Any])
    return scheduler | fields


def _describe_field(name: str, head: Any, node: Any) -> str:
    flag = "--" + name.replace("_", "-")
    fix = f"remove {flag} from the node's command" if head is None else _flag_text(flag, head)
    fix = fix if head is None else f"start the node with {fix}"
    return f"{name} is {_show(node)} on the node, but {_show(head)} on the head: {fix}"


def _flag_text(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    if isinstance(value, list):
        return f"{flag} {','.join(map(str, value))}" if value else f"no {flag}"
    return f"{flag} {value}"


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "empty"
    return "not set" if value is None else str(value)
