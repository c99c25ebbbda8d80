"""Services of a cluster: deploy, list, status, key, delete.

The calls of the MoLink platform: DeployLLMService, CheckServiceStatus, GetAPIKey, DeleteLLMService.
"""

import time

from aiohttp import web

from gllm.deploy.cluster.master import ServiceExistsError, UnknownServiceError
from gllm.deploy.cluster.selection import SelectionError
from gllm.deploy.cluster.service import RUNNING_STATES, Service
from gllm.frontend.cluster_context import CLUSTER
from gllm.frontend.cluster_response_schemas import (
    ServiceDeletionResponse,
    ServiceKeyResponse,
    ServiceListResponse,
    ServiceRequestCounts,
    ServiceResponse,
    ServiceThroughput,
    ServiceTokenCounts,
    ServiceUtilization,
)
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.fields.services import DeployServiceFields
from gllm.frontend.json_encoding import json_response


async def deploy_service(request: web.Request) -> web.Response:
    """Start a service on free nodes (DeployLLMService)."""
    fields = await read_fields(request, DeployServiceFields)
    try:
        service = request.app[CLUSTER].deploy(fields.to_request())
    except ServiceExistsError as error:
        raise ApiError(409, str(error), param="service_name", code="service_exists") from error
    except SelectionError as error:
        raise ApiError(
            409, str(error), param="resource_specification", code="insufficient_nodes"
        ) from error
    return json_response(_service(service))


async def list_services(request: web.Request) -> web.Response:
    """Return the services of the cluster."""
    services = [_service(service) for service in request.app[CLUSTER].services()]
    return json_response(ServiceListResponse(services=services))


async def get_service(request: web.Request) -> web.Response:
    """Return state, uptime, request counts, throughput and utilization (CheckServiceStatus)."""
    try:
        return json_response(_service(request.app[CLUSTER].service(_name(request))))
    except UnknownServiceError as error:
        raise _not_found(error) from error


async def get_service_key(request: web.Request) -> web.Response:
    """Return the API key of a service (GetAPIKey)."""
    name = _name(request)
    try:
        key = request.app[CLUSTER].service(name).api_key
    except UnknownServiceError as error:
        raise _not_found(error) from error
    return json_response(
        ServiceKeyResponse(service_name=name, api_key=key), headers={"Cache-Control": "no-store"}
    )


async def delete_service(request: web.Request) -> web.Response:
    """End a service; without one of that name nothing happens (DeleteLLMService)."""
    name = _name(request)
    has_service = request.app[CLUSTER].delete(name)
    return json_response(
        ServiceDeletionResponse(service_name=name, state="stopping" if has_service else "absent")
    )


def _name(request: web.Request) -> str:
    return request.match_info["name"]


def _not_found(error: UnknownServiceError) -> ApiError:
    return ApiError(404, str(error), param="name", code="service_not_found")


def _service(service: Service) -> ServiceResponse:
    reading, rates = service.reading, service.meter.rates
    is_running = service.state in RUNNING_STATES
    return ServiceResponse(
        service_name=service.request.name,
        model_name=service.request.model,
        state=service.state,
        cause=service.cause,
        url=service.url or None,
        head=service.nodes[0],
        nodes=list(service.nodes),
        created=service.created,
        uptime_seconds=round(service.uptime_seconds(time.monotonic()), 3),
        engine_state=reading.state if is_running else "ended",
        requests=ServiceRequestCounts(
            running=reading.num_running,
            waiting=reading.num_waiting,
            finished=reading.num_finished,
            failed=reading.num_failed,
        ),
        tokens=ServiceTokenCounts(
            prompt=reading.num_prompt_tokens, generated=reading.num_generated_tokens
        ),
        throughput=ServiceThroughput(
            requests_per_second=rates.requests_per_second,
            prompt_tokens_per_second=rates.prompt_tokens_per_second,
            generated_tokens_per_second=rates.generated_tokens_per_second,
        ),
        utilization=ServiceUtilization(kv_cache=reading.kv_cache_usage, stages=list(rates.stages)),
    )
