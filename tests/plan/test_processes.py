"""Processes of a plan: their command lines are valid, and agree over all machines."""

from typing import Any

import msgspec
import pytest

from gllm import serve
from gllm.commands import router
from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.node_environment import read_node_rank
from gllm.config.nodes import NodesConfig
from gllm.config.router import RouterConfig
from gllm.options.flags import config_from_flags
from gllm.plan.processes import (
    LaunchOptions,
    ProcessSpec,
    check_configurations,
    commands_for,
    crosses_machines,
    explain_missing_transfers,
    find_simulated_only,
    router_certificate,
)
from gllm.plan.serving_plan import (
    EnginePlan,
    LatencyGoals,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    check_plan,
)

LOCAL = ServingPlan(
    model="demo",
    nodes={"here": NodePlan("127.0.0.1")},
    engines={
        "a": EnginePlan([StagePlan("here", 2), StagePlan("here", 4)]),
        "b": EnginePlan(
            [StagePlan("here", 6)],
            scheduler={"policy": "sarathi", "max_num_seqs": 8, "prefix_cache": False},
            flags={"kv-cache-memory": "64MiB", "shutdown_timeout": 3},
        ),
    },
    router=RouterPlan("here", 8100, "least-requests"),
    slo=LatencyGoals(2.0, 0.1),
)
GPUS = ServingPlan(
    model="Qwen/Qwen2.5-32B-Instruct",
    nodes={
        "x": NodePlan("10.0.0.1", ["A100-80G"] * 4),
        "y": NodePlan("10.0.0.2", ["L20"] * 2),
        "z": NodePlan("10.0.0.3"),
    },
    engines={
        "p0": EnginePlan([StagePlan("x", 64, [2, 0])], "prefill"),
        "d0": EnginePlan(
            [StagePlan("x", 30, [3, 1]), StagePlan("y", 20, [1]), StagePlan("y", 14, [0])],
            "decode",
        ),
    },
    router=RouterPlan("z", preset="distserve"),
)
CPU_PHASES = ServingPlan(
    model="demo",
    nodes={"x": NodePlan("10.0.0.1"), "y": NodePlan("10.0.0.2")},
    engines={
        "p": EnginePlan([StagePlan("x", 6)], "prefill"),
        "d": EnginePlan([StagePlan("y", 6)], "decode", scheduler={"policy": "sarathi"}),
    },
    router=RouterPlan("x", preset="tetri"),
)
SECRET = LaunchOptions("/etc/gllm/secret", 8)


def parse(spec: ProcessSpec) -> Any:
    """The values of a process's flags, as its program reads them."""
    return (router if spec.is_router else serve).make_parser().parse_args(spec.arguments)


def by_name(plan: ServingPlan, node: str, options: LaunchOptions = SECRET) -> dict[str, Any]:
    check_plan(plan)
    return {spec.name: parse(spec) for spec in commands_for(plan, node, options)}


def test_a_node_gets_the_router_first_and_all_engines() -> None:
    specs = commands_for(LOCAL, "here")
    assert [spec.title for spec in specs] == ["router", "engine a", "engine b"]
    assert [spec.url for spec in specs] == [
        f"http://127.0.0.1:{port}" for port in (8100, 29800, 29804)
    ]
    assert [spec.shutdown_seconds for spec in specs] == [30.0, 30.0, 3.0]
    assert all(spec.environment == {} for spec in specs)


