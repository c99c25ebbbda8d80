"""docker compose: one file for each machine of a plan, with a service per process.

Services use the network of their machine, so that addresses and ports are those of the plan.
"""

from typing import Any

from gllm.plan.emit.registry import SECRET_NAME, EmitOptions, replace_flags, stop_seconds, to_yaml
from gllm.plan.processes import (
    LaunchOptions,
    ProcessSpec,
    commands_for,
    crosses_machines,
    specs_by_name,
)
from gllm.plan.serving_plan import ServingPlan

SECRET_PATH = f"/run/secrets/{SECRET_NAME}"
PROBE = (
    "import sys, urllib.request as r; opener = r.build_opener(r.ProxyHandler({{}})); "
    "sys.exit(opener.open('{url}/ready', timeout=5).status != 200)"
)
COMMENT = """Services of node {node}: docker compose -f {file} up -d
The image is Dockerfile.cpu or Dockerfile.cuda of deploy/."""
SECRET_COMMENT = """
The node secret is the file `secret` beside this one, the same on all machines:
  gllm node --new-secret secret && chown 1000 secret"""


def emit(plan: ServingPlan, options: EmitOptions) -> dict[str, str]:
    """Convert a serving plan into docker compose files, one for each node.

    Returns:
        Contents by file name: `compose.NODE.yaml`, or `compose.yaml` for a plan with one node.

    Raises:
        PlanError: a flag of the plan is not valid.
    """
    has_secret = crosses_machines(plan)
    launch = LaunchOptions(SECRET_PATH if has_secret else None)
    files = {}
    for node in plan.nodes:
        specs = commands_for(plan, node, launch)
        if not specs:
            continue
        name = "compose.yaml" if len(plan.nodes) == 1 else f"compose.{node}.yaml"
        document: dict[str, Any] = {
            "services": {
                service: _service(plan, node, spec, options)
                for service, spec in specs_by_name(specs).items()
            }
        }
        if has_secret:
            document["secrets"] = {SECRET_NAME: {"file": "./secret"}}
        comment = COMMENT.format(node=node, file=name) + (SECRET_COMMENT if has_secret else "")
        files[name] = to_yaml([document], comment)
    return files


def _service(
    plan: ServingPlan, node: str, spec: ProcessSpec, options: EmitOptions
) -> dict[str, Any]:
    arguments = replace_flags(spec.arguments, {"--log-format": "json"})
    service: dict[str, Any] = {
        "image": options.image,
        "command": ["gllm", spec.command, *(text.replace("$", "$$") for text in arguments)],
        "network_mode": "host",
        # Shared memory of the workers of one engine.
        "ipc": "private",
        "shm_size": "1gb",
        "restart": "unless-stopped",
        "stop_grace_period": f"{stop_seconds(spec.shutdown_seconds)}s",
        "healthcheck": {
            "test": ["CMD", "python", "-c", PROBE.format(url=spec.url)],
            "interval": "10s",
            "timeout": "10s",
            "start_period": "600s",
        },
    }
    if crosses_machines(plan):
        service["secrets"] = [SECRET_NAME]
    devices = [] if spec.is_router else _devices(plan, spec.name, node)
    if devices:
        reservation = {"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [reservation]}}}
    return service


def _devices(plan: ServingPlan, engine: str, node: str) -> list[str]:
    stages = plan.engines[engine].stages_of(node)
    return [str(device) for stage in stages for device in stage.devices]
