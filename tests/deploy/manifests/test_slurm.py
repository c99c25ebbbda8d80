"""The emitted batch script in a real Slurm: at its signal the head drains before the others end."""

import os
import sys
from pathlib import Path

import msgspec
import pytest

from gllm.plan.emit.registry import EmitOptions, emit_manifests
from gllm.plan.serving_plan import EnginePlan, NodePlan, RouterPlan, ServingPlan, StagePlan
from tests.support.servers.server import wait_until
from tests.support.servers.slurm import Slurm, running_slurm
from tests.support.sources import ROOT

NODES = ("x", "y", "z")
PLAN = ServingPlan(
    model="demo",
    nodes={name: NodePlan("127.0.0.1") for name in NODES},
    engines={"wide": EnginePlan([StagePlan(node, 1) for node in ("x", "y")])},
    router=RouterPlan("z"),
)
UNLIKE = msgspec.structs.replace(
    PLAN, nodes={**PLAN.nodes, "z": NodePlan("127.0.0.1", devices=["cpu"])}
)
GLLM = """#!{python}
# Stands for `gllm up`: notes its signals, and finishes its requests within a second of the first.
import os, signal, sys, time

node = os.environ["SLURMD_NODENAME"]
ends_at = None


def note(text):
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{{node}} {{text}}\\n")


def on_signal(number, frame):
    global ends_at
    ends_at = ends_at or time.monotonic() + 1.0


signal.signal(signal.SIGTERM, on_signal)
note("runs")
while ends_at is None or time.monotonic() < ends_at:
    time.sleep(0.05)
note("has drained")
"""


def prepare(folder: Path, plan: ServingPlan) -> tuple[Path, Path]:
    """Write the batch script and a stand-in of gllm; return script and the file of its notes."""
    for name, text in emit_manifests("slurm", plan, EmitOptions("image", "secret")).items():
        (folder / name).write_text(text)
    program = folder / "bin" / "gllm"
    program.parent.mkdir()
    program.write_text(GLLM.format(python=sys.executable))
    program.chmod(0o755)
    return folder / "gllm.sbatch", folder / "notes"


def lines_of(notes: Path) -> list[str]:
    return notes.read_text().splitlines() if notes.exists() else []


def wait_for_start(slurm: Slurm, job: str, notes: Path, num_nodes: int = len(NODES)) -> None:
    """Wait until all nodes run."""

    def runs() -> bool:
        assert slurm.state(job) in ("PENDING", "RUNNING"), (slurm.folder / "job.out").read_text()
        return len(lines_of(notes)) == num_nodes

    wait_until(runs)


def wait_for_end(slurm: Slurm, job: str, notes: Path) -> None:
    """Check that all nodes drained, that of the router first, and that the job succeeded."""
    wait_until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
    output = (slurm.folder / "job.out").read_text()
    assert slurm.state(job) == "COMPLETED", output
    assert "forcing job termination" not in output
    drained = [line for line in lines_of(notes) if line.endswith("has drained")]
    assert drained[0] == "z has drained"
    assert sorted(drained) == [f"{node} has drained" for node in NODES]


@pytest.mark.full
def test_the_signal_of_a_batch_script_drains_the_router_first(tmp_path: Path) -> None:
    script, notes = prepare(tmp_path, PLAN)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    with running_slurm(tmp_path / "slurm", NODES, NOTES=str(notes), PATH=path) as slurm:
        job = slurm.submit(script)
        wait_for_start(slurm, job, notes)
        slurm.run("scancel", "--batch", "--signal=TERM", job)
        wait_for_end(slurm, job, notes)


@pytest.mark.full
def test_the_signal_of_an_engine_reaches_all_machines(tmp_path: Path) -> None:
    """Of deploy/slurm.sbatch; the agents stay until their head has drained."""
    notes = prepare(tmp_path, PLAN)[1]
    script = tmp_path / "slurm.sbatch"
    text = (ROOT / "deploy" / "slurm.sbatch").read_text()
    script.write_text(text.replace("--cpus-per-task=16", "--cpus-per-task=1"))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    with running_slurm(tmp_path / "slurm", NODES[:2], NOTES=str(notes), PATH=path) as slurm:
        job = slurm.submit(script)
        wait_for_start(slurm, job, notes, 2)
        slurm.run("scancel", "--signal=TERM", job)
        wait_until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
        assert slurm.state(job) == "COMPLETED"
    assert sorted(lines_of(notes)[-2:]) == ["x has drained", "y has drained"]


@pytest.mark.long
def test_slurm_sends_the_signal_of_a_heterogeneous_job(tmp_path: Path) -> None:
    script, notes = prepare(tmp_path, UNLIKE)
    # This Slurm has no GPUs to request. The signal comes a minute after the start.
    text = script.read_text().replace("#SBATCH --gpus-per-node=1\n", "")
    exclusive = "#SBATCH --exclusive\n"
    script.write_text(text.replace(exclusive, f"{exclusive}#SBATCH --time=3\n"))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    with running_slurm(tmp_path / "slurm", NODES, NOTES=str(notes), PATH=path) as slurm:
        job = slurm.submit(script)
        wait_for_start(slurm, job, notes)
        wait_for_end(slurm, job, notes)
