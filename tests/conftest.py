"""Fixtures that several rooms use."""

from __future__ import annotations

import logging
import signal
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

from support.replicas import (
    RunningReplicas,
    VllmPair,
    require_sglang,
    require_vllm,
    running_sglang,
    running_vllm_embedding,
    running_vllm_pair,
)

OTHERS = ("vllm", "sglang", "envoy", "ray", "clients")
"""Marks of tests that start processes of other projects."""

deaths: list[str] = []
"""What became of real engines in this run."""

PROGRAMS = (
    "fake_vllm.py",
    "render_chart.py",
    "inside_vllm.py",
    "inside_sglang.py",
    "inside_ray.py",
    "kubernetes_schemas.py",
    "make_tiny_llava.py",
    "make_tiny_lora.py",
)
collect_ignore = [f"support/{name}" for name in (*PROGRAMS, "torchvision_on_cpu", "vllm_plugins")]
"""Programs that tests start; importing them, as the search for doctests would, runs them or needs an engine."""


def pytest_configure() -> None:
    # A shell ignores SIGINT in what it runs in the background, and every process that a test starts inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile("however slow the machine is", deadline=None)
    hypothesis.settings.load_profile("however slow the machine is")


def say(request: pytest.FixtureRequest, what: str) -> None:
    """Tell who waits for the tests: this takes 20 to 230 s."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{what} ...", file=sys.stderr, flush=True)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines leave sockets where temporary files go, and these go with the session. Paths of sockets must be short."""
    tmp_path_factory.getbasetemp()  # chosen now: pytest keeps its own folders
    with (
        tempfile.TemporaryDirectory(prefix="preble-tests-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="session")
def vllm_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmPair]:
    """Two real vLLM replicas of the tiny model, started once a session (20 to 110 s) and shared: assume nothing of
    what they cache, reset it where it matters. Mark tests that use it `vllm` and give them a timeout of 600 s."""
    require_vllm()
    say(request, "starting two real vLLM replicas")
    with running_vllm_pair(tmp_path_factory.mktemp("vllm-logs")) as pair:
        yield pair


@pytest.fixture(scope="session")
def vllm_embedding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningReplicas]:
    """A real vLLM replica that embeds with the tiny model, started once a session (15 to 80 s) and shared. Mark tests
    that use it `vllm` and give them a timeout of 600 s."""
    require_vllm()
    say(request, "starting a real vLLM replica that embeds")
    with running_vllm_embedding(tmp_path_factory.mktemp("vllm-embedding-logs")) as replicas:
        yield replicas


@pytest.fixture(scope="session")
def sglang(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningReplicas]:
    """A real SGLang replica of the tiny model, started once a session (20 to 110 s) and shared; it orders its waiting
    requests as Preble does. Mark tests that use it `sglang` and give them a timeout of 600 s."""
    require_sglang()
    say(request, "starting a real SGLang replica")
    with running_sglang(tmp_path_factory.mktemp("sglang-logs")) as replicas:
        yield replicas


@pytest.fixture(scope="session")
def sglang_url(sglang: RunningReplicas) -> str:
    """Of the shared SGLang replica."""
    return sglang.urls[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes of others may fail by themselves: what needs them is run once more. What needs only our code is not."""
    for item in items:
        if any(item.get_closest_marker(name) for name in OTHERS):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Some commands that run in this process configure logging; no other test is to notice."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def signals_as_they_were() -> Iterator[None]:
    """Commands that serve hold signals back, and a process that a test starts inherits what this one holds back."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture(autouse=True)
def shared_engines_are_there(request: pytest.FixtureRequest) -> None:
    """Start the shared engines that this test needs and that have died; the run's summary names them.

    It needs those among its fixtures, and those that are values of its parameters.
    """
    parameters = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    for name in ("vllm_pair", "vllm_embedding", "sglang"):
        if name in request.fixturenames or name in parameters:
            deaths.extend(f"before {request.node.nodeid}: {log}" for log in request.getfixturevalue(name).revive())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if deaths:
        terminalreporter.section("real engines that had died and were started again")
        terminalreporter.write_line("\n\n".join(deaths))
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"unstable: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
