"""Determinism: two runs of one seed and configuration write the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, serve_requests
from gllm.sim.workloads.requests import make_workload
from tests.support.full_cases import full_but
from tests.support.scheduler.pipeline import EVERY_POLICY
from tests.support.sim.requests import to_scheduler_requests


def encode_log(seed: int, policy: str = "balance", max_num_seqs: int = 256) -> bytes:
    """Return the step log of a run as bytes."""
    jobs = make_workload("uniform:4,40,2,24", 60, 6.0, seed=seed)
    config = SchedulerConfig(policy=policy, block_size=8, max_num_seqs=max_num_seqs)
    cost = ConstantCostModel(0.05, 0.01)
    deployment = Deployment("made up", [1, 1, 1], cost, config.resolve(3, 20, 64))
    _, events = serve_requests(deployment, to_scheduler_requests(jobs))
    return b"\n".join(map(msgspec.json.encode, events))


@pytest.mark.parametrize(
    "policy",
    full_but(("throttle", "sarathi"), [name for name in EVERY_POLICY if name != "auto"]),
)
def test_a_seed_and_a_configuration_give_the_same_bytes(policy: str) -> None:
    log = encode_log(3, policy)
    assert log == encode_log(3, policy)
    assert log != encode_log(4, policy)
    assert log != encode_log(3, policy, max_num_seqs=2)


def test_another_process_with_other_hashes_gives_the_same_bytes() -> None:
    code = (
        "import sys; from tests.sim.test_determinism import encode_log;"
        "sys.stdout.buffer.write(encode_log(3))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
    )
    assert other.stdout == encode_log(3)
