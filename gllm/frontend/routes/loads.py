"""GET /load and GET /v1/loads: the engine's load, for load balancers and routers."""

import time
from datetime import UTC, datetime

from aiohttp import web

from gllm.frontend.context import CONTEXT
from gllm.frontend.load_window import LoadReading


async def get_load(request: web.Request) -> web.Response:
    """Return the load of the engine, for load balancers."""
    status = request.app[CONTEXT].engine.status()
    stats = status.stats
    load = {
        "server_load": status.num_requests,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
    }
    return web.json_response(load)


async def get_loads(request: web.Request) -> web.Response:
    """Return the load of the engine in the format of SGLang, as one data-parallel rank."""
    context = request.app[CONTEXT]
    status = context.engine.status()
    stats = status.stats
    counters = (stats.decode_tokens, stats.prefix_queries, stats.prefix_hits)
    rates = context.load_window.add(LoadReading(time.monotonic(), *counters))
    max_tokens = status.num_kv_blocks * status.block_size
    load = {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.unfinished,
        "num_waiting_uncached_tokens": stats.waiting_tokens,
        "num_used_tokens": round(stats.kv_usage * max_tokens),
        "max_total_num_tokens": max_tokens,
        "token_usage": stats.kv_usage,
        "gen_throughput": rates.tokens_per_second,
        "cache_hit_rate": rates.cache_hit_rate,
        "kv_transfer_latency_ms": 0.0,
        "prefill_queue_reqs": 0,
        "decode_queue_reqs": 0,
        "disagg_mode": "null",
    }
    timestamp = datetime.now(UTC).isoformat()
    return web.json_response({"timestamp": timestamp, "dp_rank_count": 1, "loads": [load]})
