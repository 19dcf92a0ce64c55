"""Kubernetes' published OpenAPI schemas, strictly: unknown fields are errors. Runs in `.servers/helm`.

    python kubernetes_schemas.py    # for each line of stdin, an object: prints null, or what is wrong, as JSON

The schemas of each version come as data with the package `kubernetes-validate`. Its validator takes 15.0 for an
integer; the API server, which decodes into Go's int32, does not (k8s.io/apimachinery, runtime/serializer/json: 400
"cannot unmarshal number 15.0"). So whoever decodes JSON for it turns numbers with a point into strings.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kubernetes_validate

VERSIONS = ("1.27", "1.31", "1.37")
"""The oldest version that the chart admits, one between, and the newest that there are schemas of."""
_NO_SCHEMAS = ("monitoring.coreos.com/", "inference.networking.k8s.io/", "gateway.networking.k8s.io/", "keda.sh/")
"""Kinds that others define: the Prometheus operator, the Gateway API and its Inference Extension, KEDA."""


def check(manifest: dict[str, Any]) -> None:
    """Raises: kubernetes_validate.ValidationError: the object does not fit the schema of one of the versions."""
    if not manifest["apiVersion"].startswith(_NO_SCHEMAS):
        for version in VERSIONS:
            kubernetes_validate.validate(manifest, version, strict=True)


def wrong_with(manifest: dict[str, Any]) -> str | None:
    """Return why the API would refuse an object, None if it would not."""
    try:
        check(manifest)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message} (Kubernetes {error.version})"
    except (kubernetes_validate.SchemaNotFoundError, KeyError) as error:
        return f"no such kind: {error}"
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(wrong_with(json.loads(line, parse_float=str))), flush=True)