def test_engines_of_one_machine_attach_without_a_secret() -> None:
    values = by_name(LOCAL, "here", LaunchOptions(num_cores=6))
    hub = "127.0.0.1:29700"
    assert config_from_flags(RouterConfig, values["router"]).hub == "29700"
    assert values["router"].policy == "least-requests"
    assert (values["router"].slo_ttft, values["router"].slo_tpot) == (2.0, 0.1)
    for name in "ab":
        attachment = config_from_flags(AttachmentConfig, values[name])
        assert (attachment.name, attachment.router) == (name, (hub,))
        assert attachment.node_secret_file is None
        assert values[name].kv_transfer is None
        # Three workers share the cores of the machine.
        assert values[name].threads == 2
    a, b = (config_from_flags(EngineConfig, values[name]) for name in "ab")
    assert (a.pipeline_parallel_size, a.layers, a.device) == (2, (2, 4), "cpu")
    assert b.kv_cache_memory == 64 * 2**20
    assert (b.scheduler.policy, b.scheduler.max_num_seqs) == ("sarathi", 8)
    assert b.scheduler.prefix_cache is False


def test_a_single_engine_serves_at_its_own_port() -> None:
    plan = msgspec.structs.replace(
        LOCAL,
        nodes={"here": NodePlan("10.0.0.9")},
        engines={"a": EnginePlan([StagePlan("here", 6)], port=8000)},
        router=None,
    )
    (spec,) = commands_for(plan, "here")
    assert spec.url == "http://10.0.0.9:8000"
    values = parse(spec)
    assert (values.host, values.port, values.router) == ("10.0.0.9", 8000, ())
    assert (values.slo_ttft, values.threads) == (2.0, None)


def test_the_nodes_of_an_engine_agree_on_their_places() -> None:
    head, member = by_name(GPUS, "x")["d0"], by_name(GPUS, "y")["d0"]
    places = [
        read_node_rank(config_from_flags(NodesConfig, values), {}, values.pipeline_parallel_size)
        for values in (head, member)
    ]
    assert [(place.rank, place.num_nodes) for place in places] == [(0, 2), (1, 2)]
    assert {(place.host, place.port) for place in places} == {("10.0.0.1", 29805)}
    for values in (head, member):
        engine = config_from_flags(EngineConfig, values)
        assert engine.stage_degrees == (2, 1, 1)
        assert engine.layers == (30, 20, 14)
        assert values.stages_per_node == (1, 2)
        assert (values.device, values.threads) == ("cuda", None)
        assert values.node_secret_file == SECRET.node_secret_file
    assert (head.data_port, member.data_port) == (29806, 29810)
    assert (head.node_name, member.node_name) == ("x", "y")
    specs = {spec.title: spec for spec in commands_for(GPUS, "y", SECRET)}
    assert list(specs) == ["engine d0 rank 1"]


def test_gpus_are_visible_in_the_order_of_the_ranks() -> None:
    visible = {
        (node, spec.name): spec.environment.get("CUDA_VISIBLE_DEVICES")
        for node in GPUS.nodes
        for spec in commands_for(GPUS, node, SECRET)
    }
    assert visible == {
        ("x", "p0"): "2,0",
        ("x", "d0"): "3,1",
        ("y", "d0"): "1,0",
        ("z", "router"): None,
    }


def test_clients_of_the_deployment_show_the_certificate_that_a_router_requires() -> None:
    flags = {"ssl-certfile": "/c.pem", "ssl_keyfile": "/k.pem", "scale": "0:2"}
    for authorities, certificate in ((None, None), ("/ca.pem", ("/c.pem", "/k.pem"))):
        own = flags | ({"ssl-ca-certs": authorities} if authorities else {})
        assert LOCAL.router is not None
        plan = msgspec.structs.replace(
            LOCAL, router=msgspec.structs.replace(LOCAL.router, flags=own)
        )
        assert router_certificate(plan) == certificate
        spec, *engines = commands_for(plan, "here", SECRET)
        assert (spec.is_router, spec.certificate) == (True, certificate)
        assert spec.url.startswith("https:")
        assert all(engine.certificate is None for engine in engines)


