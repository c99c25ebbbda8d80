"""Rates of a service, and the readings that they are made of."""

import pytest

from gllm.deploy.cluster.service import WINDOW_SECONDS, ServiceMeter, ServiceRates
from gllm.deploy.cluster.service_processes import parse_links, parse_reading
from gllm.messages.services import PeerLink, ServiceReading


def reading(tokens: int, busy: float = 0.0, finished: int = 0) -> ServiceReading:
    return ServiceReading(
        "ready",
        num_finished=finished,
        num_failed=finished,
        num_prompt_tokens=2 * tokens,
        num_generated_tokens=tokens,
        stage_busy_seconds=[busy, busy / 2],
    )


def test_rates_are_those_of_the_window() -> None:
    meter = ServiceMeter()
    assert meter.rates == ServiceRates()
    meter.add(reading(1000), 0.0)
    assert meter.rates == ServiceRates()
    for second in range(1, 31):
        # Nothing in the first twenty seconds.
        busy = max(0, second - 20)
        meter.add(reading(1000 + 50 * busy, 0.5 * busy, busy), float(second))
    rates = meter.rates
    assert WINDOW_SECONDS == 10.0
    assert rates.generated_tokens_per_second == pytest.approx(50.0)
    assert rates.prompt_tokens_per_second == pytest.approx(100.0)
    assert rates.requests_per_second == pytest.approx(2.0)
    assert list(rates.stages) == pytest.approx([0.5, 0.25])


def test_an_engine_that_starts_anew_has_no_negative_rates() -> None:
    meter = ServiceMeter()
    meter.add(reading(1000, 9.0), 0.0)
    meter.add(reading(10, 1.0), 1.0)
    assert meter.rates == ServiceRates()
    meter.add(reading(30, 9.0), 2.0)
    assert meter.rates.generated_tokens_per_second == pytest.approx(20.0)
    assert meter.rates.stages[0] == 1.0
    meter.add(ServiceReading("unreachable"), 3.0)
    assert meter.rates == ServiceRates()


METRICS = """# TYPE gllm:request_success counter
gllm:request_success_total{model_name="demo",finished_reason="stop"} 3.0
gllm:request_success_total{model_name="demo",finished_reason="length"} 4.0
gllm:request_success_total{model_name="demo",finished_reason="error"} 1.0
gllm:request_success_total{model_name="demo",finished_reason="abort"} 1.0
# TYPE gllm:num_requests_running gauge
gllm:num_requests_running{model_name="demo"} 5.0
# TYPE gllm:generation_tokens counter
gllm:generation_tokens_total{model_name="demo"} 60.0
# TYPE gllm:kv_cache_usage_perc gauge
gllm:kv_cache_usage_perc{model_name="demo"} 0.25
# TYPE gllm:stage_busy_seconds counter
gllm:stage_busy_seconds_total{model_name="demo",stage="1"} 2.0
gllm:stage_busy_seconds_total{model_name="demo",stage="0"} 1.0
"""


def test_metrics_of_an_engine_become_a_reading() -> None:
    parsed = parse_reading("ready", "", METRICS, [])
    assert (parsed.num_finished, parsed.num_failed, parsed.num_running) == (7, 2, 5)
    assert (parsed.num_generated_tokens, parsed.kv_cache_usage) == (60, 0.25)
    assert parsed.stage_busy_seconds == [1.0, 2.0]


def test_only_measured_links_are_reported() -> None:
    links = [
        {"peer": "b", "bytes_per_second": 1e6, "round_trip_seconds": None},
        {"peer": "c"},
    ]
    rows = {"nodes": [{"name": "a", "links": links}, {"name": "b", "links": []}]}
    assert parse_links(rows) == [PeerLink("a", "b", 1e6, None)]
