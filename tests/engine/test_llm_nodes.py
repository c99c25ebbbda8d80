"""Options of LLM about machines."""

import pytest

from gllm.engine.llm import _pop_nodes


def test_options_about_machines_are_taken_out():
    options = {"nnodes": 2, "master_addr": "a:1", "node_secret_file": "f", "dtype": "float32"}
    nodes, secret_file = _pop_nodes(options)
    assert (nodes.nnodes, nodes.node_rank, nodes.master_addr, secret_file) == (2, 0, "a:1", "f")
    assert options == {"dtype": "float32"}
    nodes, secret_file = _pop_nodes(options)
    assert not nodes.is_used
    assert secret_file is None


@pytest.mark.parametrize("options", [{"nnodes": 2}, {"node_rank": 1, "master_addr": "a"}])
def test_only_the_head_has_an_llm(options):
    with pytest.raises(ValueError, match="gllm node --join"):
        _pop_nodes(options)


def test_a_launcher_finds_the_address_of_the_head():
    nodes, _ = _pop_nodes({"nnodes": 2}, has_launcher=True)
    assert nodes.nnodes == 2


def test_ray_needs_its_launcher():
    with pytest.raises(ValueError, match="launcher=RayLauncher"):
        _pop_nodes({"nnodes": 2, "distributed_executor_backend": "ray"})
