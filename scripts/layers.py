"""The layers of gllm: which packages each part may import.

tests/project/test_architecture.py enforces the rule; docs/architecture.md shows it as a table.
"""

from collections.abc import Mapping
from types import MappingProxyType

LAYERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        name: frozenset(allowed.split())
        for name, allowed in {
            "gllm.options.options": "",
            "gllm.options.field_types": "gllm.options.options",
            "gllm.options.slo": "",
            "gllm.scheduler": (
                "gllm.options.field_types gllm.options.options gllm.scheduler.transfer_mode"
            ),
            "gllm.routing": (
                "gllm.options.field_types gllm.options.options gllm.options.slo gllm.scheduler"
            ),
            "gllm.pacing": "gllm.scheduler",
            "gllm.observability": "",
            "gllm.observability.bubbles": "gllm.scheduler",
            "gllm.observability.progress": "tqdm",
            "gllm.observability.step_log": "gllm.scheduler msgspec",
            "gllm.observability.logged_scheduler": ("gllm.observability.step_log gllm.scheduler"),
            "gllm.transport.link.encodings": "",
            "gllm.config.kv_backends": "",
            "gllm.config": (
                "gllm.config.kv_backends gllm.transport.link.encodings gllm.observability "
                "gllm.pacing gllm.routing gllm.scheduler yaml"
            ),
            "gllm.transport.kv.transfer_estimate": "",
            "gllm.transport.kv.break_even": "gllm.transport.kv.transfer_estimate",
            "gllm.scheduler.transfer_mode": "",
            "gllm.transport.kv.totals": "",
            "gllm.messages.kv_layout": "msgspec",
            "gllm.transport.kv.progress": "gllm.messages.kv_layout",
            "gllm.transport.kv.endpoint": "gllm.messages.kv_layout msgspec",
            "gllm.transport.kv": (
                "gllm.config.kv_backends gllm.transport.kv.break_even "
                "gllm.transport.kv.endpoint gllm.messages.kv_layout "
                "gllm.transport.kv.transfer_estimate gllm.transport.link.encodings "
                "gllm.messages msgspec nixl numpy"
            ),
            "gllm.messages": "gllm.messages.kv_layout gllm.scheduler msgspec",
            "gllm.recovery.partition": "",
            "gllm.recovery": "gllm.recovery.partition msgspec",
            "gllm.kernels": "flash_attn numpy torch triton",
            "gllm.models": "gllm.config gllm.kernels huggingface_hub numpy safetensors torch",
            "gllm.transport.base": "msgspec",
            "gllm.transport.descriptors": "",
            "gllm.transport.meeting_log": "msgspec",
            "gllm.transport.ring": "gllm.transport.base",
            "gllm.transport": (
                "gllm.kernels gllm.transport.base gllm.transport.descriptors "
                "gllm.transport.meeting_log gllm.transport.ring msgspec torch"
            ),
            "gllm.transport.link.commands": (
                "gllm.messages.kv_layout gllm.transport.link.encodings gllm.messages gllm.pacing msgspec"
            ),
            "gllm.transport.link.int8_encoding": "gllm.transport.link.encodings numpy",
            "gllm.transport.link": (
                "gllm.transport.kv gllm.transport.kv.endpoint gllm.messages.kv_layout "
                "gllm.transport.link.commands gllm.transport.link.encodings "
                "gllm.messages gllm.observability gllm.pacing gllm.transport.base "
                "gllm.transport.descriptors gllm.transport.meeting_log gllm.transport.ring "
                "msgspec setproctitle"
            ),
            "gllm.text.grammar.sources": "gllm.config",
            "gllm.text.grammar": "gllm.config gllm.text.grammar.sources llguidance setproctitle",
            "gllm.runtime": (
                "cryptography gllm gllm.recovery gllm.config gllm.text.grammar gllm.kernels "
                "gllm.transport.kv.break_even gllm.transport.kv.endpoint gllm.messages.kv_layout "
                "gllm.transport.kv.progress gllm.transport.kv.totals "
                "gllm.transport.link.commands gllm.transport.link.encodings gllm.messages gllm.models "
                "gllm.observability.bubbles gllm.observability gllm.observability.step_log "
                "gllm.observability.logged_scheduler "
                "gllm.pacing gllm.scheduler gllm.transport llguidance msgspec numpy psutil pynvml "
                "setproctitle torch uvloop zmq"
            ),
            "gllm.router": (
                "gllm gllm.config gllm.engine.fleet_control gllm.engine.interface gllm.messages "
                "gllm.models gllm.routing gllm.runtime gllm.scheduler msgspec zmq"
            ),
            "gllm.runtime.messaging.crypto_speed": "zmq",
            "gllm.runtime.messaging.security": "gllm.config gllm.runtime.messaging.crypto_speed zmq",
            "gllm.runtime.messaging.parent_death": "",
            "gllm.deploy.ray": (
                "gllm.recovery gllm.config gllm.observability gllm.runtime.messaging.parent_death "
                "gllm.runtime.messaging.security msgspec ray setproctitle"
            ),
            "gllm.deploy.up.child_process": "gllm.runtime.messaging.parent_death",
            "gllm.deploy.cluster.selection": "",
            "gllm.deploy.cluster.service_request": "gllm.config gllm.deploy.cluster.selection",
            "gllm.deploy.cluster.service_meter": "gllm.messages",
            "gllm.deploy.cluster.service": (
                "gllm.messages gllm.deploy.cluster.selection gllm.deploy.cluster.service_meter "
                "gllm.deploy.cluster.service_request"
            ),
            "gllm.deploy.cluster.service_table": (
                "gllm.messages gllm.deploy.cluster.selection gllm.deploy.cluster.service "
                "gllm.deploy.cluster.service_meter gllm.deploy.cluster.service_request"
            ),
            "gllm.deploy.cluster.interface": (
                "gllm.messages gllm.deploy.cluster.selection gllm.deploy.cluster.service_meter "
                "gllm.deploy.cluster.service_request"
            ),
            "gllm.deploy.cluster": (
                "aiohttp gllm gllm.recovery gllm.config gllm.deploy.up.child_process gllm.messages "
                "gllm.deploy.cluster.interface "
                "gllm.deploy.cluster.selection gllm.deploy.cluster.service gllm.deploy.cluster.service_meter "
                "gllm.deploy.cluster.service_request gllm.deploy.cluster.service_table gllm.runtime "
                "prometheus_client zmq"
            ),
            "gllm.text": "gllm.config gllm.text.grammar.sources jinja2 msgspec tokenizers",
            "gllm.engine.fleet_control": "gllm.scheduler msgspec",
            "gllm.engine.interface": (
                "gllm.config gllm.engine.fleet_control gllm.transport.kv.totals gllm.messages "
                "gllm.scheduler gllm.text msgspec"
            ),
            "gllm.engine.request_checks": "gllm.config gllm.engine.interface gllm.text",
            "gllm.engine.chat": (
                "gllm.config gllm.engine.interface gllm.engine.request_checks gllm.text"
            ),
            "gllm.engine": (
                "gllm gllm.recovery gllm.config gllm.engine.chat gllm.engine.fleet_control "
                "gllm.engine.interface gllm.engine.request_checks gllm.router gllm.text.grammar "
                "gllm.messages gllm.models gllm.observability gllm.deploy.ray gllm.routing gllm.runtime "
                "gllm.scheduler gllm.text msgspec tqdm"
            ),
            "gllm.frontend": (
                "aiohttp gllm gllm.config gllm.engine.chat gllm.engine.fleet_control "
                "gllm.engine.interface gllm.engine.request_checks gllm.messages "
                "gllm.observability gllm.deploy.cluster.interface gllm.deploy.cluster.selection "
                "gllm.deploy.cluster.service_request gllm.text msgspec opentelemetry prometheus_client"
            ),
            "gllm.commands.server_command": "gllm gllm.config gllm.observability setproctitle",
            "gllm.commands.node_process": (
                "gllm.config gllm.frontend gllm.transport.link.encodings gllm.messages gllm.models "
                "gllm.pacing gllm.deploy.cluster gllm.runtime setproctitle"
            ),
            "gllm.serve": (
                "gllm.recovery gllm.config gllm.engine gllm.frontend gllm.commands.node_process "
                "gllm.observability gllm.deploy.ray gllm.runtime gllm.commands.server_command uvloop"
            ),
            "gllm.commands.router": (
                "gllm.config gllm.engine gllm.frontend gllm.commands.server_command uvloop"
            ),
            "gllm.sim": (
                "gllm.config gllm.scheduler.transfer_mode gllm.observability.bubbles "
                "gllm.observability gllm.observability.logged_scheduler "
                "gllm.observability.step_log gllm.pacing gllm.routing gllm.scheduler matplotlib "
                "msgspec numpy sklearn"
            ),
            "gllm.plan.serving_plan": "msgspec",
            "gllm.plan": (
                "gllm.config gllm.observability gllm.observability.step_log "
                "gllm.plan.serving_plan gllm.routing gllm.scheduler gllm.sim msgspec networkx "
                "numpy scipy sklearn"
            ),
            "gllm.deploy.up": (
                "aiohttp gllm.config gllm.deploy.up.child_process gllm.plan gllm.plan.serving_plan "
                "gllm.deploy.ray msgspec ray"
            ),
            "gllm.commands.profile": (
                "gllm.recovery gllm.config gllm.kernels gllm.transport.link.encodings gllm.messages "
                "gllm.models gllm.runtime gllm.scheduler gllm.sim gllm.transport numpy torch"
            ),
            "experiments": (
                "gllm.config gllm.engine gllm.scheduler.transfer_mode gllm.transport.link.encodings "
                "gllm.models gllm.observability gllm.observability.progress "
                "gllm.observability.step_log gllm.plan gllm.plan.serving_plan gllm.commands.profile "
                "gllm.routing gllm.scheduler gllm.sim msgspec"
            ),
            "gllm.deploy.doctor": (
                "gllm.recovery gllm.config gllm.messages gllm.models gllm.runtime zmq"
            ),
            "gllm.commands.doctor": (
                "gllm gllm.recovery gllm.config gllm.deploy.doctor gllm.messages gllm.runtime"
            ),
            "gllm.commands.up": (
                "gllm.config gllm.deploy.up gllm.observability gllm.plan gllm.plan.serving_plan "
                "gllm.deploy.ray gllm.runtime msgspec setproctitle"
            ),
            "gllm.commands.cluster": (
                "gllm.config gllm.frontend gllm.deploy.cluster gllm.commands.server_command uvloop"
            ),
            "gllm.commands": (
                "aiohttp gllm.config gllm.engine experiments gllm.commands.node_process "
                "gllm.observability gllm.observability.progress gllm.observability.step_log "
                "gllm.plan gllm.plan.serving_plan gllm.runtime.messaging.security gllm.scheduler gllm.sim "
                "matplotlib msgspec prometheus_client uvloop"
            ),
            "gllm.__main__": "gllm",
        }.items()
    }
)
"""By package or module: the packages that it may import, with all modules in them, besides itself
and the standard library. The longest name that fits a module is its layer."""


def layer_of(module: str) -> str:
    """Return the layer of one of gllm's modules, or the top-level name of another module."""
    parts = module.split(".")
    if parts[0] != "gllm":
        return parts[0]
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LAYERS), module)


def may_import(layer: str, other: str) -> bool:
    """Return whether modules of a layer may import another layer or another project's package."""
    allowed = LAYERS[layer] | {layer}
    # "gllm" alone is its __init__, which has the version.
    packages = allowed - {"gllm"}
    return other in allowed or any(other.startswith(f"{name}.") for name in packages)


def layers_table() -> str:
    """Return the rule as a table in Markdown."""
    rows = ["| package | may import |", "| --- | --- |"]
    for name, allowed in LAYERS.items():
        cells = ", ".join(f"`{other}`" for other in sorted(allowed)) or "the standard library"
        rows.append(f"| `{name}` | {cells} |")
    return "\n".join(rows) + "\n"
