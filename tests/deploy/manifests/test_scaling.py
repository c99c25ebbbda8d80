"""KEDA and a HorizontalPodAutoscaler follow the number of engines that a router wants."""

import copy
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from gllm.routing.scaling.scale_config import ScaleConfig
from tests.deploy.manifests.test_deploy import families as metric_families  # noqa: F401
from tests.deploy.manifests.test_manifests import DEPLOY, KUBERNETES, read_objects
from tests.support.schemas.keda import SCALED_OBJECT


def test_keda_follows_the_metric_of_the_leading_router(metric_families: Any) -> None:  # noqa: F811
    (scaled,) = read_objects("keda.yaml")
    jsonschema.validate(scaled, SCALED_OBJECT)
    behaviour = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    (hpa,) = read_objects("kubernetes-hpa.yaml")
    same = copy.deepcopy(hpa)
    same["spec"]["behavior"] = behaviour["behavior"]
    kubernetes_validate.validate(same, KUBERNETES, strict=True)
    (trigger,) = scaled["spec"]["triggers"]
    assert trigger["metadata"]["query"] == "max(gllm:wanted_engines)"
    assert "gllm:wanted_engines" in metric_families
    # One replica per wanted engine.
    assert float(trigger["metadata"]["threshold"]) == 1
    assert trigger["metricType"] == "AverageValue"


@pytest.mark.parametrize(("name", "key"), [("keda.yaml", "Count"), ("kubernetes-hpa.yaml", "s")])
def test_limits_are_those_that_the_file_gives_the_router(name: str, key: str) -> None:
    (scaled,) = read_objects(name)
    spec = scaled["spec"]
    target = spec["scaleTargetRef"]
    names = {each["metadata"]["name"] for each in read_objects("kubernetes-router.yaml")}
    assert (target["kind"], target["name"]) == ("Deployment", "gllm-engine")
    assert target["name"] in names
    limits = spec[f"minReplica{key}"], spec[f"maxReplica{key}"]
    text = (DEPLOY / name).read_text()
    flag = text.partition("--scale ")[2].partition("`")[0]
    assert ScaleConfig(flag).limits() == limits


def test_schema_refuses_a_number_where_keda_reads_text() -> None:
    (scaled,) = read_objects("keda.yaml")
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(scaled, SCALED_OBJECT)
