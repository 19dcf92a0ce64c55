"""Parity with real engines: verified where the gateway has the model's own files, a mismatch where it has others."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from preble.config import ParityConfig, ReplicaConfig
from preble.gateway.server import Gateway
from preble.serving.parity.report import Check, Finding, ParityOutcome, ParityReport
from support.gateways import gateway_before
from support.replicas import TEST_TIMEOUT_S, TINY_MODEL, VllmPair

pytestmark = [pytest.mark.vllm, pytest.mark.sglang, pytest.mark.timeout(TEST_TIMEOUT_S)]

SETTINGS = ParityConfig(answer_s=120.0, events_s=120.0, retry_s=600.0)


@pytest.fixture
def urls(vllm_pair: VllmPair, sglang_url: str) -> tuple[str, str]:
    """A vLLM and an SGLang replica of the tiny model."""
    return vllm_pair.urls[0], sglang_url


@asynccontextmanager
async def before(urls: tuple[str, ...], tokenizer: Path | None = TINY_MODEL, **replica: Any) -> AsyncIterator[Gateway]:
    """A gateway that has checked its replicas."""
    settings = {"tokenizer": tokenizer and str(tokenizer), "profile": "tiny-cpu", "parity": SETTINGS}
    async with gateway_before([ReplicaConfig(url, **replica) for url in urls], **settings) as gateway:
        async with aiohttp.ClientSession(gateway.url) as http, http.post("/debug/parity") as answer:
            assert answer.status == 200
        yield gateway


def report_of(gateway: Gateway, engine: str) -> ParityReport:
    [report] = [
        replica.parity
        for replica in gateway.serving.replicas.values()
        if replica.info.engine == engine and replica.parity is not None
    ]
    return report


def findings_of(gateway: Gateway, engine: str) -> dict[Check, Finding]:
    return {finding.check: finding for finding in report_of(gateway, engine).findings}


async def test_both_engines_make_the_gateways_ids_and_cache_what_it_predicts(urls: tuple[str, str]) -> None:
    async with before(urls) as gateway:
        assert report_of(gateway, "vllm").outcome is ParityOutcome.VERIFIED
        assert list(findings_of(gateway, "vllm")) == [check for check in Check if check is not Check.COPY]
        of_sglang = findings_of(gateway, "sglang")
        assert list(of_sglang) == [check for check in Check if check is not Check.COPY]
        assert {f.outcome for check, f in of_sglang.items() if check is not Check.TOOLS} == {ParityOutcome.VERIFIED}
        assert report_of(gateway, "sglang").trusted
        gateway.serving.scheduler.check()


async def test_sglang_alone_makes_the_gateways_ids_of_tools_too(sglang_url: str) -> None:
    async with before((sglang_url,)) as gateway:
        assert report_of(gateway, "sglang").outcome is ParityOutcome.VERIFIED
        assert list(findings_of(gateway, "sglang")) == [check for check in Check if check is not Check.COPY]


async def test_another_template_than_the_engines_is_reported(urls: tuple[str, str], tmp_path: Path) -> None:
    folder = model_copy(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    async with before(urls, folder) as gateway:
        for engine in ("vllm", "sglang"):
            found = findings_of(gateway, engine)
            assert {check for check, f in found.items() if f.outcome is ParityOutcome.MISMATCH} == {
                Check.CHAT,
                Check.TOOLS,
            }
            assert found[Check.CHAT].position == 0
            assert not report_of(gateway, engine).trusted


async def test_another_tokenizer_than_the_engines_is_reported(urls: tuple[str, str], tmp_path: Path) -> None:
    folder = model_copy(tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["post_processor"] = None  # begins no prompt with a special token
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    async with before(urls, folder) as gateway:
        for engine in ("vllm", "sglang"):
            found = findings_of(gateway, engine)
            assert found[Check.COMPLETION].outcome is found[Check.SPECIAL].outcome is ParityOutcome.MISMATCH
            assert found[Check.CHAT].outcome is ParityOutcome.VERIFIED
            assert found[Check.CACHED_TOKENS].outcome is ParityOutcome.VERIFIED
            assert not report_of(gateway, engine).trusted


async def test_without_a_tokenizer_the_second_engine_is_compared_with_the_first(urls: tuple[str, str]) -> None:
    async with before(urls, None) as gateway:
        first, *_ = gateway.serving.replicas.values()
        assert first.parity is not None and first.parity.outcome is ParityOutcome.VERIFIED
        for engine in ("vllm", "sglang"):
            found = findings_of(gateway, engine)
            assert {f.outcome for check, f in found.items() if check is not Check.TOOLS} == {ParityOutcome.VERIFIED}


def model_copy(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in TINY_MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, folder)
    return folder
