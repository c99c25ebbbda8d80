"""Values of /metrics. A shared server counts for all tests, so a test compares two values."""

from gllm.deploy.metrics_scrape import MetricsScrape, parse_metrics
from tests.support.servers.server import Server


def read_metrics(server: Server) -> str:
    """The text of /metrics."""
    with server.open("/metrics", None) as answer:
        text: str = answer.read().decode()
    return text


def scrape(server: Server) -> MetricsScrape:
    """The server's metrics."""
    return parse_metrics(read_metrics(server), 0.0)


def by_stage(server: Server, name: str) -> list[float]:
    """A value from /metrics for each stage; once for what has no stage."""
    lines = read_metrics(server).splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"gllm:{name}{{")]


def gauge(server: Server, name: str) -> float:
    """A value from /metrics; the engine reports it with its next step, which this is."""
    server.post("/v1/completions", {"prompt": [9], "max_tokens": 1})
    return by_stage(server, name)[0]
