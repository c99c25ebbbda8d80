"""A router's engines in `gllm top`."""

import math

from gllm.commands.top.figures import ScrapeHistory
from gllm.commands.top.render import render
from gllm.deploy.metrics_scrape import MetricsScrape, parse_metrics
from gllm.frontend.metrics import Metrics
from gllm.text.tokenizer import Tokenizer
from tests.commands.top.test_render import FIGURES
from tests.frontend.test_engines import ScriptedFleet
from tests.support.http.fake_engine import FakeEngine
from tests.support.text import tokenizers as some

URL = "http://127.0.0.1:8000"
MODEL = 'model_name="m"'


def scrape(time: float, tokens: int, engines: dict[str, str], parked: int = 0) -> MetricsScrape:
    """Return what a router answers whose engines have these states and have made these tokens."""
    lines = [
        "# TYPE gllm:router_parked_requests gauge",
        f"gllm:router_parked_requests{{{MODEL}}} {parked}",
        "# TYPE gllm:router_migrations_total counter",
        f'gllm:router_migrations_total{{{MODEL},cause="lost"}} 2',
        f'gllm:router_migrations_total{{{MODEL},cause="drained"}} 1',
        "# TYPE gllm:router_lost_engines_total counter",
        f'gllm:router_lost_engines_total{{{MODEL},kind="lost"}} 1',
    ]
    for index, (name, state) in enumerate(engines.items(), 1):
        label = f'{{{MODEL},engine="{name}"}}'
        lines += [
            "# TYPE gllm:router_engine_state gauge",
            f'gllm:router_engine_state{{{MODEL},engine="{name}",state="{state}"}} 1',
            "# TYPE gllm:router_engine_requests gauge",
            f"gllm:router_engine_requests{label} {index}",
            "# TYPE gllm:router_engine_kv_cache_usage_perc gauge",
            f"gllm:router_engine_kv_cache_usage_perc{label} 0.25",
            "# TYPE gllm:router_engine_weight gauge",
            f"gllm:router_engine_weight{label} 0.5",
            "# TYPE gllm:router_engine_decode_tokens_total counter",
            f"gllm:router_engine_decode_tokens_total{label} {index * tokens}",
            "# TYPE gllm:router_engine_prefix_cache_queries_total counter",
            f"gllm:router_engine_prefix_cache_queries_total{label} {tokens}",
            "# TYPE gllm:router_engine_prefix_cache_hits_total counter",
            f"gllm:router_engine_prefix_cache_hits_total{label} {tokens / 4}",
        ]
    return parse_metrics("\n".join(lines) + "\n", time)


def test_figures_of_engines() -> None:
    history = ScrapeHistory()
    history.add(scrape(10.0, 100, {"b": "ready", "a": "draining"}))
    router = history.add(scrape(12.0, 300, {"b": "ready", "a": "draining"}, parked=4)).router
    assert router is not None
    assert (router.parked, router.migrations, router.lost_engines, router.shed) == (4, 3, 1, 0)
    a, b = router.engines
    assert (a.name, a.state, b.name, b.state) == ("a", "draining", "b", "ready")
    assert (b.num_requests, b.output_rate, b.prefix_hits) == (1, 100, 0.25)
    assert (a.num_requests, a.output_rate, a.kv_usage, a.weight) == (2, 200, 0.25, 0.5)


def test_a_real_router_s_metrics_are_read() -> None:
    engine = FakeEngine(Tokenizer(some.byte_level()), fleet=ScriptedFleet())
    metrics = Metrics(engine).render().decode()
    router = ScrapeHistory().add(parse_metrics(metrics, 1.0)).router
    assert router is not None
    assert (router.parked, router.migrations, router.lost_engines, router.shed) == (4, 2, 1, 3)
    assert [(one.name, one.state) for one in router.engines] == [("a", "ready"), ("b", "draining")]
    first = router.engines[0]
    assert (first.num_requests, first.waiting, first.kv_usage, first.weight) == (2, 1, 0.5, 1)


def test_an_engine_that_joins_or_restarts_counts_from_zero() -> None:
    history = ScrapeHistory()
    history.add(scrape(10.0, 1000, {"a": "ready"}))
    router = history.add(scrape(12.0, 300, {"a": "ready", "b": "ready"})).router
    assert router is not None
    assert [engine.output_rate for engine in router.engines] == [150, 300]


def test_an_engine_is_no_router() -> None:
    text = f"# TYPE gllm:num_requests_running gauge\ngllm:num_requests_running{{{MODEL}}} 7\n"
    assert ScrapeHistory().add(parse_metrics(text, 1.0)).router is None
    assert not any("engines" in line for line in render(FIGURES, [1.0], URL, 80))


def test_the_view_of_a_router() -> None:
    long = "host-of-a-long-name-4711"
    engines = {"alpha": "ready", long: "recovering"}
    history = ScrapeHistory()
    history.add(scrape(10.0, 100, engines))
    figures = history.add(scrape(12.0, 300, engines))
    lines = render(figures, history.rates, URL, 80)
    assert "migrations     3; engines lost: 1; requests shed: 0" in lines
    assert "engines        1 ready, 1 recovering" in lines
    title, alpha, other = lines[-3:]
    assert title.split() == [
        "engine", "state", "requests", "waiting", "tokens/s", "KV", "used", "cached", "weight",
    ]  # fmt: skip
    assert alpha.split() == ["alpha", "ready", "1", "0", "100.0", "25.0", "%", "25.0", "%", "0.50"]
    assert other.startswith("host-of~e-4711 recovering ")
    assert len({len(line) for line in (title, alpha, other)}) == 1
    assert max(map(len, lines)) <= 80
    assert not any(line.startswith(("stage", "micro-batches")) for line in lines)


def test_a_router_without_engines() -> None:
    history = ScrapeHistory()
    figures = history.add(scrape(10.0, 0, {}))
    assert "engines        none" in render(figures, [math.nan], URL, 80)
