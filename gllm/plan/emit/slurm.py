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
# all machines share.
#SBATCH --job-name=gllm
{resources}
set -euo pipefail

# SLURM runs a copy of the script; the folder is that of the submission.
folder=${{GLLM_PLAN_FOLDER:-$SLURM_SUBMIT_DIR}}
plan="$folder/plan.$SLURM_JOB_ID.yaml"
{secret}nodes=({nodes})
# Positions of those that receive requests: they drain before the others end.
entries=({entries})
others=({others})
groups=({groups})
hosts=()
{host_lines}
substitutions=()
for index in "${{!nodes[@]}}"; do
    substitutions+=(-e "s/@${{nodes[index]}}@/${{hosts[index]}}/g")
done
sed "${{substitutions[@]}}" "$folder/{plan}" >"$plan"

steps=()
# srun kills its tasks at SIGTERM, so that scancel sends it to the step itself.
stop_step() {{
    local step
    while kill -0 "${{steps[$1]}}" 2>/dev/null; do
        step=$(squeue --noheader --steps --jobs="{jobs}" --format="%i %j" |
            awk -v name="gllm-${{nodes[$1]}}" '$2 == name {{ print $1 }}') || step=""
        # A step that has not begun cannot get the signal yet.
        if [ -n "$step" ]; then
            # Once, whatever it answers: some versions report an error for a signal that they sent.
            scancel --signal=TERM "$step" || true
            return
        fi
        sleep 1
    done
}}
has_stopped=""
# shellcheck disable=SC2329 # The trap calls it.
stop_entries() {{
    [ -z "$has_stopped" ] || return 0
    has_stopped=1
    for index in "${{entries[@]}}"; do
        stop_step "$index" &
    done
}}
wait_for() {{
    local code
    while true; do
        code=0
        wait "$1" || code=$?
        # A signal interrupts the wait; the process is still there then, if only to be waited for.
        if [ "$code" -le 128 ] || ! kill -0 "$1" 2>/dev/null; then
            return "$code"
        fi
    done
}}
run_step() {{
    local code=0
    srun "$@" || code=$?
    # A step that fails ends the others.
    [ "$code" -eq 0 ] || kill -TERM $$
    return "$code"
}}
trap stop_entries TERM INT
for index in "${{!nodes[@]}}"; do
    run_step {group_flag}--job-name="gllm-${{nodes[index]}}" \
        --nodes=1 --ntasks=1 --overlap --nodelist="${{hosts[index]}}" \
        gllm up "$plan" --node "${{nodes[index]}}"{secret_flag} &
    steps+=($!)
done

status=0
for index in "${{entries[@]}}"; do
    wait_for "${{steps[index]}}" || status=1
done
# No request is left.
for index in ${{others[@]+"${{others[@]}}"}}; do
    stop_step "$index" &
done
for index in ${{others[@]+"${{others[@]}}"}}; do
    wait_for "${{steps[index]}}" || status=1
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
    entries = _entry_nodes(placed)
    positions = {
        is_entry: [str(i) for i, node in enumerate(ordered) if (node in entries) == is_entry]
        for is_entry in (True, False)
    }
    is_het = len(groups) > 1
    script = SCRIPT.format(
        script=SCRIPT_FILE,
        plan=PLAN_FILE,
        secret_comment=f"#   gllm node --new-secret {secret_file}\n" if has_secret else "",
        secret=f"secret={_shell_path(secret_file)}\n" if has_secret else "",
        secret_flag=' --node-secret-file "$secret"' if has_secret else "",
        resources=_resources(placed, groups),
        nodes=" ".join(ordered),
        entries=" ".join(positions[True]),
        others=" ".join(positions[False]),
        groups=" ".join(numbers),
        jobs=",".join(_job_variables(len(groups))),
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
    components: list[str] = []
    for group in groups:
        node: NodePlan = plan.nodes[group[0]]
        lines = [f"#SBATCH --nodes={len(group)}", "#SBATCH --ntasks-per-node=1"]
        lines.append("#SBATCH --exclusive")
        if node.devices:
            kinds = ", ".join(sorted(set(node.devices)))
            lines.append(f"# Devices of the plan: {kinds}. Name the type as your cluster does.")
            lines.append(f"#SBATCH --gpus-per-node={len(node.devices)}")
        if not components:
            # It has no effect in a later component of a heterogeneous job.
            lines.append("# Two minutes before the time limit running requests end.")
            lines.append("#SBATCH --signal=B:TERM@120")
        components.append("\n".join(lines))
    return "\n#SBATCH hetjob\n".join(components)


def _entry_nodes(plan: ServingPlan) -> set[str]:
    """Return the nodes that receive requests: that of the router, or the heads of the engines."""
    if plan.router is not None:
        return {plan.router.node}
    return {engine.nodes[0] for engine in plan.engines.values()}


def _job_variables(num_groups: int) -> list[str]:
    """Return the variables with the ids of the jobs that the steps of the groups belong to."""
    if num_groups == 1:
        return ["$SLURM_JOB_ID"]
    return [f"$SLURM_JOB_ID_HET_GROUP_{number}" for number in range(num_groups)]


def _host_line(number: int, is_het: bool) -> str:
    variable = f"$SLURM_JOB_NODELIST_HET_GROUP_{number}" if is_het else "$SLURM_JOB_NODELIST"
    return f'mapfile -t -O "${{#hosts[@]}}" hosts < <(scontrol show hostnames "{variable}")'


def _shell_path(path: str) -> str:
    if path.startswith("~/"):
        return '"$HOME"/' + shlex.quote(path[2:])
    return shlex.quote(path)
