"""The dashboard, the alert rules and the metrics' page are made from the table, and ask for nothing that it lacks."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from preble.serving.telemetry.table import BY_NAME, TABLE
from support.monitoring import ROOT, declared_name, generator
from support.servers import require_server

EXPRESSIONS = [
    *generator("dashboard").queries(),
    *(alert.expression for alert in generator("alerts").ALERTS),
]
OF_PROMETHEUS = {"job", "instance", "le"}


@pytest.mark.parametrize("name", generator("generate").FILES)
def test_what_is_made_from_the_table_is_what_was_committed(name: str) -> None:
    """Run `make reference` and commit the result."""
    assert (ROOT / name).read_text(encoding="utf-8") == generator("generate").FILES[name]()


def test_the_page_names_every_metric() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert [one.name for one in TABLE if f"| `{one.name}` |" not in page] == []


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_that_a_query_names_exists(expression: str) -> None:
    series = re.findall(r"preble_\w+", expression)
    assert series
    metrics = [declared_name(name) for name in series]
    assert None not in metrics, expression
    labels = {label for name in metrics if name is not None for label in BY_NAME[name].labels} | OF_PROMETHEUS
    asked = re.findall(r"[{,] ?(\w+)=", expression)
    for group in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", expression):
        asked += group.replace(" ", "").split(",") if group else []
    assert set(asked) <= labels, expression


def test_grafana_gets_every_panel_a_place_of_its_own() -> None:
    page = json.loads(generator("dashboard").dashboard())
    taken: set[tuple[int, int]] = set()
    for panel in page["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in page["panels"]}) == len(page["panels"])


def lost(given: Any, kept: Any, where: str = "") -> Iterator[str]:
    """The parts of `given` that `kept` lacks or has otherwise."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept.get(name), f"{where}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for i, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{where}[{i}]")
    elif given != kept:
        yield where


def as_grafana_reads_it(page: dict[str, Any]) -> Any:
    """The dashboard after Grafana's own types have read and written it: they drop fields that they do not know."""
    plugins.register_default_plugins()
    return json.loads(json.dumps(Dashboard.from_json(page), cls=JSONEncoder))


def test_grafanas_own_types_know_every_field_of_the_dashboard() -> None:
    page = json.loads(generator("dashboard").dashboard())
    assert list(lost(page, as_grafana_reads_it(page))) == []
    stacked = next(
        panel
        for panel in page["panels"]
        if "stacking" in panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
    )
    stacked["fieldConfig"]["defaults"]["custom"]["stacked"] = stacked["targets"][0]["expression"] = "a misspelt name"
    assert len(list(lost(page, as_grafana_reads_it(page)))) == 2


def test_every_alert_leads_to_a_page_that_there_is() -> None:
    assert [alert.name for alert in generator("alerts").ALERTS if not (ROOT / "docs" / alert.page).exists()] == []


