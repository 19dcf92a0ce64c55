"""The commands of pages, run in a shell in the order in which each page prints them, before emulated replicas.

Only addresses are replaced: those of the gateway and of replicas by what runs here. What starts an engine or installs
something is left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cli.test_end_to_end import linux_only
from support.commands import Running
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(console|sh)$\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("preble ", "curl ", "for ", "G=", "eval ", "PREBLE_AUTH__", "PREBLE_TRACING__")
ELSEWHERE = ("pip ", "git ", "python", ". ", "vllm ", "make ", "PREBLE_QUEUE_ORDER=", "/opt/")
ELSEWHERE += ("cp deploy/", "systemctl ", "docker ", "helm ", "_PREBLE_COMPLETE=fish")
"""Beginnings of what needs an engine, a GPU or an installation of its own."""
SERVERS = re.compile(r"(PREBLE_\w+=\S+ )?preble (up|serve|select) ")
ASKING = ("preble explain", "preble check")
"""They ask port 8000 if they are not told another."""
GATEWAY = "preble serve --replica http://gpu1:8000 --replica http://gpu2:8000"
ASK = """curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -H 'X-Request-Id: {}' \
-d '{{"prompt": "Once upon a time", "max_tokens": 2}}'"""
LOG = "preble simulate --workload toolbench --requests 130 --rps 12 --replicas 2 --decision-log {}.jsonl".format


class Walk(NamedTuple):
    """A page. `before`: what its reader has done already. `settings`: of the gateway, by environment variable.
    `renamed`: other replacements."""

    page: str
    before: tuple[str, ...] = ()
    settings: Mapping[str, str] = {}
    renamed: Mapping[str, str] = {}


ASKED = ("5f3a9c01-1a", "d247d7dd-75", "9c2f66f0-12")
WALKS = (
    Walk("README.md", renamed={"curl -i": "curl -i -H 'X-Request-Id: ID'"}),
    Walk("docs/index.md", renamed={"curl -i": "curl -i -H 'X-Request-Id: ID'"}),
    Walk("docs/quickstart.md", renamed={"--requests 100": "--requests 20"}),
    Walk("docs/howto/deploying.md"),
    Walk("docs/howto/explain.md", (GATEWAY, *map(ASK.format, ASKED), LOG("decisions"))),
    Walk("docs/howto/fleet.md", (GATEWAY,), {"PREBLE_AUTH__ADMIN_KEYS": "ADMIN_KEY"}),
    Walk(
        "docs/howto/migrating.md",
        ("preble workload make toolbench --requests 100 --out your-log.jsonl.gz",),
    ),
    Walk("docs/howto/parity.md", (f"{GATEWAY} --tokenizer MODEL",)),
    Walk(
        "docs/howto/selection-service.md",
        settings={"PREBLE_AUTH__ADMIN_KEYS": "ADMIN_KEY", "PREBLE_AUTH__API_KEYS": "CLIENT-KEY"},
        renamed={"/select_and_reserve": '/select_and_reserve -H "Authorization: Bearer $KEY"'},
    ),
    Walk("docs/howto/sglang.md"),
    Walk(
        "docs/howto/sizing.md",
        ("preble workload make toolbench --requests 100 --out trace.jsonl.gz",),
        renamed={"--requests 5000": "--requests 100"},
    ),
    Walk("docs/howto/tenants.md", renamed={"serve ...": "serve --replica http://gpu1:8000"}),
    Walk(
        "docs/howto/tracing.md",
        ("echo 'replicas = [\"http://gpu1:8000\"]' > preble.toml",),
        renamed={"collector:4318": "127.0.0.1:9"},
    ),
    Walk("docs/howto/troubleshooting.md", (f"{GATEWAY} --tokenizer MODEL",)),
    Walk("docs/howto/vllm.md"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's tokenizer, and curl's own settings: an answer with an error is a failure."""
    made = tmp_path_factory.mktemp("pages")
    (made / ".curlrc").write_text("fail-with-body\n", encoding="utf-8")
    (made / "MODEL").mkdir()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(made / "MODEL" / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    config = {"chat_template": template + "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"}
    (made / "MODEL" / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[str]]:
    """The addresses of three emulated replicas."""
    options = ("--profile", "tiny-cpu", "--port", "0", "--model", "MODEL", "--tokenizer", "MODEL")
    started = [Running("emulate", *options, cwd=folder) for _ in range(3)]
    yield [one.wait_for(r"(http://127\.0\.0\.1:\d+)")[1] for one in started]
    for one in started:
        one.kill()


def commands(page: str) -> list[str]:
    """Return the commands of a page, without what they print."""
    found = []
    for kind, block in BLOCK.findall(page):
        lines = iter(block.splitlines())
        for line in lines:
            if kind == "console" and not line.startswith("$ "):
                continue
            command = line.removeprefix("$ ")
            while command.endswith("\\") or re.sub(r"\s#.*", "", command).count("'") % 2:
                command += "\n" + next(lines)
            found.append(command)
    return [command for command in found if command]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def script(walk: Walk, replicas: list[str]) -> str:
    """Return the shell script of a page: servers in the background, each in place of the one before."""
    page = commands((ROOT / walk.page).read_text(encoding="utf-8"))
    assert [command for command in page if not command.startswith((*RUN, *ELSEWHERE))] == []
    port = free_port()
    places = {
        **walk.renamed,
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "127.0.0.1:8092": f"127.0.0.1:{port}",
        "--port 8092": "",
    }
    places |= {f"http://gpu{number}:{old}": replicas[number - 1] for number in (1, 2) for old in (8000, 8100, 30000)}
    places |= {"http://gpu3:8000": replicas[2], "http://10.0.0.5:8000": replicas[2]}
    parts = ["set -eu -o pipefail", "stop() { kill $(jobs -p) 2>/dev/null || true; wait || true; }", "trap stop EXIT"]
    for printed in (*walk.before, *(command for command in page if command.startswith(RUN))):
        command = printed
        for old, new in places.items():
            command = command.replace(old, new)
        if command.startswith(ASKING) and not {"--url", "--log"} & set(command.split()):
            command = re.sub(r"^preble \w+", rf"\g<0> --url http://127.0.0.1:{port}", command)
        if SERVERS.match(command):
            command = re.sub(r"\s#.*", "", command)
            command = f"stop\n{command} &\nuntil preble ready; do kill -0 $!; done"
        parts += [f"echo {shlex.quote(printed.splitlines()[0])}", command]
    return "\n".join([f"export PREBLE_PORT={port} KEY=ADMIN_KEY", *parts])


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: Path(walk.page).stem)
def test_the_commands_of_a_page_work_in_order(walk: Walk, replicas: list[str], folder: Path) -> None:
    ran = subprocess.run(
        ["bash", "-c", script(walk, replicas)],
        cwd=folder,
        env={
            **os.environ,
            **walk.settings,
            "CURL_HOME": str(folder),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
