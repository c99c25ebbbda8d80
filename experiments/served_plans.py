"""Judgement of a written plan: `gllm up --emulate` with a benchmark, and its simulation.

Planners judge engines of their own. The simulation rebuilds them from nothing but the plan: the
command lines of its processes, devices, links, router and routes. A plan that promises more than it
states is found.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo
from gllm.plan.attainment import Attainment, AttainmentTest, goals_of, judge_line
from gllm.plan.emulated_plan import emulate_plan
from gllm.plan.engine_checks import count_kv_tokens
from gllm.plan.processes import check_configurations, find_flag
from gllm.plan.serving_plan import ServingPlan, write_plan
from gllm.routing.disaggregation.flow import Routes, parse_routes
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.routing.policy_registry import make_policy
from gllm.sim.cluster.cluster import simulate_cluster
from gllm.sim.cluster.handoffs import KvNetwork, TransferPath
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.deployment import Deployment
from gllm.sim.event_loop import EventLoop
from gllm.sim.hardware.devices import GBIT_BYTES, LINKS, NetworkLink
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import build_hardware
from gllm.sim.joint_link import ActivationsFirstPolicy, JointLink, LinkShare
from gllm.sim.link import SimulatedLink
from gllm.sim.workloads.requests import WorkloadRequest, cut_requests, make_workload

MIXED = "mixed"
FLOW = "flow"
"""Preset whose router follows routes: those of its flags, which may be flows, or of the plan."""


class PlanNetwork(KvNetwork):
    """Network of a plan's machines: each has one way out and one way in, which all engines share.

    Args:
        plan: Machines, links and engines.
    """

    def __init__(self, plan: ServingPlan) -> None:
        shape = MODELS[plan.model]
        super().__init__(NetworkLink(1.0, 0.0), shape.layers * shape.kv_bytes)
        self._plan = plan
        self._ways: dict[tuple[str, bool, float], SimulatedLink] = {}
        """By machine, direction (True: out) and bandwidth."""

    def path(self, source: str, target: str, loop: EventLoop) -> TransferPath:
        """Return the path between the machines of two engines: each layer goes to its stage."""
        shape, latency = MODELS[self._plan.model], 0.0
        parts: dict[tuple[str, bool, float], float] = {}
        for a, b in zip(self._nodes_of_layers(source), self._nodes_of_layers(target), strict=True):
            link = find_plan_link(self._plan, a, b)
            latency = max(latency, link.latency)
            # Links within a machine are others than those between machines.
            for way in ((a, True, link.bandwidth), (b, False, link.bandwidth)):
                parts[way] = parts.get(way, 0.0) + 1 / shape.layers
        for way in parts:
            if way not in self._ways:
                self._ways[way] = SimulatedLink(loop, ActivationsFirstPolicy())
        shares = [LinkShare(self._ways[way], share, way[2]) for way, share in parts.items()]
        return TransferPath(JointLink(loop, shares), NetworkLink(1.0, latency))

    def _nodes_of_layers(self, engine: str) -> list[str]:
        """Return the machine of each layer of an engine."""
        stages = self._plan.engines[engine].stages
        return [stage.node for stage in stages for _ in range(stage.layers)]


def find_plan_link(plan: ServingPlan, a: str, b: str) -> NetworkLink:
    """Return the link between two machines of a plan, or within one."""
    link = plan.nodes[a].link if a == b else plan.links.get(f"{a}-{b}", plan.links.get(f"{b}-{a}"))
    if link is None:
        return LINKS["nvlink" if a == b else "network"]
    return NetworkLink(link.gbit * GBIT_BYTES, link.ms * 1e-3)


def build_engines(plan: ServingPlan) -> dict[str, Deployment]:
    """Return the simulated engines of a plan by name, with the options of their command lines.

    Raises:
        PlanError: `gllm serve` would refuse an engine.
        ValueError: An engine has no memory for its longest sequence.
    """
    emulated = emulate_plan(plan)
    deployments = {}
    for name, config in check_configurations(plan).items():
        flags, stages = emulated.engines[name].flags, plan.engines[name].stages
        _, _, devices = str(flags["device"]).partition(":")
        hardware = build_hardware(
            plan.model,
            devices,
            len(stages),
            flags["emulated_link"],
            [stage.num_ranks for stage in stages],
            flags["emulated_rank_link"],
            [stage.layers for stage in stages],
        )
        size, shape = config.scheduler.block_size, MODELS[plan.model]
        length = config.max_model_len or shape.max_context
        blocks = count_kv_tokens(config, hardware) // size
        if blocks * size < length:
            raise ValueError(
                f"engines.{name}: memory for {blocks * size} tokens, and sequences of {length}"
            )
        deployments[name] = Deployment(
            plan.model,
            hardware.layer_counts,
            RooflineCostModel(hardware),
            config.scheduler.resolve(len(stages), blocks, length),
            degrees=hardware.degrees,
            hardware=hardware,
        )
    return deployments


def serve_requests(
    plan: ServingPlan,
    jobs: list[WorkloadRequest],
    slo: Slo,
    seed: int,
    check: Callable[[], None] | None = None,
) -> list[RequestTimeline]:
    """Simulate a plan's engines behind its router and return the times of the requests."""
    engines, router = build_engines(plan), plan.router
    assert router is not None, "a service has a router"
    roles = {name: engine.role for name, engine in plan.engines.items()}
    rng = Random(seed)
    if set(roles.values()) == {MIXED}:
        served = PolicyRouter(make_policy(router.policy, rng), slo)
        run = simulate_cluster(engines, jobs, served, check=check)
    else:
        assert router.preset is not None, "a router of phases has a preset"
        flows = find_flag(router.flags, "routes")
        routes: Routes | None = None
        if router.preset == FLOW:
            routes = parse_routes(flows.split(",")) if flows else plan.routes
        policy = make_pair_policy(router.preset, rng, routes)
        run = simulate_pairs(engines, roles, jobs, policy, PlanNetwork(plan), check=check).cluster
    unserved = RequestTimeline(0.0)
    return [run.requests[i].line if i in run.requests else unserved for i in range(len(jobs))]


