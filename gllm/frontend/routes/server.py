"""Endpoints for probes, scrapers and load balancers: health, metrics, load, configuration."""

import dataclasses
import time
from datetime import UTC, datetime
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineUnavailableError
from gllm.frontend import server_response_schemas as schemas
from gllm.frontend.context import CONTEXT
from gllm.frontend.endpoint import ENDPOINTS_BY_ROUTE
from gllm.frontend.json_encoding import json_response
from gllm.frontend.load_window import LoadReading
from gllm.frontend.openapi import build_openapi_document
from gllm.options.version import __version__


async def get_server_info(request: web.Request) -> web.Response:
    """Return the configuration of the server, its engine and its model, without secrets."""
    context = request.app[CONTEXT]
    engine = context.engine
    model, status = engine.model, engine.status()
    return json_response(
        schemas.ServerInfoResponse(
            version=__version__,
            model_path=model.root or model.name,
            served_model_name=model.name,
            tp_size=status.tensor_parallel_size,
            dp_size=1,
            max_model_len=model.max_model_len,
            max_total_num_tokens=status.num_kv_blocks * status.block_size,
            page_size=status.block_size,
            disaggregation_mode=schemas.disaggregation_mode(engine.role),
            model=model,
            engine=engine.describe(),
            server=_public_options(context.config),
        )
    )


def _public_options(config: ServerConfig) -> dict[str, Any]:
    """Return the options of a configuration that are not secret."""
    return {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if not field.metadata.get("secret")
    }


async def get_metrics(request: web.Request) -> web.Response:
    """Return all metrics of the server in Prometheus's text format."""
    text = request.app[CONTEXT].metrics.render()
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def get_health(request: web.Request) -> web.Response:
    """Return 200 while the server runs, recovers or sleeps; 503 while loading, dead or stuck."""
    context = request.app[CONTEXT]
    status = context.engine.status()
    if status.state not in ("draining", "recovering", "sleeping"):
        context.check_ready()
    # A recovery takes its time without a step, and ends by itself.
    if not status.is_healthy and status.state != "recovering":
        raise EngineUnavailableError("stuck", "requests are pending, but no step makes progress")
    return json_response(schemas.HealthResponse(status="ok", state=status.state))


async def get_readiness(request: web.Request) -> web.Response:
    """Return 200 while the server can run requests, else 503.

    An engine with --router can while a router has attached it.
    """
    context = request.app[CONTEXT]
    context.check_ready()
    if cause := context.engine.status().unattached_cause:
        raise EngineUnavailableError("no_router", cause)
    return json_response(schemas.StatusResponse(status="ready"))


async def get_version(request: web.Request) -> web.Response:
    """Return the version of gllm."""
    return json_response(schemas.VersionResponse(version=__version__))


async def get_openapi_document(request: web.Request) -> web.Response:
    """Return the OpenAPI document of this API."""
    # A GET endpoint has two routes.
    endpoints = list(dict.fromkeys(request.app[ENDPOINTS_BY_ROUTE].values()))
    return web.json_response(build_openapi_document(endpoints))


async def get_load(request: web.Request) -> web.Response:
    """Return numbers of running and waiting requests and KV cache use, for load balancers."""
    status = request.app[CONTEXT].engine.status()
    stats = status.stats
    return json_response(
        schemas.LoadResponse(
            server_load=status.num_requests,
            running=stats.running,
            waiting=stats.waiting,
            kv_usage=stats.kv_usage,
        )
    )


async def get_loads(request: web.Request) -> web.Response:
    """Return the load of the engine in SGLang's format, as one data-parallel rank."""
    context = request.app[CONTEXT]
    status = context.engine.status()
    stats = status.stats
    counters = (stats.num_decoded_tokens, stats.prefix_queries, stats.prefix_hits)
    rates = context.load_window.add(LoadReading(time.monotonic(), *counters))
    max_tokens = status.num_kv_blocks * status.block_size
    mode, transfers = schemas.disaggregation_mode(context.engine.role), status.kv_transfers
    latency = 0.0
    if transfers is not None and transfers.num_fetched:
        latency = 1000 * transfers.seconds / transfers.num_fetched
    load = schemas.RankLoad(
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
    return json_response(schemas.LoadsResponse(timestamp=timestamp, dp_rank_count=1, loads=[load]))
