"""GET /load and GET /v1/loads: the engine's load, for load balancers and routers."""

import time
from datetime import UTC, datetime

from aiohttp import web

from gllm.frontend.context import CONTEXT
from gllm.frontend.json_encoding import json_response
from gllm.frontend.load_window import LoadReading
from gllm.frontend.server_response_schemas import (
    LoadResponse,
    LoadsResponse,
    RankLoad,
    disaggregation_mode,
)


async def get_load(request: web.Request) -> web.Response:
    """Return the load of the engine, for load balancers."""
    status = request.app[CONTEXT].engine.status()
    stats = status.stats
    return json_response(
        LoadResponse(
            server_load=status.num_requests,
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
        )
    )


async def get_loads(request: web.Request) -> web.Response:
    """Return the load of the engine in the format of SGLang, as one data-parallel rank."""
    context = request.app[CONTEXT]
    status = context.engine.status()
    stats = status.stats
    counters = (stats.decode_tokens, stats.prefix_queries, stats.prefix_hits)
    rates = context.load_window.add(LoadReading(time.monotonic(), *counters))
    max_tokens = status.num_kv_blocks * status.block_size
    mode, transfers = disaggregation_mode(context.engine.role), status.kv_transfers
    latency = 0.0
    if transfers is not None and transfers.num_fetched:
        latency = 1000 * transfers.seconds / transfers.num_fetched
    load = RankLoad(
        dp_rank=0,
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        num_total_reqs=stats.unfinished,
        num_waiting_uncached_tokens=stats.waiting_tokens,
        num_used_tokens=round(stats.kv_usage * max_tokens),
        max_total_num_tokens=max_tokens,
        token_usage=stats.kv_usage,
        gen_throughput=rates.tokens_per_second,
        cache_hit_rate=rates.cache_hit_rate,
        kv_transfer_latency_ms=latency,
        prefill_queue_reqs=stats.waiting if mode == "prefill" else 0,
        decode_queue_reqs=stats.fetching if mode == "decode" else 0,
        disagg_mode=mode,
    )
    timestamp = datetime.now(UTC).isoformat()
    return json_response(LoadsResponse(timestamp=timestamp, dp_rank_count=1, loads=[load]))
