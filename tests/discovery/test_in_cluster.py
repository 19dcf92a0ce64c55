"""The way to the API from inside a pod: environment, certificate and token of the service account, over TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import pytest

from preble.discovery.kubernetes_api import Api, ApiError, Listing, Objects, connect
from support.kubernetes_api import kubernetes_api

PODS = "/api/v1/namespaces/prod/pods"


@pytest.fixture
async def mounted(tmp_path: Path) -> Path:
    """What Kubernetes mounts into a pod; the key of the certificate is beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kubernetes"]
    argv += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key"), "-out"]
    await asyncio.to_thread(subprocess.run, [*argv, str(tmp_path / "ca.crt")], check=True, capture_output=True)
    (tmp_path / "token").write_text("first")
    (tmp_path / "namespace").write_text("prod")
    return tmp_path


def server_of(kubeconfig: str) -> SplitResult:
    return urlsplit(json.loads(Path(kubeconfig).read_text())["clusters"][0]["cluster"]["server"])


async def first_list(api: Api) -> Objects:
    return await anext(api.followed(Listing(PODS, {})))


async def test_a_pod_asks_with_its_account_and_reads_a_renewed_token(
    mounted: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(mounted / "ca.crt", mounted / "key")
    async with kubernetes_api("pods", tmp_path_factory.mktemp("api"), tls=tls) as (stand_in, kubeconfig):
        server = server_of(kubeconfig)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", str(server.hostname))
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        await stand_in.put({"metadata": {"name": "a"}})
        async with connect(None, str(mounted)) as api:
            assert [pod["metadata"]["name"] for pod in await first_list(api)] == ["a"]
            stand_in.token = "second"
            with pytest.raises(ApiError) as refused:
                await first_list(api)
            assert (str(refused.value), refused.value.status) == ("the service account's token was refused (401)", 401)
            (mounted / "token").write_text("second\n")
            assert [pod["metadata"]["name"] for pod in await first_list(api)] == ["a"]


async def test_an_api_that_is_not_there_is_said_in_one_sentence(
    mounted: Path, unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(unused_tcp_port))
    async with connect(None, str(mounted)) as api:
        with pytest.raises(ApiError) as failed:
            await first_list(api)
    assert str(failed.value).startswith(f"the Kubernetes API at 127.0.0.1:{unused_tcp_port} fails: ")
    assert "\n" not in str(failed.value) and failed.value.status == 0
