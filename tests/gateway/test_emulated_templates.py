"""An emulated replica with a model's tokenizer makes the ids that the gateway makes with it, whatever the template."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gateway.test_tokens import model  # noqa: F401 (a fixture)
from preble.config import ParityConfig, ReplicaConfig
from preble.emulator.config import EmulatorConfig
from preble.emulator.server import EmulatorServer
from preble.serving.parity.report import ParityOutcome
from support.gateways import gateway_before

TEMPLATES = {
    "the date": "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "the date, if it is there": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}",
    "break": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "parts": "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}",
    "tools": "{{ tools | tojson }}{% for m in messages %}{{ (m.tool_calls or 0) | tojson }}{{ m.content }}{% endfor %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
async def test_parity_with_an_emulated_replica_is_verified(model: Path, tmp_path: Path, template: str) -> None:  # noqa: F811
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = {"tokenizer": str(folder), "parity": ParityConfig()}
    async with (
        EmulatorServer(EmulatorConfig(profile="tiny-cpu", tokenizer=str(folder), events_port=0)) as emulated,
        gateway_before([ReplicaConfig(emulated.url)], **settings) as gateway,
    ):
        [report] = await gateway.serving.check_parity()
        assert {finding.check: finding.detail for finding in report.findings if finding.detail} == {}
        assert report.outcome is ParityOutcome.VERIFIED
