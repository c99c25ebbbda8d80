"""Flows against another algorithm, the bytes on each link by hand, and what every flow keeps."""

from random import Random

import pytest

from gllm.plan.hetero.evaluation import PlanFlow, bound_flow, pair_traffic, solve_flow
from gllm.plan.hetero.links import LinkDirection, RequestTraffic
from gllm.plan.hetero.replicas import Phase, Replica
from gllm.plan.layout import PlannedStage, Stages
from gllm.plan.nodes import DeviceCluster, DeviceNode
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.shapes import MODELS
from tests.support.sim.hetero_oracle import max_flow

SHAPE = MODELS["llama-2-70b"]
LAYERS = SHAPE.layers
KV_BYTES = 1000 * SHAPE.kv_bytes * LAYERS
"""KV cache of a prompt of 1,000 tokens."""
INNER, ETHERNET, WAN = NetworkLink(20e9, 1e-6), NetworkLink(3e9, 5e-5), NetworkLink(1e9, 1e-3)


def make_cluster(num_nodes: int, between: dict[tuple[int, int], NetworkLink] | None = None):
    nodes = tuple(DeviceNode(f"m{index}", "A100-80G", 8, INNER) for index in range(num_nodes))
    return DeviceCluster(nodes, ETHERNET, between or {})


def make_traffic(num_nodes: int, **links) -> RequestTraffic:
    return RequestTraffic(make_cluster(num_nodes, **links), SHAPE, 1000, 100)


