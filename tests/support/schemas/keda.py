"""The part of KEDA's schema of ScaledObject (keda.sh/v1alpha1) that deploy/keda.yaml uses.

Source: config/crd/bases/keda.sh_scaledobjects.yaml of github.com/kedacore/keda, and its page of the
prometheus scaler for the metadata. Fields of the CRD that the file does not use are left out.
"""

from typing import Any

INTEGER = {"type": "integer", "minimum": 0}
TEXT = {"type": "string", "minLength": 1}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


SCALED_OBJECT = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "keda.sh/v1alpha1"},
    kind={"const": "ScaledObject"},
    metadata=_object(("name",), name=TEXT),
    spec=_object(
        ("scaleTargetRef", "triggers"),
        scaleTargetRef=_object(("name",), apiVersion=TEXT, kind=TEXT, name=TEXT),
        minReplicaCount=INTEGER,
        maxReplicaCount=INTEGER,
        pollingInterval=INTEGER,
        cooldownPeriod=INTEGER,
        advanced={"type": "object"},
        triggers={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ("type", "metadata"),
                type={"const": "prometheus"},
                metricType={"enum": ["AverageValue", "Value", "Utilization"]},
                metadata=_object(
                    ("serverAddress", "query", "threshold"),
                    serverAddress={"type": "string", "pattern": "^https?://"},
                    query=TEXT,
                    # KEDA's metadata are texts.
                    threshold={"type": "string", "pattern": "^[0-9.]+$"},
                    activationThreshold={"type": "string", "pattern": "^[0-9.]+$"},
                ),
            ),
        },
    ),
)
