"""The commands of pages, run in a shell in the order in which each page prints them, before emulated replicas.

Files that a page shows (their first line is their name, as a comment) are written first. Only addresses and folders of
the system are replaced: those of the gateway and of replicas by what runs here. What starts an engine or installs
something is left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from _pytest.mark import ParameterSet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cli.test_end_to_end import linux_only
from preble.engines.starting.ports import free_ports
from support.commands import MARK, Running, marked_processes
from support.servers import require_server
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(console|sh)$\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"^```\w*$\n(# (\S+\.(?:py|toml))\b.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("preble ", "curl ", "for ", "BODY=", "G=", "eval ", "PREBLE_AUTH__", "PREBLE_TRACING__")
RUN += (
    "nats-server ",
    "envoy ",
    "sed ",
    "cp deploy/",
    "systemctl ",
    "_PREBLE_COMPLETE=fish",
    "python my_",
    "python examples/",
)
ELSEWHERE = (
    "pip ",
    "git ",
    "python3 ",
    "python -m ",
    "python benchmarks/",
    ". ",
    "vllm ",
    "make ",
    "PREBLE_QUEUE_ORDER=",
    "/opt/",
)
ELSEWHERE += ("docker ", "helm ", "preble epp --pool", "nats-server -c")
"""Beginnings of what needs an engine, a GPU, a cluster or an installation of its own."""
SERVERS = re.compile(r"(PREBLE_\w+=\S+ )?preble (up|serve|select|epp) ")
NEIGHBOURS = {"nats-server ": 4222, "envoy ": 8080, "python my_server.py": 9000, "python spans.py": 4318}
"""Beginnings of other servers, and the port that each page has for it."""
ON_EACH = "# on each of the hosts"
ASKING = ("preble explain", "preble check")
"""They ask port 8000 if they are not told another."""
GATEWAY = "preble serve --replica http://gpu1:8000 --replica http://gpu2:8000"
ASK = """curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -H 'X-Request-Id: {}' \
-d '{{"prompt": "Once upon a time", "max_tokens": 2}}'"""
LOG = "preble simulate --workload toolbench --requests 130 --rps 12 --replicas 2 --decision-log {}.jsonl".format
[STARTED_BY_SYSTEMD] = re.findall(
    r"^ExecStart=(.+)$", (ROOT / "deploy" / "systemd" / "preble.service").read_text(encoding="utf-8"), re.MULTILINE
)
SPANS = ("/v1/completions", "tokenize", "queue", "place", "replica", "first token", "preble.candidates.replica_id")
COLLECTOR = """
import http.server, sys

class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        with open("spans", "ab") as file:
            file.write(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Collector).serve_forever()
