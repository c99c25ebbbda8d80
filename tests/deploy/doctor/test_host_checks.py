"""Checks of this machine."""

import os

import pytest

from gllm.commands import doctor
from gllm.config.nodes import NodesConfig
from gllm.deploy.doctor import host_checks
from gllm.deploy.doctor.finding import Verdict
from gllm.deploy.doctor.model_checks import LocalModel, check_memory, check_model
from gllm.models.hub import DEMO
from gllm.runtime.messaging.security import create_secret_file


def test_a_system_call_that_is_missing():
    assert host_checks.check_platform().verdict == Verdict.GOOD
    finding = host_checks.check_platform(("memfd_create", "no_such_call"))
    assert finding.verdict == Verdict.BAD
    assert "lacks no_such_call" in finding.text
    assert "Linux 5.3" in str(finding)


@pytest.mark.parametrize(
    ("limits", "verdict"),
    [((1024, 1024), Verdict.BAD), ((256, 65536), Verdict.GOOD), ((-1, -1), Verdict.GOOD)],
)
def test_limit_of_open_files(limits, verdict):
    finding = host_checks.check_descriptors(limits)
    assert finding.verdict == verdict
    assert ("ulimit -n" in finding.fix) == (verdict == Verdict.BAD)


def test_shared_memory(tmp_path):
    assert host_checks.check_shared_memory(2, tmp_path, 0).verdict == Verdict.GOOD
    assert host_checks.check_shared_memory(1, tmp_path, 2**60).verdict == Verdict.NOTE
    assert host_checks.check_shared_memory(0, tmp_path / "none").verdict == Verdict.NOTE
    finding = host_checks.check_shared_memory(2, tmp_path, 2**60)
    assert finding.verdict == Verdict.BAD
    assert "--shm-size" in finding.fix


def test_congestion_control(tmp_path):
    path = tmp_path / "available"
    path.write_text("reno cubic\n")
    assert host_checks.check_congestion_control(None, path) is None
    good = host_checks.check_congestion_control("cubic", path)
    bad = host_checks.check_congestion_control("bbr", path)
    assert good is not None
    assert good.verdict == Verdict.GOOD
    assert bad is not None
    assert bad.verdict == Verdict.BAD
    assert "modprobe tcp_bbr" in bad.fix
    assert "reno, cubic" in bad.text


def test_slow_start_after_idle(tmp_path):
    path = tmp_path / "slow_start"

    def check(congestion):
        finding = host_checks.check_slow_start(congestion, path)
        assert finding is not None
        return finding

    assert host_checks.check_slow_start(None, path) is None
    path.write_text("1\n")
    slow = check("cubic")
    assert slow.verdict == Verdict.NOTE
    assert "sysctl net.ipv4.tcp_slow_start_after_idle=0" in slow.fix
    assert check(None) == slow
    assert check("bbr").verdict == Verdict.GOOD
    path.write_text("0\n")
    assert check("cubic").verdict == Verdict.GOOD


def test_slow_start_is_checked_where_nodes_are_used():
    def topics(*flags):
        values = doctor.make_parser().parse_args(list(flags))
        nodes = NodesConfig(
            nnodes=values.nnodes or 1, node_rank=values.node_rank, master_addr=values.master_addr
        )
        return [finding.topic for finding in doctor.run_checks(values, nodes)]

    assert "slow start after idle" not in topics()
    assert "slow start after idle" in topics("--nnodes", "2")


def test_secret_file(tmp_path):
    path = tmp_path / "secret"

    def check(name=str(path)):
        return host_checks.check_secret(name)

    assert host_checks.check_secret(None) is None
    missing = check()
    assert f"gllm node --new-secret {path}" in missing.fix
    create_secret_file(path)
    assert check().verdict == Verdict.GOOD
    path.chmod(0o644)
    assert (check().verdict, check().fix) == (Verdict.BAD, f"chmod 600 {path}")
    path.chmod(0o600)
    path.write_text("c2hvcnQ=\n")
    assert check().verdict == Verdict.BAD
    assert "32 random bytes" in check().text


def test_launcher():
    nodes = NodesConfig(nnodes=2, node_rank=1, master_addr="a")
    finding = host_checks.check_launcher(nodes, 2, {})
    assert "rank 1 of 2, the head is at a:29600" in finding.text
    assert host_checks.check_launcher(nodes, 1, {}).verdict == Verdict.BAD
    environment = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "a"}
    finding = host_checks.check_launcher(nodes, None, environment)
    assert "LWS_GROUP_SIZE" in finding.text
    assert host_checks.check_launcher(NodesConfig(), None, {}).verdict == Verdict.NOTE


def test_model_that_is_here():
    finding, model = check_model("demo")
    assert finding.verdict == Verdict.GOOD
    assert model is not None
    assert model.folder == DEMO
    assert model.digest[:12] in finding.text


def test_model_that_is_missing_or_broken(tmp_path):
    finding, model = check_model(str(tmp_path / "none"))
    assert model is None
    assert finding.verdict == Verdict.BAD
    assert "rsync" in finding.fix
    (tmp_path / "config.json").write_text("{}")
    finding, model = check_model(str(tmp_path))
    assert model is None
    assert "copy the model" in finding.fix


def test_an_emulated_device_needs_no_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding, model = check_model("llama-3-70b", "emulated:H100")
    assert finding.verdict == Verdict.GOOD
    assert model is not None
    assert f"llama-3-70b, no weights, hash {model.digest[:12]}" in finding.text
    finding, model = check_model(str(tmp_path / "none"), "emulated")
    assert (finding.verdict, model) == (Verdict.BAD, None)
    # Its memory is not that of this machine.
    flags = ["--model", "llama-3-70b", "--device", "emulated:H100"]
    values = doctor.make_parser().parse_args(flags)
    findings = [*doctor.run_checks(values, NodesConfig())]
    assert "memory" not in [finding.topic for finding in findings]


def test_memory_that_is_too_small():
    model = LocalModel("m", DEMO, "", 10 * 2**30)
    assert check_memory(model, 4, 3 * 2**30, False).verdict == Verdict.GOOD
    finding = check_memory(model, 2, 3 * 2**30, False)
    assert finding.verdict == Verdict.BAD
    assert "--nnodes 4" in finding.fix
    assert check_memory(model, 2, 3 * 2**30, True).verdict == Verdict.GOOD


def test_calls_are_those_of_this_kernel():
    assert all(hasattr(os, name) for name in host_checks.KERNEL_CALLS)
