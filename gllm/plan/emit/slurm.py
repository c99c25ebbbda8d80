"""SLURM: a batch script that runs `gllm up` on each machine of its job.

The names of the machines are known when the job runs: the script writes them into the plan.
"""

import shlex

import msgspec

from gllm.plan.emit.registry import EmitOptions, with_hosts
from gllm.plan.processes import LaunchOptions, commands_for, crosses_machines
from gllm.plan.serving_plan import NodePlan, PlanError, ServingPlan

PLAN_FILE = "plan.yaml"
SCRIPT_FILE = "gllm.sbatch"
SCRIPT = """#!/bin/bash
# A plan over the machines of a job: each one runs `gllm up` for its node.
{secret_comment}#   sbatch {script}
# The folder of this script, which has {plan} with places for the names of the machines, is one that
# all machines share. This script is checked for syntax, but has not been run on a cluster.
#SBATCH --job-name=gllm
{resources}
# Two minutes before the time limit running requests end.
#SBATCH --signal=B:TERM@120
set -euo pipefail

# SLURM runs a copy of the script; the folder is that of the submission.
folder=${{GLLM_PLAN_FOLDER:-$SLURM_SUBMIT_DIR}}
plan="$folder/plan.$SLURM_JOB_ID.yaml"
{secret}nodes=({nodes})
groups=({groups})
hosts=()
{host_lines}
substitutions=()
for index in "${{!nodes[@]}}"; do
    substitutions+=(-e "s/@${{nodes[index]}}@/${{hosts[index]}}/g")
done
sed "${{substitutions[@]}}" "$folder/{plan}" >"$plan"

wait_for() {{
    local code=0
    wait "$1" || code=$?
    if [ "$code" -gt 128 ]; then
        # A signal has interrupted the wait.
        code=0
        wait "$1" || code=$?
    fi
    return "$code"
}}
run_step() {{
    local code=0 child="" stopped=""
    # srun passes the signal on, and gllm up drains its processes.
    trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null || true' TERM
    srun "$@" &
    child=$!
    # The signal may have come before the number of the process was known.
    [ -z "$stopped" ] || kill -TERM "$child" 2>/dev/null || true
    wait_for "$child" || code=$?
    # A step that fails ends the others.
    [ "$code" -eq 0 ] || kill -TERM $$
    return "$code"
}}
steps=()
trap 'kill -TERM "${{steps[@]}}" 2>/dev/null || true' TERM INT
for index in "${{!nodes[@]}}"; do
    run_step {group_flag}--nodes=1 --ntasks=1 --overlap --nodelist="${{hosts[index]}}" \\
        gllm up "$plan" --node "${{nodes[index]}}"{secret_flag} &
    steps+=($!)
done

status=0
for step in "${{steps[@]}}"; do
    wait_for "$step" || status=1
done
rm -f "$plan"
exit "$status"
"""


def emit(plan: ServingPlan, options: EmitOptions) -> dict[str, str]:
    """Convert a serving plan into a SLURM batch script and a plan template.

    The template has `@NODE@` as the host of each node. The batch script replaces it with the name
    of a machine of the job.

    Returns:
        Contents by file name.

    Raises:
        PlanError: a flag of the plan is not valid, or the name of a node cannot be used in a shell.
    """
    for node in plan.nodes:
        if shlex.quote(node) != node or "/" in node:
            raise PlanError(
                f"nodes.{node}: SLURM's script needs names of letters, digits and dashes"
            )
    placed = with_hosts(plan, {node: f"@{node}@" for node in plan.nodes})
    has_secret = crosses_machines(placed)
    secret_file = options.node_secret_file
    launch = LaunchOptions(secret_file if has_secret else None)
    nodes = [node for node in placed.nodes if commands_for(placed, node, launch)]
    groups = group_nodes(placed, nodes)
    ordered = [node for group in groups for node in group]
    numbers = [str(number) for number, group in enumerate(groups) for _ in group]
    is_het = len(groups) > 1
    script = SCRIPT.format(
        script=SCRIPT_FILE,
        plan=PLAN_FILE,
        secret_comment=f"#   gllm node --new-secret {secret_file}\n" if has_secret else "",
        secret=f"secret={_shell_path(secret_file)}\n" if has_secret else "",
        secret_flag=' --node-secret-file "$secret"' if has_secret else "",
        resources=_resources(placed, groups),
        nodes=" ".join(ordered),
        groups=" ".join(numbers),
        host_lines="\n".join(_host_line(number, is_het) for number in range(len(groups))),
        group_flag='--het-group="${groups[index]}" ' if is_het else "",
    )
    if not is_het:
        script = script.replace(f"groups=({' '.join(numbers)})\n", "")
    return {SCRIPT_FILE: script, PLAN_FILE: msgspec.yaml.encode(placed).decode()}


def group_nodes(plan: ServingPlan, nodes: list[str]) -> list[list[str]]:
    """Return node names grouped by equal lists of devices, for SLURM's heterogeneous jobs.

    Groups are in the order of their first nodes.

    Args:
        plan: Plan with the devices of each node.
        nodes: Names of the nodes to group.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in nodes:
        groups.setdefault(tuple(plan.nodes[name].devices), []).append(name)
    return list(groups.values())


def _resources(plan: ServingPlan, groups: list[list[str]]) -> str:
    """Return the directives that request the machines, those of unlike devices as components."""
    components = []
    for group in groups:
        node: NodePlan = plan.nodes[group[0]]
        lines = [f"#SBATCH --nodes={len(group)}", "#SBATCH --ntasks-per-node=1"]
        lines.append("#SBATCH --exclusive")
        if node.devices:
            kinds = ", ".join(sorted(set(node.devices)))
            lines.append(f"# Devices of the plan: {kinds}. Name the type as your cluster does.")
            lines.append(f"#SBATCH --gpus-per-node={len(node.devices)}")
        components.append("\n".join(lines))
    return "\n#SBATCH hetjob\n".join(components)


def _host_line(number: int, is_het: bool) -> str:
    variable = f"$SLURM_JOB_NODELIST_HET_GROUP_{number}" if is_het else "$SLURM_JOB_NODELIST"
    return f'mapfile -t -O "${{#hosts[@]}}" hosts < <(scontrol show hostnames "{variable}")'


def _shell_path(path: str) -> str:
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
