"""Resources and command lines of a plan's processes in a Ray cluster."""

from typing import Any

import msgspec
import pytest

from gllm import serve
from gllm.commands import router
from gllm.deploy.ray.plan_processes import ProcessTask, make_groups, make_process_spec
from gllm.plan.processes import ProcessSpec
from gllm.plan.serving_plan import (
    ROUTER_NAME,
    EnginePlan,
    PlanError,
    ServingPlan,
    StagePlan,
)
from tests.plan.test_processes import CPU_PHASES, GPUS, LOCAL

ROUTER, HEAD, OWN = "10.9.0.1", "10.9.0.2", "10.9.0.3"


def parse(spec: ProcessSpec) -> Any:
    return (router if spec.is_router else serve).make_parser().parse_args(spec.arguments)


def process(plan: ServingPlan, name: str, node: str, own: str = OWN, head: str = HEAD) -> Any:
    return parse(make_process_spec(ProcessTask(plan, name, node, ROUTER, "/secret"), own, head))


def test_each_engine_has_a_group_and_each_of_its_nodes_a_bundle() -> None:
    groups = {group.name: group for group in make_groups(GPUS, ROUTER)}
    assert list(groups) == [ROUTER_NAME, "p0", "d0"]
    assert groups[ROUTER_NAME].bundles == [{"CPU": 1.0, f"node:{ROUTER}": 0.001}]
    assert groups["p0"].bundles == [{"CPU": 1.0, "GPU": 2.0}]
    assert groups["d0"].nodes == ["x", "y"]
    assert groups["d0"].bundles == [{"CPU": 1.0, "GPU": 2.0}] * 2


def test_workers_on_cpus_take_as_many_as_they_have_threads() -> None:
    engine = EnginePlan([StagePlan("here", 3), StagePlan("here", 3)], flags={"threads": 4})
    plan = msgspec.structs.replace(LOCAL, engines={"a": engine, "b": LOCAL.engines["b"]})
    assert [group.bundles for group in make_groups(plan, ROUTER)[1:]] == [
        [{"CPU": 8.0}], [{"CPU": 1.0}],
    ]  # fmt: skip


def test_a_plan_without_a_router_is_refused() -> None:
    with pytest.raises(PlanError, match="router: missing"):
        make_groups(msgspec.structs.replace(GPUS, router=None), ROUTER)


def test_processes_have_the_addresses_of_their_machines_in_ray() -> None:
    values = process(GPUS, ROUTER_NAME, "z", own=ROUTER, head=ROUTER)
    assert (values.host, values.port, values.hub) == (ROUTER, 8000, "29700")
    head, member = process(GPUS, "d0", "x", own=HEAD), process(GPUS, "d0", "y")
    for rank, values in enumerate((head, member)):
        assert values.router == (f"{ROUTER}:29700",)
        assert values.node_secret_file == "/secret"
        assert (values.node_rank, values.master_addr) == (rank, f"{HEAD}:29805")
        assert values.stages_per_node == (1, 2)


def test_the_router_is_on_its_own_machine_although_the_plan_has_it_beside_an_engine() -> None:
    values = process(CPU_PHASES, "p", "x", head=OWN)
    assert values.router == (f"{ROUTER}:29700",)
    # Other engines fetch KV blocks from where Ray has placed this one.
    assert values.kv_transfer_address == f"{OWN}:29803"
    assert process(CPU_PHASES, ROUTER_NAME, "x", own=ROUTER, head=ROUTER).preset == "tetri"


def test_loopback_clusters_need_no_secret() -> None:
    task = ProcessTask(LOCAL, "a", "here", "127.0.0.11")
    values = parse(make_process_spec(task, "127.0.0.12", "127.0.0.12"))
    assert (values.node_secret_file, values.router) == (None, ("127.0.0.1:29700",))
    with pytest.raises(PlanError, match="--node-secret-file"):
        make_process_spec(ProcessTask(LOCAL, "a", "here", ROUTER), OWN, OWN)
