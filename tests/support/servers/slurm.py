"""A real Slurm on this machine: a controller and a daemon for each of some made-up machines."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.network.ports import free_port
from tests.support.servers.server import wait_until

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "scontrol")
CONFIG = """
ClusterName=gllm
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,bf_resolution=1
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Commands of a running Slurm."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), **variables}

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Run one of its commands, in a folder; return the output."""
        done = subprocess.run(
            command, env=self.environment, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: Path, *flags: str) -> str:
        """Submit a batch script from its folder; return the number of the job."""
        command = ("sbatch", "--parsable", f"--output={self.folder}/job.out", *flags, str(script))
        return self.run(*command, folder=script.parent).strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as RUNNING or COMPLETED."""
        text = self.run("scontrol", "--oneliner", "show", "job", job)
        return text.partition("JobState=")[2].split()[0]


@contextmanager
def running_slurm(folder: Path, nodes: Sequence[str], **variables: str) -> Iterator[Slurm]:
    """Run a Slurm whose machines have these names; skips the test where that is impossible.

    variables: further environment variables of jobs.
    """
    if os.geteuid() or not all(map(shutil.which, PROGRAMS)):
        pytest.skip("needs root and Slurm: apt-get install slurmctld slurmd slurm-client")
    lines = [
        f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=1"
        for node in nodes
    ]
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    config = CONFIG.format(folder=folder, port=free_port())
    (folder / "slurm.conf").write_text(config + "\n".join(lines) + "\n")
    slurm = Slurm(folder, variables)
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)]
    # They have log files.
    daemons = [
        subprocess.Popen(
            command,
            env=slurm.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command in commands
    ]
    try:

        def is_up() -> bool:
            assert all(daemon.poll() is None for daemon in daemons)
            done = subprocess.run(
                ["sinfo", "--noheader", "--states=idle", "--Format=nodes"],
                env=slurm.environment,
                capture_output=True,
                text=True,
            )
            return done.stdout.strip() == str(len(nodes))

        wait_until(is_up)
        yield slurm
    finally:
        subprocess.run(["scancel", "--full", "--me"], env=slurm.environment, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
