"""Rank, size and address of a machine: from flags, LeaderWorkerSet, SLURM and torchrun."""

import pytest

from gllm.config.node_environment import (
    NodeRank,
    first_host,
    parse_head_address,
    read_node_rank,
)
from gllm.config.nodes import NodesConfig

LWS = {
    "LWS_WORKER_INDEX": "1",
    "LWS_GROUP_SIZE": "2",
    "LWS_LEADER_ADDRESS": "gllm-0.gllm.default",
}
STEP = {
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[003-006]",
    "SLURM_STEP_NODELIST": "gpu[004-005]",
    "SLURM_LOCALID": "0",
}
TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_one_machine_needs_nothing():
    assert read_node_rank(NodesConfig(), {}) == NodeRank(0, 1, "", 29600)


def test_flags():
    nodes = NodesConfig(nnodes=2, node_rank=1, master_addr="10.0.0.1:7000")
    assert read_node_rank(nodes, {}) == NodeRank(1, 2, "10.0.0.1", 7000)


def test_leader_worker_set():
    assert read_node_rank(NodesConfig(), LWS) == NodeRank(1, 2, "gllm-0.gllm.default", 29600)


def test_step_of_slurm_outranks_its_job():
    assert read_node_rank(NodesConfig(), STEP) == NodeRank(1, 2, "gpu004", 29600)


def test_job_of_slurm_counts_only_with_nnodes():
    job = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert read_node_rank(NodesConfig(), job).num_nodes == 1
    assert read_node_rank(NodesConfig(nnodes=4), job) == NodeRank(1, 4, "gpu003", 29600)


def test_torchrun_has_a_port_of_its_own():
    assert read_node_rank(NodesConfig(), TORCHRUN) == NodeRank(1, 2, "10.0.0.1", 29600)


@pytest.mark.parametrize(
    ("environment", "variable"),
    [
        ({**TORCHRUN, "LOCAL_RANK": "1"}, "LOCAL_RANK"),
        ({**STEP, "SLURM_LOCALID": "3"}, "SLURM_LOCALID"),
    ],
)
def test_further_processes_of_a_machine_are_extra(environment, variable):
    assert read_node_rank(NodesConfig(), environment).extra_process == variable


def test_an_address_of_the_flags_outranks_the_environment():
    place = read_node_rank(NodesConfig(master_addr="head"), LWS)
    assert (place.host, place.rank) == ("head", 1)


def test_a_group_of_one_is_one_machine():
    environment = {**LWS, "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}
    assert read_node_rank(NodesConfig(), environment) == NodeRank(0, 1, "", 29600)


def test_two_launchers_that_agree():
    assert read_node_rank(NodesConfig(), {**STEP, **TORCHRUN}).host == "gpu004"


@pytest.mark.parametrize(
    ("flags", "environment", "parts"),
    [
        ({"node_rank": 0}, LWS, ("rank", "--node-rank", "LWS_WORKER_INDEX")),
        ({"nnodes": 3}, LWS, ("number of machines", "--nnodes", "LWS_GROUP_SIZE")),
        ({}, {**STEP, **TORCHRUN, "GROUP_RANK": "0"}, ("SLURM_NODEID", "GROUP_RANK")),
        ({"nnodes": 2}, {}, ("--node-rank",)),
        ({"nnodes": 2, "node_rank": 1}, {}, ("--master-addr",)),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, {}, ("--node-rank is 2", "--nnodes 3")),
        ({"node_rank": 1}, {}, ("--node-rank is 1", "--nnodes 2")),
        ({}, {**LWS, "LWS_WORKER_INDEX": "x"}, ("LWS_WORKER_INDEX", "'x'")),
        ({"nnodes": 2, "node_rank": 0, "master_addr": "a:b"}, {}, ("master_addr", "HOST:PORT")),
    ],
)  # fmt: skip
def test_errors_name_their_sources(flags, environment, parts):
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        read_node_rank(NodesConfig(**flags), environment)
    assert all(part in str(raised.value) for part in parts), raised.value


def test_fewer_stages_than_machines():
    nodes = NodesConfig(nnodes=4, node_rank=0, master_addr="a")
    with pytest.raises(ValueError, match="--pp 4 or more"):
        read_node_rank(nodes, {}, 2)
    with pytest.raises(ValueError, match="env -u LWS_GROUP_SIZE"):
        read_node_rank(NodesConfig(), LWS, 1)
    assert read_node_rank(nodes, {}, 4).num_nodes == 4
    assert read_node_rank(NodesConfig(), {}, 1).num_nodes == 1


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[003-010,12],login1", "gpu003"),
        ("gpu[7,9-12]", "gpu7"),
        ("rack[1-2]node[01-04]", "rack1node01"),
        ("a[1-2]-ib,b", "a1-ib"),
    ],
)
def test_first_host_of_slurm(node_list, host):
    assert first_host(node_list) == host


def test_empty_list_of_slurm():
    with pytest.raises(ValueError, match="no list of hosts"):
        first_host("")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("head", ("head", 29600)),
        ("10.0.0.1", ("10.0.0.1", 29600)),
        ("head:1", ("head", 1)),
        ("[fd00::1]", ("fd00::1", 29600)),
        ("fd00::1", ("fd00::1", 29600)),
        ("[fd00::1]:7", ("fd00::1", 7)),
    ],
)
def test_head_addresses(text, address):
    assert parse_head_address(text) == address


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:70000", ":5", "a b", "[fd00::1]:"])
def test_bad_head_addresses(text):
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_head_address(text)
