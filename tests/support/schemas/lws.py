"""JSON Schema of LeaderWorkerSet, leaderworkerset.x-k8s.io/v1, without its pod templates.

Written from the documented fields of release 0.9 (api/leaderworkerset/v1 of kubernetes-sigs/lws).
"""

from typing import Any

_COUNT = {"type": "integer", "minimum": 0}
_COUNT_OR_SHARE = {
    "anyOf": [_COUNT, {"type": "string", "pattern": "^(100|[0-9]{1,2})%$"}],
}
_ROLLING_UPDATE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "partition": _COUNT,
        "maxUnavailable": _COUNT_OR_SHARE,
        "maxSurge": _COUNT_OR_SHARE,
    },
}
LEADER_WORKER_SET: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}},
        },
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": _COUNT,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": _ROLLING_UPDATE,
                    },
                },
                "networkConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["subdomainPolicy"],
                    "properties": {"subdomainPolicy": {"enum": ["Shared", "UniquePerReplica"]}},
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate"],
                    "properties": {
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                        "size": {"type": "integer", "minimum": 1},
                        "restartPolicy": {
                            "enum": [
                                "Default",
                                "RecreateGroupOnPodRestart",
                                "RecreateGroupAfterStart",
                                "None",
                            ]
                        },
                        "subGroupPolicy": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "subGroupPolicyType": {"enum": ["LeaderWorker", "LeaderExcluded"]},
                                "subGroupSize": {"type": "integer", "minimum": 1},
                            },
                        },
                    },
                },
            },
        },
    },
}
