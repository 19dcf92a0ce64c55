"""Render and lint a Helm chart, and check its manifests against Kubernetes' own schemas. Runs in `.servers/helm`.

python render_chart.py CHART < VALUES.json    # prints {"lint": [...], "manifests": [...]}, or one line on stderr
"""

from __future__ import annotations

import json
import sys

import helm_python
import yaml
from kubernetes_schemas import check

values = json.load(sys.stdin)
lint = helm_python.lint(sys.argv[1], values, strict=True)
with helm_python.Chart.load(sys.argv[1]) as chart:
    try:
        chart.validate_schema(values)
        rendered = chart.render(values, name="demo", namespace="prod")
    except helm_python.HelmError as error:
        sys.exit(str(error))
manifests = [
    manifest
    for file, text in rendered.items()
    if not file.endswith(".txt")
    for manifest in yaml.safe_load_all(text)
    if manifest
]
for manifest in manifests:
    check(manifest)
worst = max((message["severity"] for message in lint["messages"]), default=0)
json.dump({"worst_severity": worst, "lint": lint, "manifests": manifests}, sys.stdout)
