"""JSON Schema of the parts of RayJob, ray.io/v1, that gllm writes, without its pod templates.

Written from the documented fields of KubeRay (ray-operator/apis/ray/v1).
"""

from typing import Any

_COUNT = {"type": "integer", "minimum": 0}
_PARAMS = {"type": "object", "additionalProperties": {"type": "string"}}
_GROUP = {"rayStartParams": _PARAMS, "template": {"type": "object"}}


def _all(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with all of these properties and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
    }


RAY_JOB: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    **_all(
        apiVersion={"const": "ray.io/v1"},
        kind={"const": "RayJob"},
        metadata={"type": "object", "required": ["name"]},
        spec=_all(
            entrypoint={"type": "string"},
            shutdownAfterJobFinishes={"type": "boolean"},
            rayClusterSpec=_all(
                rayVersion={"type": "string"},
                headGroupSpec=_all(**_GROUP),
                workerGroupSpecs={
                    "type": "array",
                    "items": _all(
                        groupName={"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
                        replicas=_COUNT,
                        minReplicas=_COUNT,
                        maxReplicas=_COUNT,
                        **_GROUP,
                    ),
                },
            ),
        ),
    ),
}