def test_engines_apart_reach_the_router_by_its_host() -> None:
    (spec,) = commands_for(GPUS, "z", SECRET)
    config = config_from_flags(RouterConfig, parse(spec))
    assert config.hub == "29700"
    assert (config.preset, config.node_secret_file) == ("distserve", SECRET.node_secret_file)
    for values in by_name(GPUS, "x").values():
        assert values.router == ("10.0.0.3:29700",)
        assert values.preset == "distserve"
    assert [by_name(GPUS, "x")[name].role for name in ("p0", "d0")] == ["prefill", "decode"]


def test_a_router_with_preset_flow_divides_by_the_routes_of_the_plan() -> None:
    routes = {"p": {"d": 1.0}}
    plan = msgspec.structs.replace(CPU_PHASES, router=RouterPlan("x", preset="flow"), routes=routes)
    config = config_from_flags(RouterConfig, by_name(plan, "x")["router"])
    assert config.routes == ("p:d=1",)
    flows = msgspec.structs.replace(
        plan, router=RouterPlan("x", preset="flow", flags={"routes": "p:d=2.5"})
    )
    assert by_name(flows, "x")["router"].routes == ("p:d=2.5",)
    tetri = msgspec.structs.replace(CPU_PHASES, routes=routes)
    assert by_name(tetri, "x")["router"].routes == ()


def test_engines_on_cpus_pass_kv_blocks_on_over_the_network() -> None:
    prefill, decode = by_name(CPU_PHASES, "x")["p"], by_name(CPU_PHASES, "y")["d"]
    assert (prefill.kv_transfer, decode.kv_transfer) == ("auto", "auto")
    assert prefill.kv_transfer_address == "10.0.0.1:29803"
    assert decode.kv_transfer_address == "10.0.0.2:29807"
    # A policy of the plan's own replaces that of the preset.
    assert (prefill.preset, decode.preset, decode.policy) == ("tetri", None, "sarathi")
    assert explain_missing_transfers(CPU_PHASES) == {}


def test_each_machine_of_an_engine_has_an_address_for_its_blocks() -> None:
    engine = EnginePlan([StagePlan("x", 3), StagePlan("y", 3)], "prefill")
    plan = msgspec.structs.replace(CPU_PHASES, engines={**CPU_PHASES.engines, "p": engine})
    parts = [by_name(plan, node)["p"] for node in plan.nodes]
    assert [part.kv_transfer for part in parts] == ["auto", "auto"]
    addresses = [part.kv_transfer_address for part in parts]
    assert [address.rpartition(":")[0] for address in addresses] == ["10.0.0.1", "10.0.0.2"]
    assert by_name(plan, "y")["d"].kv_transfer_address not in addresses
    check_configurations(plan)


def test_engines_that_pass_nothing_on_are_named_with_the_cause() -> None:
    for plan in (LOCAL, GPUS, CPU_PHASES):
        assert explain_missing_transfers(plan) == {}
        assert find_simulated_only(plan) == ""
    assert [by_name(GPUS, node)["d0"].kv_transfer for node in "xy"] == ["auto", "auto"]
    engine = EnginePlan([StagePlan("x", 32, [2]), StagePlan("y", 32)], "prefill")
    plan = msgspec.structs.replace(GPUS, engines={**GPUS.engines, "p0": engine})
    cause = "some stages are on GPUs, others on CPUs"
    assert explain_missing_transfers(plan) == {"p0": cause}
    assert find_simulated_only(plan).startswith(
        f"p0: no KV blocks are passed on, because {cause}: prompts are computed again"
    )
    assert by_name(plan, "x")["p0"].kv_transfer is None


