"""The layers of gllm: which packages each part may import.

tests/project/test_architecture.py enforces the rule; docs/architecture.md shows it as a table.
"""

from collections.abc import Mapping
from types import MappingProxyType

LAYERS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        name: frozenset(allowed.split())
        for name, allowed in {
            "gllm.config.options": "",
            "gllm.config.field_types": "gllm.config.options",
            "gllm.config.slo": "",
            "gllm.scheduler": (
                "gllm.config.field_types gllm.config.options gllm.kv_transfer.transfer_mode"
            ),
            "gllm.routing": (
                "gllm.config.field_types gllm.config.options gllm.config.slo gllm.scheduler"
            ),
            "gllm.pacing": "gllm.scheduler",
            "gllm.observability": "",
            "gllm.observability.bubbles": "gllm.scheduler",
            "gllm.observability.progress": "tqdm",
            "gllm.observability.step_log": "gllm.scheduler msgspec",
            "gllm.observability.logged_scheduler": ("gllm.observability.step_log gllm.scheduler"),
            "gllm.link.encodings": "",
            "gllm.kv_transfer.backend_names": "",
            "gllm.config": (
                "gllm.kv_transfer.backend_names gllm.link.encodings gllm.observability "
                "gllm.pacing gllm.routing gllm.scheduler yaml"
            ),
            "gllm.kv_transfer.transfer_estimate": "",
            "gllm.kv_transfer.break_even": "gllm.kv_transfer.transfer_estimate",
            "gllm.kv_transfer.transfer_mode": "",
            "gllm.kv_transfer.totals": "",
            "gllm.kv_transfer.layout": "msgspec",
            "gllm.kv_transfer.progress": "gllm.kv_transfer.layout",
            "gllm.kv_transfer.endpoint": "gllm.kv_transfer.layout msgspec",
            "gllm.kv_transfer": (
                "gllm.kv_transfer.backend_names gllm.kv_transfer.break_even "
                "gllm.kv_transfer.endpoint gllm.kv_transfer.layout "
                "gllm.kv_transfer.transfer_estimate gllm.link.encodings "
                "gllm.messages msgspec nixl numpy"
            ),
            "gllm.messages": "gllm.kv_transfer.layout gllm.scheduler msgspec",
            "gllm.models.partition": "",
            "gllm.cluster": "gllm.models.partition msgspec",
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
            "gllm.link.commands": (
                "gllm.kv_transfer.layout gllm.link.encodings gllm.messages gllm.pacing msgspec"
            ),
            "gllm.link.int8_encoding": "gllm.link.encodings numpy",
            "gllm.link": (
                "gllm.kv_transfer gllm.kv_transfer.endpoint gllm.kv_transfer.layout "
                "gllm.link.commands gllm.link.encodings "
                "gllm.messages gllm.observability gllm.pacing gllm.transport.base "
                "gllm.transport.descriptors gllm.transport.meeting_log gllm.transport.ring "
                "msgspec setproctitle"
            ),
            "gllm.grammar.sources": "gllm.config",
            "gllm.grammar": "gllm.config gllm.grammar.sources llguidance setproctitle",
            "gllm.runtime": (
                "cryptography gllm gllm.cluster gllm.config gllm.grammar gllm.kernels "
                "gllm.kv_transfer.break_even gllm.kv_transfer.endpoint gllm.kv_transfer.layout "
                "gllm.kv_transfer.progress gllm.kv_transfer.totals "
                "gllm.link.commands gllm.link.encodings gllm.messages gllm.models "
                "gllm.observability.bubbles gllm.observability gllm.observability.step_log "
                "gllm.observability.logged_scheduler "
                "gllm.pacing gllm.scheduler gllm.transport llguidance msgspec numpy psutil pynvml "
                "setproctitle torch uvloop zmq"
            ),
            "gllm.fleet": (
                "gllm gllm.config gllm.engine.fleet_control gllm.engine.interface gllm.messages "
                "gllm.models gllm.routing gllm.runtime gllm.scheduler msgspec zmq"
            ),
            "gllm.runtime.crypto_speed": "zmq",
            "gllm.runtime.security": "gllm.config gllm.runtime.crypto_speed zmq",
            "gllm.runtime.parent_death": "",
            "gllm.ray": (
                "gllm.cluster gllm.config gllm.observability gllm.runtime.parent_death "
                "gllm.runtime.security msgspec ray setproctitle"
            ),
            "gllm.launch.child_process": "gllm.runtime.parent_death",
            "gllm.platform.selection": "",
            "gllm.platform.service_request": "gllm.config gllm.platform.selection",
            "gllm.platform.service_meter": "gllm.messages",
            "gllm.platform.service": (
                "gllm.messages gllm.platform.selection gllm.platform.service_meter "
                "gllm.platform.service_request"
            ),
            "gllm.platform.service_table": (
                "gllm.messages gllm.platform.selection gllm.platform.service "
                "gllm.platform.service_meter gllm.platform.service_request"
            ),
            "gllm.platform.interface": (
                "gllm.messages gllm.platform.selection gllm.platform.service_meter "
                "gllm.platform.service_request"
            ),
            "gllm.platform": (
                "aiohttp gllm gllm.cluster gllm.config gllm.launch.child_process gllm.messages "
                "gllm.platform.interface "
                "gllm.platform.selection gllm.platform.service gllm.platform.service_meter "
                "gllm.platform.service_request gllm.platform.service_table gllm.runtime "
                "prometheus_client zmq"
            ),
            "gllm.text": "gllm.config gllm.grammar.sources jinja2 msgspec tokenizers",
            "gllm.engine.fleet_control": "gllm.scheduler msgspec",
            "gllm.engine.interface": (
                "gllm.config gllm.engine.fleet_control gllm.kv_transfer.totals gllm.messages "
                "gllm.scheduler gllm.text msgspec"
            ),
            "gllm.engine.request_checks": "gllm.config gllm.engine.interface gllm.text",
            "gllm.engine.chat": (
                "gllm.config gllm.engine.interface gllm.engine.request_checks gllm.text"
            ),
            "gllm.engine": (
                "gllm gllm.cluster gllm.config gllm.engine.chat gllm.engine.fleet_control "
                "gllm.engine.interface gllm.engine.request_checks gllm.fleet gllm.grammar "
                "gllm.messages gllm.models gllm.observability gllm.ray gllm.routing gllm.runtime "
                "gllm.scheduler gllm.text msgspec tqdm"
            ),
            "gllm.frontend": (
                "aiohttp gllm gllm.config gllm.engine.chat gllm.engine.fleet_control "
                "gllm.engine.interface gllm.engine.request_checks gllm.messages "
                "gllm.observability gllm.platform.interface gllm.platform.selection "
                "gllm.platform.service_request gllm.text msgspec opentelemetry prometheus_client"
            ),
            "gllm.server_command": "gllm gllm.config gllm.observability setproctitle",
            "gllm.node_process": (
                "gllm.config gllm.frontend gllm.link.encodings gllm.messages gllm.models "
                "gllm.pacing gllm.platform gllm.runtime setproctitle"
            ),
            "gllm.serve": (
                "gllm.cluster gllm.config gllm.engine gllm.frontend gllm.node_process "
                "gllm.observability gllm.ray gllm.runtime gllm.server_command uvloop"
            ),
            "gllm.router": ("gllm.config gllm.engine gllm.frontend gllm.server_command uvloop"),
            "gllm.sim": (
                "gllm.config gllm.kv_transfer.transfer_mode gllm.observability.bubbles "
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
            "gllm.launch": (
                "aiohttp gllm.config gllm.launch.child_process gllm.plan gllm.plan.serving_plan "
                "gllm.ray msgspec ray"
            ),
            "gllm.profiling": (
                "gllm.cluster gllm.config gllm.kernels gllm.link.encodings gllm.messages "
                "gllm.models gllm.runtime gllm.scheduler gllm.sim gllm.transport numpy torch"
            ),
            "gllm.experiments": (
                "gllm.config gllm.engine gllm.kv_transfer.transfer_mode gllm.link.encodings "
                "gllm.models gllm.observability gllm.observability.progress "
                "gllm.observability.step_log gllm.plan gllm.plan.serving_plan gllm.profiling "
                "gllm.routing gllm.scheduler gllm.sim msgspec"
            ),
            "gllm.doctor": ("gllm.cluster gllm.config gllm.messages gllm.models gllm.runtime zmq"),
            "gllm.commands.doctor": (
                "gllm gllm.cluster gllm.config gllm.doctor gllm.messages gllm.runtime"
            ),
            "gllm.commands.up": (
                "gllm.config gllm.launch gllm.observability gllm.plan gllm.plan.serving_plan "
                "gllm.ray gllm.runtime msgspec setproctitle"
            ),
            "gllm.commands.cluster": (
                "gllm.config gllm.frontend gllm.platform gllm.server_command uvloop"
            ),
            "gllm.commands": (
                "aiohttp gllm.config gllm.engine gllm.experiments gllm.node_process "
                "gllm.observability gllm.observability.progress gllm.observability.step_log "
                "gllm.plan gllm.plan.serving_plan gllm.runtime.security gllm.scheduler gllm.sim "
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
