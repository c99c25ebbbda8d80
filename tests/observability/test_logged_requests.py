"""Requests in step logs."""

from gllm.observability.logged_scheduler import to_add_event, to_scheduler_request
from gllm.scheduler.sequence import SchedulerRequest


def test_a_request_is_read_as_it_was_logged() -> None:
    """Every field but the source of KV, which belongs to the caller, differs from its default."""
    request = SchedulerRequest(
        7, [1, 2, 3], 9, frozenset({4, 5}), 1, "salt", 1, False, [[6]], 0.5, 8, 2, True, 11, 12,
        reports_first_chunk=True,
    )  # fmt: skip
    assert to_scheduler_request(to_add_event(request, 3.0)) == request
    assert to_add_event(request, 3.0).time == 3.0