class MeasuredPlan(NamedTuple):
    """Independent measurement of a plan at its own rate."""

    attainment: Attainment
    """Share of the requests within the limits, with its interval and the growth of the queue."""
    requests_per_second: float
    """Requests that finished, over the time from the first arrival to the last token."""


class PlanLoad(NamedTuple):
    """Requests with which a plan is judged, at the rate that it states."""

    workload: str
    """Name of the workload."""
    slo: Slo
    """Limits of each request, and the share that has to be within them."""
    seed: int
    """Seed of lengths, arrivals and routing; not the planner's."""
    max_request_tokens: int | None = None
    """Tokens to which longer requests are cut; None: none is cut."""


def simulate_plan(
    plan: ServingPlan, load: PlanLoad, num_requests: int, check: Callable[[], None] | None = None
) -> list[RequestTimeline]:
    """Simulate a written plan at the rate that it promises; return the times of the requests.

    Args:
        plan: The plan.
        load: Requests.
        num_requests: Requests of the run.
        check: Called now and then; an error that it raises ends the simulation.
    """
    assert plan.expected is not None, "planners state a rate"
    uncut = make_workload(load.workload, num_requests, plan.expected.rate, seed=load.seed)
    jobs = cut_requests(uncut, load.max_request_tokens)
    return serve_requests(plan, jobs, load.slo, load.seed, check)


def measure_plan(
    plan: ServingPlan, load: PlanLoad, num_requests: int, check: Callable[[], None] | None = None
) -> MeasuredPlan:
    """Simulate a written plan as `simulate_plan`, and judge it once."""
    lines = simulate_plan(plan, load, num_requests, check)
    test = AttainmentTest(goals_of(load.slo), num_requests, num_requests)
    ends = [line.times[-1] for line in lines if line.times]
    span = max(ends, default=inf) - lines[0].arrival
    attainment = test.judge([judge_line(line, load.slo) for line in lines])
    return MeasuredPlan(attainment, len(ends) / span)


class ServedPlan(NamedTuple):
    """Measurement of a plan that was served on emulated devices, at its rate."""

    share: float
    """Share of the requests within the limits; those that failed are not."""
    num_requests: int
    ttft_seconds: tuple[float, float]
    """Median and 90th percentile."""
    tpot_seconds: tuple[float, float]


READY_SECONDS = 120
"""Time in which an emulated service has to start."""


def serve_plan(plan: ServingPlan, load: PlanLoad, seconds: float) -> ServedPlan:
    """Serve a plan on emulated devices of this machine by `gllm up`, with `gllm bench serve`.

    Args:
        plan: The plan.
        load: Requests.
        seconds: Time in which the requests arrive.

    Raises:
        OSError: The service did not start, or the benchmark failed.
    """
    assert plan.router is not None
    assert plan.expected is not None
    ttft, tpot = load.slo.require("ttft", "tpot")
    count = max(20, round(plan.expected.rate * seconds))
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        folder = Path(name)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        router = msgspec.structs.replace(plan.router, port=port)
        write_plan(msgspec.structs.replace(plan, router=router), folder / "plan.yaml")
        up = [sys.executable, "-m", "gllm", "up", str(folder / "plan.yaml"), "--emulate"]
        output = folder / "up.log"
        with output.open("w") as log:
            process = subprocess.Popen(up, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while "ready" not in output.read_text():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise OSError(f"gllm up --emulate: {last_line(output.read_text())}")
                time.sleep(0.5)
            bench = [
                sys.executable, "-m", "gllm", "bench", "serve", "--no-progress",
                "--base-url", f"http://127.0.0.1:{port}", "--workload", load.workload,
                "--num-prompts", str(count), "--request-rate", f"{plan.expected.rate:g}",
                "--seed", str(load.seed), "--goodput", f"ttft={ttft:g}", f"tpot={tpot:g}",
                "--metric-percentiles", "50,90", "--save-result", str(folder / "bench.json"),
            ]  # fmt: skip
            if load.max_request_tokens is not None:
                bench += ["--max-length", str(load.max_request_tokens)]
            run = subprocess.run(bench, capture_output=True, text=True, check=False)
            if run.returncode:
                raise OSError(f"gllm bench serve: {last_line(run.stderr)}")
            figures = json.loads((folder / "bench.json").read_text())
        finally:
            process.terminate()
            process.wait()
    seconds_of = {
        metric: (figures[f"p50_{metric}_ms"] / 1e3, figures[f"p90_{metric}_ms"] / 1e3)
        for metric in ("ttft", "tpot")
    }
    share = figures["request_goodput"] * figures["duration"] / count
    return ServedPlan(share, count, seconds_of["ttft"], seconds_of["tpot"])


def last_line(text: str) -> str:
    """Return the last line of a command's output, without the name of a planner."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^gllm plan \w+: ", "", lines[-1]) if lines else "no output"
