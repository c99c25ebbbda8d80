"""Latency limits of planners and prices: texts, and the runs that keep the limits."""

import pytest

from gllm.observability.latency import RequestTimeline, meets_slo, slo_attainment
from gllm.options.slo import NO_SLO, PercentileLimit, Slo, parse_slo
from gllm.plan.prices import PRICE_TABLES, parse_prices
from gllm.sim.hardware.devices import DEVICES


def timeline(ttft: float, gap: float, tokens: int = 3) -> RequestTimeline:
    line = RequestTimeline(10.0)
    for index in range(tokens):
        line.record_output(10.0 + ttft + index * gap)
    return line


def test_texts_of_limits() -> None:
    limits = parse_slo("ttft:p90=2, tbt:p99=0.2,tpot=0.1", 0.95)
    assert limits.percentiles == (
        PercentileLimit("ttft", 90, 2),
        PercentileLimit("itl", 99, 0.2),
    )
    assert (limits.ttft_seconds, limits.tpot_seconds, limits.attainment) == (None, 0.1, 0.95)
    assert limits.limit_of("itl") == (0.2, 99)
    assert limits.limit_of("tpot") == (0.1, 95)
    assert limits.limit_of("e2el") is None
    # The form of vLLM's benchmark, in milliseconds; Aladdin's name of a metric.
    assert parse_slo("tpot:50,e2el:3000") == Slo(None, 0.05, 3.0)
    assert parse_slo("ttft=1.6,atgt=0.075").require("ttft", "tpot") == (1.6, 0.075)
    for text in ("ttft=1", "ttft=1,tpot=1,e2el=1", "ttft=1,tpot=1,tbt:p99=1"):
        with pytest.raises(ValueError, match="limit ttft and tpot of each request"):
            parse_slo(text).require("ttft", "tpot")
    assert not parse_slo("")
    assert not NO_SLO
    assert Slo(None, None, 3.0)


@pytest.mark.parametrize(
    "text",
    ["ttft", "ttft=0", "ttft=-1", "speed=2", "ttft:90=2", "ttft:p0=2", "ttft=1,ttft=2", "tbt=0.1",
     "ttft:p101=1", "ttft=nan", "tbt:p99=1,itl:p99=2", "itl:3", "ttft:0", "ttft:p90",
     "tpot=1,atgt=1", "ttft:=2"],
)  # fmt: skip
def test_wrong_limits_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="--slo"):
        parse_slo(text)


def test_wrong_attainment_is_refused() -> None:
    with pytest.raises(ValueError, match="--attainment 0"):
        parse_slo("ttft=1", 0.0)


def test_limits_of_percentiles_bind_the_run() -> None:
    lines = [timeline(1.0, 0.1)] * 9 + [timeline(5.0, 0.1)]
    assert meets_slo(lines, parse_slo("ttft:p50=1"))
    assert not meets_slo(lines, parse_slo("ttft:p99=1"))
    assert meets_slo(lines, parse_slo("tbt:p99=0.11"))
    assert not meets_slo(lines, parse_slo("tbt:p99=0.09"))
    # Each of several limits binds.
    assert not meets_slo(lines, parse_slo("ttft:p50=1,tbt:p99=0.09"))
    assert not meets_slo(lines, parse_slo("ttft:p99=1,tbt:p99=0.11"))
    assert meets_slo(lines, parse_slo("ttft:p50=1,tbt:p99=0.11"))


def test_limits_of_each_request_bind_a_share() -> None:
    lines = [timeline(1.0, 0.1)] * 9 + [timeline(5.0, 0.1)]
    assert meets_slo(lines, parse_slo("ttft=1,tpot=0.11", 0.9))
    assert not meets_slo(lines, parse_slo("ttft=1", 0.91))
    assert slo_attainment(lines, parse_slo("ttft=1")) == 0.9


def test_texts_of_prices() -> None:
    assert parse_prices("vidur")["H100"] == 4.25
    assert parse_prices("vidur,L20=0.7,H100=4") == {**PRICE_TABLES["vidur"], "L20": 0.7, "H100": 4}
    assert parse_prices("L20=0") == {"L20": 0}
    for text in ("vidurr", "L20=x", "L20=-1", "=1", "L20=1,vidur"):
        with pytest.raises(ValueError, match="prices"):
            parse_prices(text)


def test_prices_are_those_of_known_devices() -> None:
    for table in PRICE_TABLES.values():
        assert set(table) <= set(DEVICES)
