"""Least number of workers for a set of new requests: the exact solution of the placement problem.

    minimise sum(y_i),  each request on one worker,  x_ji <= y_i

with constraints b, c and e of gllm.routing.placement for new requests on empty workers, where (d)
holds because nothing is ongoing. The limit of (b) depends on the batch linearly, so all are linear
but (e), which is made so by a row for each moment: before a request ends, all that end later or
then have grown by its output.

Source: "Aladdin" (arXiv 2405.06856); solved by HiGHS (`scipy.optimize.milp`).
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from gllm.plan.scale.latency_fit import Array, import_optimize
from gllm.routing.placement import LatencyModel, PlacedRequest, PlacementRules


def least_workers(
    requests: Sequence[PlacedRequest],
    model: LatencyModel,
    rules: PlacementRules,
    num_kv_tokens: float,
    max_workers: int | None = None,
) -> int:
    """Return the least number of equal workers on which new requests can be placed together.

    Args:
        requests: New requests.
        model: Latency model of the workers.
        rules: Limits of the constraints.
        num_kv_tokens: M.
        max_workers: Most workers; default: one per request.

    Raises:
        ValueError: A request fits no worker.
        ModuleNotFoundError: scipy is missing.
    """
    if not requests:
        return 0
    num_workers = max_workers or len(requests)
    weights, limits = _constraint_rows(requests, model, rules, num_kv_tokens)
    if np.any(weights.max(axis=1) > limits + 1e-9):
        raise ValueError("a request fits no worker by itself: loosen the SLO or raise the memory")
    result = _solve(weights, limits, num_workers)
    if not result.success:
        raise ValueError(f"{len(requests)} requests do not fit {num_workers} workers")
    return round(result.fun)


def _constraint_rows(
    requests: Sequence[PlacedRequest],
    model: LatencyModel,
    rules: PlacementRules,
    num_kv_tokens: float,
) -> tuple[Array, Array]:
    """Return rows [constraints, requests] whose sums over a worker's requests are limited.

    Returns:
        Rows, and their limits [constraints].
    """
    ttft, tpot = rules.slo[:2]
    rows, limits = [], []
    prompts = np.array([each.num_prompt_tokens for each in requests], np.float64)
    outputs = np.array([each.num_expected_tokens for each in requests], np.float64)
    if tpot is not None:
        # k2 sum(l_in + gamma l_pred) + theta c2 b <= theta (T_dec - c3)
        rows.append(model.k2 * (prompts + rules.gamma * outputs) + rules.theta * model.c2)
        limits.append(rules.theta * (tpot - model.c3))
    if ttft is not None:
        rows.append(model.k1 * prompts)
        limits.append(ttft - model.c1)
    if num_kv_tokens < inf:
        for moment in np.unique(outputs):
            rows.append(np.where(outputs >= moment, prompts + moment, 0.0))
            limits.append(num_kv_tokens)
    return np.array(rows).reshape(-1, len(requests)), np.array(limits)


def _solve(weights: Array, limits: Array, num_workers: int) -> Any:
    """Return the result of HiGHS; variables are x [requests, workers], then y [workers]."""
    optimize = import_optimize()
    num_requests = weights.shape[1]
    num_x = num_requests * num_workers
    rows, low, high = [], [], []
    for request in range(num_requests):
        row = np.zeros(num_x + num_workers)
        row[request * num_workers : (request + 1) * num_workers] = 1
        rows.append(row)
        low.append(1.0)
        high.append(1.0)
    for worker in range(num_workers):
        for weight, limit in zip(weights, limits, strict=True):
            row = np.zeros(num_x + num_workers)
            row[worker:num_x:num_workers] = weight
            row[num_x + worker] = -limit
            rows.append(row)
            low.append(-inf)
            high.append(1e-9)
        if worker:
            # Workers are used in order, so that equal solutions are tried once.
            row = np.zeros(num_x + num_workers)
            row[num_x + worker], row[num_x + worker - 1] = 1, -1
            rows.append(row)
            low.append(-inf)
            high.append(0.0)
    cost = np.concatenate([np.zeros(num_x), np.ones(num_workers)])
    return optimize.milp(
        cost,
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
        integrality=np.ones_like(cost),
        bounds=optimize.Bounds(0, 1),
    )