def test_promtool_takes_the_rules() -> None:
    promtool = require_server("prometheus", "promtool")
    command = [promtool, "check", "rules", "--lint=all", "--lint-fatal", ROOT / "deploy" / "prometheus" / "alerts.yml"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


UP = {'preble_build_info{job="p"}': "1x300", 'preble_replica_up{job="p",instance="g",replica="a"}': "1x300"}
FIRES = {
    "PrebleGone": {"other": "1x300"},
    "PrebleNoReplicaUp": {'preble_replica_up{job="p",replica="a"}': "0x300"},
    "PrebleNoPickerLeads": {f'preble_picker_leading{{job="p",instance="{i}"}}': "0x300" for i in ("g", "h")},
    "PrebleErrors": {
        'preble_responses_total{job="p",path="/v1/completions",status="502"}': "0+6x300",
        'preble_responses_total{job="p",path="/v1/completions",status="200"}': "0+60x300",
    },
    "PrebleRefuses": {
        'preble_responses_total{job="p",path="/v1/completions",status="429"}': "0+6x300",
        'preble_responses_total{job="p",path="/v1/completions",status="200"}': "0+60x300",
    },
    "PrebleSlowFirstToken": {
        'preble_ttft_seconds_bucket{job="p",model="m",le="10.0"}': "0+10x300",
        'preble_ttft_seconds_bucket{job="p",model="m",le="30.0"}': "0+20x300",
        'preble_ttft_seconds_bucket{job="p",model="m",le="+Inf"}': "0+20x300",
    },
    "PrebleWorkWaits": {'preble_work_waiting_seconds{job="p"}': "50x300"},
    "PrebleReplicaDown": {'preble_replica_state{job="p",replica="b",state="down"}': "1x300"},
    "PrebleReplicaEjected": {'preble_replica_ejected{job="p",replica="b"}': "1x300"},
    "PrebleUnbalanced": {
        f'preble_load_seconds{{job="p",instance="g",replica="{r}"}}': v
        for r, v in (("a", "90x300"), ("b", "10x300"), ("c", "5x300"))
    },
    "PrebleCacheDrift": {
        'preble_drift_predicted_tokens_total{job="p",replica="a"}': "0+60000x300",
        'preble_drift_reported_tokens_total{job="p",replica="a"}': "0+6000x300",
    },
    "PrebleParityMismatch": {'preble_replica_parity{job="p",replica="a",check="chat"}': "0x300"},
    "PrebleKvEventsLost": {'preble_kv_events_arrive{job="p",replica="a"}': "0x300"},
    "PreblePeersDisconnected": {'preble_peers_connected{job="p",instance="g"}': "0x300"},
    "PrebleSourceStale": {'preble_source_current{job="p",source="pods"}': "0x300"},
    "PrebleRetriesDenied": {'preble_retries_denied_total{job="p",instance="g"}': "0+30x300"},
    "PrebleGatewayBusy": {'preble_process_cpu_seconds_total{job="p",instance="g",process="gateway"}': "0+57x300"},
    "PrebleIndexFull": {'preble_unindexed_total{job="p",instance="g"}': "0+600x300"},
    "PrebleLogLost": {'preble_log_lines_lost{job="p",instance="g"}': "0+1x300"},
}
CALM = {
    **UP,
    'preble_responses_total{job="p",path="/v1/completions",status="200"}': "0+600x300",
    'preble_responses_total{job="p",path="/v1/completions",status="429"}': "0+1x300",
    'preble_responses_total{job="p",path="/v1/completions",status="503"}': "0+1x300",
    'preble_ttft_seconds_bucket{job="p",model="m",le="1.0"}': "0+600x300",
    'preble_ttft_seconds_bucket{job="p",model="m",le="+Inf"}': "0+600x300",
    'preble_picker_leading{job="p",instance="g"}': "1x300",
    'preble_picker_leading{job="p",instance="h"}': "0x300",
    'preble_work_waiting_seconds{job="p"}': "3x300",
    'preble_replica_ejected{job="p",replica="a"}': "0x300",
    'preble_load_seconds{job="p",instance="g",replica="a"}': "90x300",
    'preble_load_seconds{job="p",instance="g",replica="b"}': "60x300",
    'preble_drift_predicted_tokens_total{job="p",replica="a"}': "0+60000x300",
    'preble_drift_reported_tokens_total{job="p",replica="a"}': "0+58000x300",
    'preble_replica_parity{job="p",replica="a",check="chat"}': "1x300",
    'preble_kv_events_arrive{job="p",replica="a"}': "1x300",
    'preble_source_current{job="p",source="pods"}': "1x300",
    'preble_process_cpu_seconds_total{job="p",instance="g",process="gateway"}': "0+20x300",
}


Case = tuple[dict[str, str], dict[str, int]]
"""Series with their values, one a minute, and how many of which alert are to fire after four hours of them."""


def compared(cases: list[Case], folder: Path) -> subprocess.CompletedProcess[str]:
    """Have promtool feed the rules with each case."""
    promtool = require_server("prometheus", "promtool")
    rules = str(ROOT / "deploy" / "prometheus" / "alerts.yml")
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [rules], "tests": [_case(*case) for case in cases]}))
    return subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)


def _case(series: dict[str, str], counts: dict[str, int]) -> dict[str, object]:
    asked = [
        {
            "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)',
            "eval_time": "240m",
            "exp_samples": [{"labels": "{}", "value": count}],
        }
        for name, count in counts.items()
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    return {"interval": "1m", "input_series": given, "promql_expr_test": asked}


@pytest.mark.slow
def test_each_alert_fires_where_it_should(tmp_path: Path) -> None:
    assert FIRES.keys() == {alert.name for alert in generator("alerts").ALERTS}
    build, _ = UP
    base = {name: {build: "1x300"} if name == "PrebleNoReplicaUp" else UP for name in FIRES} | {"PrebleGone": {}}
    found = compared([({**base[name], **FIRES[name]}, {name: 1}) for name in FIRES], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


def test_no_alert_fires_while_all_is_well(tmp_path: Path) -> None:
    found = compared([(CALM, dict.fromkeys(FIRES, 0))], tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr


def test_promtool_notices_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    assert compared([(CALM, {"PrebleErrors": 1})], tmp_path).returncode != 0