"""


class Walk(NamedTuple):
    """A page. `before`: what its reader has done already. `after`: what its reader sees then.

    `settings`: of the gateway, by environment variable. `renamed`: other replacements. `ports`: those of the page that
    free ones replace. `needs`: programs of others, by their environment.
    """

    page: str
    before: tuple[str, ...] = ()
    settings: Mapping[str, str] = {}
    renamed: Mapping[str, str] = {}
    after: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    needs: Mapping[str, str] = {}


ASKED = ("5f3a9c01-1a", "d247d7dd-75", "9c2f66f0-12")
WALKS = (
    Walk(
        "README.md",
        renamed={
            "curl -i": "curl -i -H 'X-Request-Id: ID'",
            "my-log.jsonl": "toolbench --requests 20",
            "preble compare ": "preble compare --requests 20 ",
        },
    ),
    Walk("docs/index.md", renamed={"curl -i": "curl -i -H 'X-Request-Id: ID'"}),
    Walk(
        "docs/howto/targets.md",
        renamed={"--rps auto --load 0.8,1.1": "--rps 5 --requests 20"},
        after=("curl -s http://127.0.0.1:8000/metrics | grep 'preble_targets_total.*outcome=\"kept\"'",),
    ),
    Walk("docs/quickstart.md", renamed={"--requests 100": "--requests 20"}),
    Walk(
        "docs/howto/deploying.md",
        (
            "mkdir -p etc/systemd/system",
            "printf '[alice]\\nsha256 = \"%s\"\\n' $(printf KEY | sha256sum | cut -c-64) > etc/preble/keys.toml",
        ),
        renamed={
            "systemctl enable --now preble.socket preble": STARTED_BY_SYSTEMD,
            "systemctl kill --signal=USR2 --kill-whom=main preble": "kill -USR2 $served",
            "/opt/preble/bin/": "",
            "/etc/": "etc/",
            "10.0.0.6:8000": "gpu1:8000",
            "| source": "| grep -q complete",
        },
        after=(
            "wait $served  # the first gateway ends once its successor serves",
            f"{ASK.format('upgraded')} -H 'Authorization: Bearer KEY' -H 'Connection: close'",
            "! curl -s http://127.0.0.1:8000/v1/models",
            "complete -p preble",
        ),
    ),
    Walk("docs/howto/explain.md", (GATEWAY, *map(ASK.format, ASKED), LOG("decisions"))),
    Walk("docs/howto/fleet.md", (GATEWAY,), {"PREBLE_AUTH__ADMIN_KEYS": "ADMIN_KEY"}),
    Walk(
        "docs/howto/migrating.md",
        ("preble workload make toolbench --requests 100 --out your-log.jsonl.gz",),
    ),
    Walk(
        "docs/howto/kubernetes-gateway.md",
        settings={"PREBLE_PICKER__PORT": "9002"},
        renamed={
            "10.0.0.5:8000": "gpu1:8000",
            "10.0.0.6:8000": "gpu2:8000",
            "10.0.0.5, port_value: 8000": "GPU1",
            "10.0.0.6, port_value: 8000": "GPU2",
            "-c envoy.yaml": "-c envoy.yaml --disable-hot-restart --concurrency 1 --log-level warn",
        },
        after=("curl http://127.0.0.1:8000/metrics | grep '^preble_finished_total.*ok.* 1'",),
        ports=(8080, 9901, 9002),
        needs={"envoy": "envoy"},
    ),
    Walk("docs/howto/own-engine.md", renamed={"my-model": "MODEL"}, ports=(9000,)),
    Walk("docs/howto/parity.md", (f"{GATEWAY} --tokenizer MODEL",)),
    Walk(
        "docs/howto/ray-serve.md",
        settings={
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'examples' / 'ray_serve'}",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        },
        renamed={"ray_example.py": "ray_example.py --requests 40"},
        needs={"ray": "python"},
    ),
    Walk(
        "docs/howto/selection-service.md",
        settings={"PREBLE_AUTH__ADMIN_KEYS": "ADMIN_KEY", "PREBLE_AUTH__API_KEYS": "CLIENT-KEY"},
        renamed={"/select_and_reserve": '/select_and_reserve -H "Authorization: Bearer $KEY"'},
    ),
    Walk(
        "docs/howto/several-gateways.md",
        ('echo \'replicas = ["http://gpu1:8000", "http://gpu2:8000"]\' > preble.toml',),
        renamed={"-a 10.0.0.5": "-a 127.0.0.1 -p 4222", "10.0.0.5:4222": "127.0.0.1:4222"},
        after=(
            "until curl http://127.0.0.1:8000/metrics | grep '^preble_peers 1'; do sleep 0.1; done",
            "until curl http://127.0.0.1:$other/metrics | grep '^preble_peers 1'; do sleep 0.1; done",
        ),
        ports=(4222,),
        needs={"nats": "nats-server"},
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
        ("echo 'replicas = [\"http://gpu1:8000\"]' > preble.toml", "python spans.py 4318"),
        renamed={"collector:4318": "127.0.0.1:4318"},
        after=(
            ASK.format("traced").replace("{", '{"stream": true, '),
            "stop  # then it sends its spans",
            *(f"grep -aq '{span}' spans" for span in SPANS),
        ),
        ports=(4318,),
    ),
    Walk("docs/howto/troubleshooting.md", (f"{GATEWAY} --tokenizer MODEL",)),
    Walk("docs/howto/vllm.md"),
)


def marked(walk: Walk) -> ParameterSet:
    marks = [getattr(pytest.mark, name) for name in walk.needs if name in {"envoy", "ray"}]
    return pytest.param(walk, id=Path(walk.page).stem, marks=marks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's tokenizer."""
    made = tmp_path_factory.mktemp("pages") / "MODEL"
    made.mkdir()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(made / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    config = {"chat_template": template + "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"}
    (made / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A reader's folder: the model, parts of a checkout, and settings of curl by which an error is a failure."""
    (tmp_path / ".curlrc").write_text("fail-with-body\n", encoding="utf-8")
    (tmp_path / "spans.py").write_text(COLLECTOR, encoding="utf-8")
    (tmp_path / "MODEL").symlink_to(model)
    for name in ("deploy", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture(scope="module")
def replicas(model: Path) -> Iterator[list[str]]:
    """The addresses of three emulated replicas."""
    options = ("--profile", "tiny-cpu", "--port", "0", "--model", "MODEL", "--tokenizer", "MODEL")
    started = [Running("emulate", *options, cwd=model.parent) for _ in range(3)]
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


def files(page: str) -> dict[str, str]:
    """Return the files that a page shows, by name. A second one with the same name is a variant."""
    found: dict[str, str] = {}
    for text, name in FILE.findall(page):
        found.setdefault(name, text)
    return found


def places(walk: Walk, replicas: list[str], port: int) -> dict[str, str]:
    """Return what replaces what in a page."""
    free = free_ports(len(walk.ports) + 1)
    return {
        **walk.renamed,
        **{str(printed): str(free) for printed, free in zip(walk.ports, free, strict=False)},
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "127.0.0.1:8092": f"127.0.0.1:{port}",
        "--port 8092": "",
        **{f"http://gpu{number}:{old}": replicas[number - 1] for number in (1, 2) for old in (8000, 8100, 30000)},
        "http://gpu3:8000": replicas[2],
        "http://10.0.0.5:8000": replicas[2],
        **{
            f"GPU{number}": replicas[number - 1].removeprefix("http://").replace(":", ", port_value: ")
            for number in (1, 2)
        },
    }


def with_places(text: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text


def script(walk: Walk, replaced: Mapping[str, str], port: int) -> str:
    """Return the shell script of a page: servers in the background, each in place of the one before."""
    page = commands((ROOT / walk.page).read_text(encoding="utf-8"))
    assert [command for command in page if not command.startswith((*RUN, *ELSEWHERE))] == []
    [other] = free_ports(1)
    parts = [
        f"export PREBLE_PORT={port} KEY=ADMIN_KEY",
        f"set -eu -o pipefail; served=; other={other}",
        'stop() { [ -z "$served" ] || { kill $served 2> /dev/null; wait $served; } || true; served=; }',
        "trap 'stop; kill $(jobs -p) 2> /dev/null || true' EXIT",
    ]
    wanted = [command for command in page if command.startswith(RUN) and not command.startswith(ELSEWHERE)]
    for printed in (*walk.before, *wanted, *walk.after):
        command = with_places(printed, replaced)
        if command.startswith(ASKING) and not {"--url", "--log"} & set(command.split()):
            command = re.sub(r"^preble \w+", rf"\g<0> --url http://127.0.0.1:{port}", command)
        if SERVERS.match(command):
            command = re.sub(r"\s#.*", "", command)
            start = f"PREBLE_PORT=$other {command} &\n" if ON_EACH in printed else ""
            command = f"stop\n{start}{command} &\nserved=$!\nuntil preble ready; do kill -0 $served; done"
        for neighbour, listens in NEIGHBOURS.items():
            if printed.startswith(neighbour):
                command = f"{command.removesuffix('&')} &\n" + until_listens(replaced[str(listens)])
        parts += [f"echo {shlex.quote(printed.splitlines()[0])}", command]
    return "\n".join(parts)


def until_listens(port: str) -> str:
    return f"until (: < /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do kill -0 $!; done"


@linux_only
@pytest.mark.slow
@pytest.mark.parametrize("walk", [marked(walk) for walk in WALKS])
def test_the_commands_of_a_page_work_in_order(walk: Walk, replicas: list[str], folder: Path) -> None:
    programs = [require_server(name, program).parent for name, program in walk.needs.items()]
    [port] = free_ports(1)
    replaced = places(walk, replicas, port)
    for name, text in files((ROOT / walk.page).read_text(encoding="utf-8")).items():
        file = folder / with_places(name, replaced)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(with_places(text, replaced), encoding="utf-8")
    mark, log = uuid.uuid4().hex, folder / "walk.log"
    try:
        with log.open("w") as file:  # no pipe: the successor of an upgraded gateway would keep it open
            ran = subprocess.run(
                ["bash", "-c", script(walk, replaced, port)],
                cwd=folder,
                env={
                    **os.environ,
                    **{name: with_places(value, replaced) for name, value in walk.settings.items()},
                    MARK: mark,
                    "CURL_HOME": str(folder),
                    "PATH": ":".join(map(str, (*programs, Path(sys.executable).parent, os.environ["PATH"]))),
                },
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=4 * PATIENCE_S,
                check=False,
            )
    finally:
        for pid in marked_processes(mark):  # the successor is nobody's job
            os.kill(pid, signal.SIGTERM)
    assert ran.returncode == 0, log.read_text(encoding="utf-8", errors="replace")[-3000:]
