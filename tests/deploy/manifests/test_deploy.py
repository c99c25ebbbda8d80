"""What deploy/ says is true of the server."""

import configparser
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gllm.commands.router import make_parser as build_router_parser
from gllm.config.server import ServerConfig
from gllm.frontend.metrics import Metrics
from gllm.frontend.routes.registry import ENDPOINTS
from gllm.options.exit_status import INVALID_STATUS, UNAVAILABLE_STATUS
from gllm.runtime.head.node import STOP_SECONDS
from gllm.runtime.messaging.security import SecretFile, create_secret_file
from gllm.serve import make_parser
from gllm.text.tokenizer import Tokenizer
from scripts import grafana_dashboard
from tests.deploy.manifests.test_manifests import mounted
from tests.frontend.test_engines import ScriptedFleet
from tests.support.http.fake_engine import FakeEngine
from tests.support.sources import ROOT
from tests.support.text import tokenizers as some

DEPLOY = ROOT / "deploy"
GETS = {one.path for one in ENDPOINTS if one.method == "GET"}


@pytest.fixture(scope="module")
def families() -> dict[str, set[str]]:
    """Metrics of a server, and what their samples are called."""
    texts = []
    for fleet in (ScriptedFleet(), None):
        engine = FakeEngine(Tokenizer(some.byte_level()), fleet=fleet, num_routers=1)
        metrics = Metrics(engine)
        metrics.finished.count("stop")
        texts.append(metrics.render().decode())
    found = [family for text in texts for family in text_string_to_metric_families(text)]
    # When a counter was made is no metric of ours, and vLLM's names are shown under ours.
    mine = (
        family
        for family in found
        if not family.name.endswith("_created") and not family.name.startswith("vllm:")
    )
    return {family.name: {sample.name for sample in family.samples} for family in mine}


@pytest.fixture(scope="module")
def dashboard() -> Any:
    return json.loads((DEPLOY / "grafana-dashboard.json").read_text())


def charts(dashboard: Any) -> list[Any]:
    """Panels without the headings of rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def shown(dashboard: Any) -> set[str]:
    """Names in the dashboard's expressions and variables."""
    texts = [target["expr"] for panel in charts(dashboard) for target in panel["targets"]]
    texts += [
        each["definition"] for each in dashboard["templating"]["list"] if "definition" in each
    ]
    return {name for text in texts for name in re.findall(r"gllm:\w+", text)}


def test_the_dashboard_is_as_its_script_writes_it() -> None:
    written = (DEPLOY / "grafana-dashboard.json").read_text()
    assert written == grafana_dashboard.text(), "run python -m scripts.grafana_dashboard"


def test_every_name_on_the_dashboard_is_a_metric(
    dashboard: Any, families: dict[str, set[str]]
) -> None:
    assert shown(dashboard) <= {name for samples in families.values() for name in samples}


def test_every_metric_is_on_the_dashboard_or_left_out(
    dashboard: Any, families: dict[str, set[str]]
) -> None:
    names = shown(dashboard)
    hidden = {family for family, samples in families.items() if not samples & names}
    assert hidden == {f"gllm:{name}" for name in grafana_dashboard.LEFT_OUT}


def test_every_panel_asks_the_chosen_source_and_overlaps_no_other(dashboard: Any) -> None:
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    places = set()
    for panel in charts(dashboard):
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source["uid"] == "${datasource}" for source in sources)
        asked = {
            name for target in panel["targets"] for name in re.findall(r"\$(\w+)", target["expr"])
        }
        assert asked <= {*variables, "__rate_interval"}
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))
    for row in (panel for panel in dashboard["panels"] if panel["type"] == "row"):
        places.add((row["gridPos"]["x"], row["gridPos"]["y"]))
    assert len(places) == len({panel["id"] for panel in dashboard["panels"]})


def test_prometheus_asks_where_the_server_answers() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    job, agents = jobs
    config = ServerConfig()
    assert job["static_configs"] == [{"targets": [f"{config.host}:{config.port}"]}]
    assert agents["job_name"] == "gllm-agents"
    assert not any("metrics_path" in each for each in jobs)
    assert "/metrics" in GETS


def time_to_stop(command: list[str]) -> float:
    """Seconds that a server with this command line may take to end."""
    at = command.index("serve")
    values = make_parser().parse_args(command[at + 1 :])
    assert values.log_format == "json"
    return values.shutdown_timeout + STOP_SECONDS


def test_kubernetes_asks_endpoints_and_waits_long_enough() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {
        name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
    }
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health", "liveness": "/health", "readiness": "/ready",
    }  # fmt: skip
    assert {"/health", "/ready"} <= GETS
    (port,) = container["ports"]
    assert port["containerPort"] == ServerConfig().port
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    assert pod["terminationGracePeriodSeconds"] > time_to_stop(container["args"])


def test_systemd_leaves_the_stages_to_the_frontend_and_waits_long_enough() -> None:
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "gllm.service")
    service = unit["Service"]
    assert service["KillMode"] == "mixed"
    # What passes is tried again, for ever and not in a loop.
    assert service["Restart"] == "on-failure"
    prevented = {int(status) for status in service["RestartPreventExitStatus"].split()}
    assert prevented == {INVALID_STATUS}
    assert UNAVAILABLE_STATUS not in prevented
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert float(service["RestartSec"]) >= 1
    assert float(service["TimeoutStopSec"]) > time_to_stop(shlex.split(service["ExecStart"]))


def manifests(name: str) -> dict[tuple[str, str], Any]:
    """Objects of a manifest by kind and name."""
    found = yaml.safe_load_all((DEPLOY / name).read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_kubernetes_routers_and_engines_find_each_other() -> None:
    found = manifests("kubernetes-router.yaml")
    pods = {
        name: found["Deployment", name]["spec"]["template"]
        for name in ("gllm-router", "gllm-engine")
    }
    (router,), (engine,) = (pod["spec"]["containers"] for pod in pods.values())
    assert router["args"][:2] == ["gllm", "router"]
    router_values = build_router_parser().parse_args(router["args"][2:])
    port = {each["name"]: each["containerPort"] for each in router["ports"]}["hub"]
    assert router_values.hub == f"0.0.0.0:{port}"
    assert engine["args"][:2] == ["gllm", "serve"]
    engine_values = make_parser().parse_args(engine["args"][2:])
    hub = found["Service", "gllm-router-hub"]["spec"]
    assert engine_values.router == (f"dns:gllm-router-hub:{hub['ports'][0]['port']}",)
    # A router becomes ready by its engines, which have to find it before.
    assert hub["publishNotReadyAddresses"] is True
    assert hub["clusterIP"] == "None"
    for service in ("gllm", "gllm-router-hub"):
        assert (
            found["Service", service]["spec"]["selector"]
            == pods["gllm-router"]["metadata"]["labels"]
        )
    for name, pod in pods.items():
        assert (
            found["PodDisruptionBudget", name]["spec"]["selector"]["matchLabels"]
            == pod["metadata"]["labels"]
        )


def test_kubernetes_mounts_the_node_secret_so_that_it_is_accepted(tmp_path: Path) -> None:
    found = manifests("kubernetes-router.yaml")
    for name in ("gllm-router", "gllm-engine"):
        pod = found["Deployment", name]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        mount, volume = mounted(pod, "node-secret")
        path = container["args"][container["args"].index("--node-secret-file") + 1]
        assert path == f"{mount['mountPath']}/secret"
        secret = tmp_path / name
        create_secret_file(secret)
        secret.chmod(volume["secret"]["defaultMode"])
        SecretFile(secret)
