"""Requests of a workload as a list."""

from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.workloads.requests import WorkloadRequest, iterate_scheduler_requests


def to_scheduler_requests(jobs: list[WorkloadRequest]) -> list[tuple[float, SchedulerRequest]]:
    """Return the requests of jobs with their arrival times in seconds."""
    return list(iterate_scheduler_requests(jobs))
