"""Fixtures that several rooms use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.replicas import RunningReplicas, VllmPair, require_sglang, require_vllm, running_sglang, running_vllm_pair

collect_ignore = ["support/fake_vllm.py", "support/inside_vllm.py", "support/inside_sglang.py"]
"""Programs that tests start; importing them, as the search for doctests would, runs them or needs an engine."""


@pytest.fixture(scope="session")
def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPair]:
    """Two real vLLM replicas of the tiny model, started once a session (20 to 110 s) and shared: assume nothing of
    what they cache, reset it where it matters. Mark tests that use it `vllm` and give them a timeout of 600 s."""
    require_vllm()
    with running_vllm_pair(tmp_path_factory.mktemp("vllm-logs")) as pair:
        yield pair


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningReplicas]:
    """A real SGLang replica of the tiny model, started once a session (20 to 110 s) and shared; it orders its waiting
    requests as Preble does. Mark tests that use it `sglang` and give them a timeout of 600 s."""
    require_sglang()
    with running_sglang(tmp_path_factory.mktemp("sglang-logs")) as replicas:
        yield replicas


@pytest.fixture(scope="session")
def sglang_url(sglang: RunningReplicas) -> str:
    """Of the shared SGLang replica."""
    return sglang.urls[0]
