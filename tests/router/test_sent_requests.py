"""Requests on their way: counted until an output or later statistics include them."""

from gllm.router.engine_record import SETTLE_SECONDS, SentRequests


def test_requests_count_until_statistics_include_them() -> None:
    sent = SentRequests()
    sent.on_sent(1, 100, 0.0)
    sent.on_sent(2, 50, 0.9 * SETTLE_SECONDS)
    assert (len(sent.requests), sent.num_sent_tokens) == (2, 150)
    sent.on_stats(0.95 * SETTLE_SECONDS)
    assert (len(sent.requests), sent.num_sent_tokens) == (2, 150)
    sent.on_stats(1.5 * SETTLE_SECONDS)
    assert (len(sent.requests), sent.num_sent_tokens) == (1, 50)
    sent.on_stats(2 * SETTLE_SECONDS)
    assert (len(sent.requests), sent.num_sent_tokens) == (0, 0)


def test_output_ends_the_way_of_a_request() -> None:
    sent = SentRequests()
    sent.on_sent(1, 100, 0.0)
    sent.on_sent(2, 50, 0.0)
    sent.on_output(1)
    sent.on_output(1)
    sent.on_output(77)
    assert (len(sent.requests), sent.num_sent_tokens) == (1, 50)
    sent.on_sent(2, 30, 1.0)
    assert (len(sent.requests), sent.num_sent_tokens) == (1, 30)