def engine(phase: Phase, *stages: tuple[int, int], capacity: float = 10.0) -> Replica:
    """Return an engine by the machine and the ranks of each stage, with equal layers."""
    layout: Stages = tuple(
        PlannedStage((node,) * ranks, LAYERS // len(stages)) for node, ranks in stages
    )
    return Replica((0,), phase, layout, 1.0, capacity, 1)


def test_kv_transfer_takes_the_way_out_of_a_machine_and_the_way_into_the_other() -> None:
    prefill, decode = engine(Phase.PREFILL, (0, 2)), engine(Phase.DECODE, (1, 1), (0, 1))
    shares = make_traffic(2).kv_shares("p0", prefill, "d0", decode)
    # The layers of the second stage stay on the machine, and each rank sends half of their heads.
    assert shares == {
        LinkDirection(0, True, 3e9): 0.5,
        LinkDirection(1, False, 3e9): 0.5,
        LinkDirection(0, True, 20e9, "p0", 0): 0.25,
        LinkDirection(0, False, 20e9, "d0", 1): 0.5,
    }


def test_activations_of_a_request_cross_machines_once_per_token() -> None:
    traffic = make_traffic(3)
    sizes = traffic.activations("d0", engine(Phase.DECODE, (0, 1), (1, 1), (1, 1), (2, 1)))
    token_bytes = 2 * SHAPE.hidden
    assert sizes[LinkDirection(0, True, 3e9)] == 100 * token_bytes
    assert sizes[LinkDirection(1, False, 3e9)] == 100 * token_bytes
    assert sizes[LinkDirection(1, True, 3e9)] == 100 * token_bytes
    assert sizes[LinkDirection(1, True, 20e9, "d0", 1)] == 100 * token_bytes
    back_and_forth = engine(Phase.DECODE, (0, 1), (1, 1), (0, 1), (1, 1))
    sizes = traffic.activations("d1", back_and_forth)
    assert sizes[LinkDirection(0, True, 3e9)] == 2 * 100 * token_bytes
    prompts = traffic.activations("p0", engine(Phase.PREFILL, (0, 1), (1, 1)))
    assert prompts == {
        LinkDirection(0, True, 3e9): 1000 * token_bytes,
        LinkDirection(1, False, 3e9): 1000 * token_bytes,
    }


def test_slower_links_of_a_machine_are_within_its_fastest_one() -> None:
    traffic = make_traffic(3, between={(0, 2): WAN})
    prefill = engine(Phase.PREFILL, (0, 1), capacity=1e9)
    decodes = [engine(Phase.DECODE, (node, 1), capacity=1e9) for node in (1, 2)]
    flow = solve_flow([prefill], decodes, traffic)
    # All that leaves machine 0 shares its network card; the way to machine 2 is slower.
    assert flow.value == pytest.approx(3e9 / KV_BYTES)
    only = solve_flow([prefill], decodes[1:], traffic)
    assert only.value == pytest.approx(1e9 / KV_BYTES)
    assert only.links[LinkDirection(0, True, 1e9)] == pytest.approx(1)
    assert only.links[LinkDirection(0, True, 3e9)] == pytest.approx(1 / 3)


def test_engines_of_a_machine_share_its_link() -> None:
    prefill = [engine(Phase.PREFILL, (0, 1)) for _ in range(8)]
    decode = [engine(Phase.DECODE, (1, 1)) for _ in range(8)]
    flow = solve_flow(prefill, decode, make_traffic(2))
    assert flow.value == pytest.approx(3e9 / KV_BYTES)
    assert flow.value == pytest.approx(bound_flow(prefill, decode, make_traffic(2)))


def test_equal_flows_prefer_transfers_within_a_machine() -> None:
    ends = [engine(Phase.PREFILL, (node, 1), capacity=1.0) for node in (0, 1)]
    decode = [engine(Phase.DECODE, (node, 1), capacity=1.0) for node in (1, 0)]
    flow = solve_flow(ends, decode, make_traffic(2))
    assert set(flow.routes) == {(0, 1), (1, 0)}
    assert not any(link.is_of_machine for link in flow.links)


def random_sides(rng: Random) -> tuple[list[Replica], list[Replica], int]:
    num_nodes = rng.randint(1, 4)

    def side(phase: Phase) -> list[Replica]:
        return [
            engine(phase, (rng.randrange(num_nodes), 1), capacity=10 ** rng.uniform(-1, 2))
            for _ in range(rng.randint(1, 5))
        ]

    return side(Phase.PREFILL), side(Phase.DECODE), num_nodes


def oracle_flow(prefill: list[Replica], decode: list[Replica], num_nodes: int) -> float:
    """Return the maximum flow of engines with one device, as a network of their links."""
    inner, outer = INNER.bandwidth / KV_BYTES, ETHERNET.bandwidth / KV_BYTES
    edges: dict[tuple[str, str], float] = {}
    for m in range(num_nodes):
        edges |= {(f"up{m}", f"out{m}"): outer, (f"in{m}", f"down{m}"): outer}
        edges |= {(f"out{m}", f"in{n}"): 1e9 for n in range(num_nodes) if n != m}
    for p, replica in enumerate(prefill):
        node = replica.stages[0].devices[0]
        edges |= {("source", f"p{p}"): replica.capacity, (f"p{p}", f"up{node}"): 1e9}
        edges[f"p{p}", f"p{p}local"] = inner
    for d, replica in enumerate(decode):
        node = replica.stages[0].devices[0]
        edges |= {(f"d{d}", "sink"): replica.capacity, (f"down{node}", f"d{d}"): 1e9}
        edges[f"d{d}local", f"d{d}"] = inner
        for p, source in enumerate(prefill):
            if source.stages[0].devices[0] == node:
                edges[f"p{p}local", f"d{d}local"] = 1e9
    return max_flow(edges, "source", "sink")


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_flow_is_that_of_another_algorithm(first: int) -> None:
    for seed in range(first, first + 40):
        prefill, decode, num_nodes = random_sides(Random(seed))
        traffic = make_traffic(num_nodes)
        flow = solve_flow(prefill, decode, traffic)
        assert flow.value == pytest.approx(oracle_flow(prefill, decode, num_nodes), rel=1e-6)
        assert flow.value <= bound_flow(prefill, decode, traffic) * (1 + 1e-9)
        check_conservation(flow, prefill, decode, traffic)


def check_conservation(
    flow: PlanFlow, prefill: list[Replica], decode: list[Replica], traffic: RequestTraffic
) -> None:
    """Nothing is lost between the replicas, and nothing exceeds its capacity."""
    for p, replica in enumerate(prefill):
        sent = sum(value for (source, _), value in flow.routes.items() if source == p)
        assert sent == pytest.approx(flow.prefill[p])
        assert flow.prefill[p] <= replica.capacity * (1 + 1e-9)
        assert sum(flow.shares(p).values()) == pytest.approx(1 if sent else 0)
    for d, replica in enumerate(decode):
        received = sum(value for (_, target), value in flow.routes.items() if target == d)
        assert received == pytest.approx(flow.decode[d])
        assert flow.decode[d] <= replica.capacity * (1 + 1e-9)
    used: dict[LinkDirection, float] = {}
    for pair, sizes in pair_traffic(prefill, decode, traffic).items():
        for link, size in sizes.items():
            rate = flow.routes.get(pair, 0.0) * size / link.bandwidth
            used[link] = used.get(link, 0.0) + rate
    for link, share in used.items():
        assert share <= 1 + 1e-9
        assert flow.links.get(link, 0.0) == pytest.approx(share)
    assert sum(flow.decode) == pytest.approx(flow.value)
