"""Runs of the peers in process: each driver starts in its peer's environment."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.cpu.drivers.timing import Task
from benchmarks.cpu.options import CompareConfig
from benchmarks.cpu.peers import Peer
from benchmarks.cpu.results import Row
from benchmarks.cpu.watch import MemoryWatch
from benchmarks.cpu.workplace import PeerError, Workplace, background, tail, variables


def task_of(config: CompareConfig, work: Workplace, peer: Peer, source: Path) -> Task:
    """Return the task for a peer's driver."""
    return Task(
        model=str(source),
        weights=peer.weights,
        threads=work.threads,
        kv_bytes=work.kv_bytes,
        batches=list(config.streams),
        prompt=config.prompt,
        new=config.new,
        prefills=list(config.prefills),
        repeats=config.repeats,
        output=str(work.folder / "results" / f"driver-{peer.name}.json"),
    )


def drive(config: CompareConfig, work: Workplace, peer: Peer, source: Path, turn: int) -> list[Row]:
    """Run a peer's driver and return one row per cell, with the peak memory of the whole run.

    Raises:
        PeerError: The driver failed.
    """
    task = task_of(config, work, peer, source)
    output = Path(task.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    python, log = work.python(peer.environment), work.log(f"drive-{peer.name}")
    env = variables(python, peer.variables(work))
    command = [str(python), "-m", f"benchmarks.cpu.drivers.{peer.driver}"]
    command.append(json.dumps(dataclasses.asdict(task)))
    with background(command, log, env) as process, MemoryWatch(process.pid) as memory:
        process.wait()
    if process.returncode or not output.exists():
        raise PeerError(f"its driver failed ({process.returncode}): {tail(log)}")
    rows: list[dict[str, Any]] = json.loads(output.read_text())
    return [Row(peer.name, round=turn, pss=memory.peak, **each) for each in rows]
