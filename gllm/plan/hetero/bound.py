"""Upper bound of the flow of any plan: prefill and decode work that devices share as fractions.

The relaxation forgets that engines consist of whole devices, that their stages wait for each other,
and that ranks exchange sums. Per machine class it has the requests whose prefill, and those whose
decode, its devices compute each second:

- the work of both takes no more than the time of the devices;
- prefill and decode of a machine differ by no more than its link carries KV caches;
- as many requests are decoded as are prefilled.

A request's work on a device is the time of its layers on that device alone, without limit of memory
and in the largest batch for which the devices of decode have memory. The share of the cluster's
memory that these devices have is not known: the bound is the largest one over NUM_SHARES intervals
of it.
"""

from collections.abc import Callable
from dataclasses import replace

from gllm.plan.hetero.costs import MAX_BATCH, ReplicaCosts
from gllm.plan.hetero.evaluation import classify_machines
from gllm.plan.hetero.links import make_traffic
from gllm.plan.hetero.replicas import MAX_DEGREE, PipelineCapacityRule, ReplicaPlanner
from gllm.plan.hetero.workload import MeanLengths
from gllm.plan.layout import PlannedStage
from gllm.plan.nodes import DeviceCluster, DeviceNode
from gllm.sim.hardware.devices import DeviceSpec, NetworkLink
from gllm.sim.hardware.shapes import ModelShape

CostsFactory = Callable[[DeviceCluster, ModelShape, MeanLengths], ReplicaCosts]
NUM_SHARES = 20
"""Intervals of the share of memory that decode has."""
UNLIMITED_BYTES = 1e18
"""Memory of the devices of the relaxation."""
FREE_LINK = NetworkLink(1e18, 0.0)


class UnlimitedNode(DeviceNode):
    """A machine whose devices hold any model."""

    @property
    def spec(self) -> DeviceSpec:
        """Data sheet of one of the devices, with unlimited memory."""
        return replace(super().spec, memory=UNLIMITED_BYTES)


def bound_rate(planner: ReplicaPlanner, make_costs: CostsFactory) -> float:
    """Return requests per second that no plan of a cluster exceeds, by the planner's cost model.

    Args:
        planner: Cluster, model and cost model.
        make_costs: Makes the cost model for another cluster.
    """
    import numpy
    from scipy.optimize import linprog

    cluster = planner.cluster
    numbers = classify_machines(cluster)
    firsts = [numbers.index(number) for number in range(max(numbers) + 1)]
    nodes = [cluster.nodes[node] for node in firsts]
    alone = [_DeviceAlone(planner, node, make_costs) for node in nodes]
    sizes = numpy.array([numbers.count(index) for index in range(len(firsts))])
    memory = numpy.array([node.spec.memory for node in nodes])
    devices = numpy.array([node.num_devices for node in nodes])
    total = float(memory @ (devices * sizes))
    traffic = make_traffic(planner)
    remote = [traffic.network_bandwidth(node) / traffic.kv_bytes for node in firsts]
    prefill = numpy.array([device.prefill_seconds for device in alone])
    # Variables: prefills per machine of each class, decodes per machine of each class, the rate.
    one, zero = numpy.eye(len(firsts)), numpy.zeros((len(firsts), 1))
    best = 0.0
    for index in range(NUM_SHARES):
        low, high = index / NUM_SHARES, (index + 1) / NUM_SHARES
        batch = _largest_batch(planner, high * total)
        if not batch:
            continue
        decode = numpy.array([device.decode_seconds(batch) for device in alone])
        matrix = numpy.vstack(
            [
                numpy.hstack([numpy.diag(prefill), numpy.diag(decode), zero]),
                numpy.hstack([one, -one, zero]),
                numpy.hstack([-one, one, zero]),
                numpy.hstack([-sizes, 0 * sizes, [1.0]]),
                numpy.hstack([0 * sizes, -sizes, [1.0]]),
                numpy.hstack([sizes * memory * prefill / total, 0 * sizes, [0.0]]),
                numpy.hstack([0 * sizes, sizes * memory * decode / total, [0.0]]),
            ]
        )
        limits = [*devices, *remote, *remote, 0.0, 0.0, 1 - low, high]
        goal = [*[0.0] * (2 * len(firsts)), -1.0]
        solution = linprog(goal, A_ub=matrix, b_ub=limits, method="highs-ds")
        if solution.x is None:
            raise RuntimeError(f"HiGHS did not solve the bound of the rate: {solution.message}")
        best = max(best, float(solution.x[-1]))
    return best


class _DeviceAlone:
    """Least seconds of a device for a request's prefill, and for its decode.

    The layers but the last are counted, because that one's stage has the LM head.
    """

    def __init__(self, planner: ReplicaPlanner, node: DeviceNode, make_costs: CostsFactory) -> None:
        shape = planner.shape
        alone = UnlimitedNode(*node._replace(num_devices=2, inner_link=FREE_LINK))
        self._costs = make_costs(DeviceCluster((alone,)), shape, planner.costs.lengths)
        self._stages = PlannedStage((0,), shape.layers - 1), PlannedStage((0,), 1)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of a prompt."""
        return self._costs.prefill(self._stages).stages[0] / self._costs.prompts_per_batch

    def decode_seconds(self, batch: int) -> float:
        """Return the seconds of all output tokens of a request in a batch."""
        return self._costs.decode(self._stages, batch).stages[0] / batch


def _largest_batch(planner: ReplicaPlanner, memory: float) -> int:
    """Return the requests that a stage decodes together at most.

    They fit one decode replica on devices with this much memory. Unless stages are credited with
    more than memory holds, a replica has as many micro-batches in flight as stages, and the mean
    memory of its stages, which are within machines, limits one of them.

    Args:
        planner: Model, workload and rule of the capacities.
        memory: Bytes of all devices of the replica.
    """
    shape, share = planner.shape, planner.costs.memory_share
    request = planner.costs.lengths.total * shape.layers * shape.kv_bytes
    free = memory * share - shape.parameters * shape.bytes_per_weight
    if planner.rule is not PipelineCapacityRule.CREDITED:
        stages = (
            min(MAX_DEGREE, node.num_devices) * node.spec.memory for node in planner.cluster.nodes
        )
        free = min(free, share * max(stages))
    return max(0, min(MAX_BATCH, int(free / request)))