@pytest.mark.parametrize("plan", [LOCAL, GPUS, CPU_PHASES])
def test_the_configurations_of_a_plan_are_those_that_gllm_accepts(plan: ServingPlan) -> None:
    check_configurations(plan)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scheduler": {"lanes": "2"}}, "refuses engine p0: lanes is 2, but tensor_parallel_size"),
        ({"flags": {"debug-slowdown": [1.0, 2.0]}}, "refuses engine p0: debug_slowdown"),
    ],
)
def test_options_that_gllm_refuses_together_are_said_before_the_start(
    changes: dict[str, Any], words: str
) -> None:
    """Each one alone is a valid flag."""
    engine = msgspec.structs.replace(GPUS.engines["p0"], **changes)
    plan = msgspec.structs.replace(GPUS, engines={**GPUS.engines, "p0": engine})
    check_plan(plan)
    with pytest.raises(PlanError, match=words):
        check_configurations(plan)


def test_a_port_of_an_engine_may_be_chosen() -> None:
    engine = msgspec.structs.replace(CPU_PHASES.engines["p"], port=7000)
    plan = msgspec.structs.replace(CPU_PHASES, engines={**CPU_PHASES.engines, "p": engine})
    values = by_name(plan, "x")["p"]
    assert (values.port, values.kv_transfer_address) == (7000, "10.0.0.1:7003")


def test_the_hub_of_the_router_may_have_another_port() -> None:
    plan = msgspec.structs.replace(
        LOCAL, router=RouterPlan("here", flags={"hub": 28000, "host": "0.0.0.0"})
    )
    specs = commands_for(plan, "here")
    assert specs[0].url == "http://127.0.0.1:8000"
    assert (parse(specs[0]).hub, parse(specs[1]).router) == ("28000", ("127.0.0.1:28000",))


def change_engine(**fields: Any) -> ServingPlan:
    engine = msgspec.structs.replace(LOCAL.engines["a"], **fields)
    return msgspec.structs.replace(LOCAL, engines={**LOCAL.engines, "a": engine})


@pytest.mark.parametrize(
    ("plan", "node", "words"),
    [
        (LOCAL, "there", "nodes: there is no node 'there'; choose one of here"),
        (
            change_engine(flags={"treads": 1}),
            "here",
            "engines.a.flags.treads: there is no flag 'treads': did you mean threads?",
        ),
        (
            change_engine(flags={"tp": 2}),
            "here",
            "engines.a.flags.tp: the plan sets it by the devices of the stages: remove it here",
        ),
        (
            change_engine(scheduler={"threads": 1}),
            "here",
            "engines.a.scheduler.threads: there is no flag",
        ),
        (
            change_engine(flags={"rebalance": "yes"}),
            "here",
            "engines.a.flags.rebalance: rebalance is 'yes', but has to be true or false",
        ),
        (
            msgspec.structs.replace(LOCAL, router=RouterPlan("here", flags={"policy": "random"})),
            "here",
            "router.flags.policy: the plan sets it by the policy of the router",
        ),
    ],
)
def test_flags_that_cannot_be_set_are_refused_by_their_path(
    plan: ServingPlan, node: str, words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        commands_for(plan, node)
    assert str(caught.value).startswith(words)


def test_machines_without_a_secret_are_refused() -> None:
    for plan in (GPUS, CPU_PHASES):
        assert crosses_machines(plan)
        with pytest.raises(PlanError, match="--node-secret-file FILE"):
            commands_for(plan, "x")
    flags = {"node-secret-file": "/own"}
    engines = {
        name: msgspec.structs.replace(engine, flags=flags)
        for name, engine in CPU_PHASES.engines.items()
    }
    router_plan = RouterPlan("x", flags=flags)
    plan = msgspec.structs.replace(CPU_PHASES, engines=engines, router=router_plan)
    assert by_name(plan, "y", LaunchOptions())["d"].node_secret_file == "/own"


def test_addresses_of_one_machine_are_no_network() -> None:
    nodes = {"x": NodePlan("127.0.0.1"), "y": NodePlan("127.0.0.2")}
    plan = msgspec.structs.replace(CPU_PHASES, nodes=nodes)
    assert not crosses_machines(plan)
    assert not crosses_machines(LOCAL)
    assert by_name(plan, "y", LaunchOptions())["d"].node_secret_file is None
