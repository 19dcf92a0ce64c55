"""The command line as users meet it: help, one line for what is wrong, exit statuses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from preble import __version__
from preble.build import commit
from preble.cli import COMMANDS, cli
from preble.cli.failure import as_click_exception
from preble.cli.output import write_result
from preble.cli.workload_options import WORKLOAD_HELP
from preble.config import GatewayConfig, GroupConfig, PeersConfig, TracingConfig
from preble.errors import ConfigError, EngineGone, NoReplicaError, PrebleError, TraceFormatError
from preble.lab.workloads import workload_names
from preble.serving import check_settings
from support.waiting import PATIENCE_S

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"

NOWHERE = "http://127.0.0.1:1"


def preble(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str) -> None:
    result = preble(name, "--help")
    assert result.exit_code == 0
    assert f"preble {name}" in result.stdout.split("Example")[1]


def test_the_groups_help_lists_every_command() -> None:
    listing = preble("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in listing, name


def test_the_version_is_shown() -> None:
    assert preble("--version").stdout == f"preble, version {__version__} (commit {commit()})\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "No such command 'nope'"),
        (["serv"], "No such command 'serv'. Did you mean 'serve'?"),
        (["version"], "No such command 'version'. Did you mean '--version'?"),
        (["bench", "--url", NOWHERE, "--rps", "many"], "'many' is not a valid number"),
        (["--nope"], "No such option '--nope'"),
        (["serve", "--replcia", "http://a"], "No such option '--replcia'."),
        (["serve", "--replica", "gpu1"], "'gpu1' is not a URL of a server"),
        (["serve", "--replica", "http://gpu1:99999"], "is not a URL"),
        (["serve", "--replica", "http://gpu1?x=1"], "query or fragment"),
        (["serve", "--policy", "best"], "unknown policy 'best'"),
        (["serve", "--port", "70000"], "70000 is not in the range"),
        (["serve"], "no replica given"),
        (["up", "--engine", "emulator", "--profile", "nope"], "no profile is called 'nope'"),
        (["up", "--engine", "emulator", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["serve", "--config", "missing.toml"], "missing.toml"),
        (["emulate", "--port", "0"], "Missing option '--profile'"),
        (["bench", "--url", NOWHERE, "--rps", "0"], "--rps"),
        (["bench", "--url", NOWHERE, "--rps", "nan"], "'nan' is not a number"),
        (["bench", "--url", NOWHERE, "--rps", "inf"], "'inf' is not a number"),
        (["bench", "--url", NOWHERE, "--workload", "nope", "--rps", "1"], "neither a file nor one of: agent"),
        (["bench", "--url", NOWHERE, "--workload", "tool_use+video"], "give a rate (--rps)"),
        (["bench", "--url", NOWHERE, "--rps", "1", "--requests", "1"], f"nothing answers at {NOWHERE}"),
        (["profile", "--url", NOWHERE, "-o", "profile.json"], "cannot be reached"),
        (["explain", "some-id", "--url", NOWHERE], "Connection refused; is a gateway running there (--url)?"),
        (["check", "--url", NOWHERE], "Connection refused; is a gateway running there (--url)?"),
        (["workload", "study", "video", "--json", "-", "--html", "-"], "only one of --json and --html"),
        (["explain", "some-id", "--url", NOWHERE, "--log", "decisions.jsonl"], "--url or --log, not both"),
        (["simulate", "--rps", "1", "--decision-log", "-"], "a decision log needs a file"),
    ],
)
def test_what_is_wrong_gets_one_line_on_stderr_and_status_2(arguments: list[str], says: str) -> None:
    result = preble(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr


OUTPUTS = {
    "bench --url http://127.0.0.1:1 --rps 1": ("--json", "--plot"),
    "check": ("--json",),
    "compare --rps 5": ("--json", "--html"),
    "explain some-id": ("--json",),
    "profile --url http://127.0.0.1:1": ("--output", "--plot", "--raw", "--json"),
    "replay decisions.jsonl": ("--json",),
    "simulate --rps 5": ("--json", "--decision-log"),
    "workload make video": ("--out",),
    "workload study video": ("--json", "--html"),
}


@pytest.mark.parametrize("command", [command for command, options in OUTPUTS.items() if "--json" in options])
def test_json_takes_a_file_in_every_command(command: str) -> None:
    result = preble(*command.split(), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--json" in result.stderr and "it takes a file, or - for stdout" in result.stderr


@pytest.mark.parametrize(
    ("command", "option"), [(command, option) for command, options in OUTPUTS.items() for option in options]
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, says in (("file", "is no folder"), ("missing", "make it first")):
        result = preble(*command.split(), option, str(tmp_path / folder / "result"))
        assert (result.exit_code, result.stdout) == (2, "")
        assert str(tmp_path / folder) in result.stderr and says in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.parametrize(
    "command", [command for command, options in OUTPUTS.items() if {"--plot", "--html"} & {*options}]
)
def test_a_drawing_is_refused_before_the_work_where_matplotlib_is_not_installed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    option = "--html" if "--html" in OUTPUTS[command] else "--plot"
    others = ("-o", str(tmp_path / "profile.json")) if command.startswith("profile") else ()
    result = preble(*command.split(), option, str(tmp_path / "drawing"), *others)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "preble: drawing needs matplotlib; install it with: pip install matplotlib\n"


def test_the_demonstration_is_refused_before_it_starts_where_matplotlib_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = preble("demo", "--engine", "emulator")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "preble: drawing needs matplotlib; install it with: pip install matplotlib\n"


def test_a_disk_that_is_full_is_noticed_before_the_work(tmp_path: Path) -> None:
    """In a process of its own, whose files may have no bytes."""
    process = subprocess.run(
        [sys.executable, "-B", "-m", "preble", "simulate", "--rps", "5", "--json", str(tmp_path / "result.json")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stdout) == (2, "")
    assert f"{tmp_path} takes no file: File too large" in process.stderr
    assert len(process.stderr.splitlines()) == 1, process.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_logs_that_cannot_be_made_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "logs"
    result = preble("up", "--engine", "emulator", "--transfer", "p2p", "--port", "0", "--log-dir", str(folder))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"preble: cannot write {folder / 'profile.json'}: Not a directory; give another --log-dir\n"


def test_a_demonstration_whose_results_cannot_be_written_is_refused_before_it_starts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    (tmp_path / "result.json").mkdir()
    result = preble("demo", "--engine", "emulator", "--out", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "result.json' is a directory" in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_what_a_file_does_not_take_is_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"^cannot write {tmp_path}: .*; it is on stdout instead$"):
        write_result(tmp_path, b'{"took": "hours"}')
    assert capsys.readouterr().out == '{"took": "hours"}\n'


def test_ctrl_c_while_the_command_line_is_imported_shows_no_traceback() -> None:
    pyproject = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
    module, _, function = pyproject["project"]["scripts"]["preble"].partition(":")
    code = (
        "import sys\n"
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Slow())\n"
        f"from {module} import {function}\n{function}()\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")


def test_the_help_of_workloads_names_every_one() -> None:
    listed = WORKLOAD_HELP.rpartition(": ")[2].rstrip(".").split(", ")
    assert listed == list(workload_names())


def test_a_bad_trace_is_named_with_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"kind": "trace", "version": 1, "name": "t"}\n{"kind": "what"}\n')
    result = preble("bench", "--url", NOWHERE, "--workload", str(trace))
    assert (result.exit_code, result.stderr.split(": ")[1]) == (2, f"{trace}:2")


@pytest.mark.parametrize(
    ("error", "status"),
    [(ConfigError("x"), 2), (TraceFormatError("x"), 2), (NoReplicaError("x"), 1), (EngineGone("x"), 1)],
)
def test_errors_raised_on_purpose_have_their_status(error: PrebleError, status: int) -> None:
    failure = as_click_exception(error)
    assert failure is not None
    assert failure.exit_code == status


def test_a_group_of_errors_raised_on_purpose_shows_its_first() -> None:
    failure = as_click_exception(
        ExceptionGroup("g", [EngineGone("first"), ExceptionGroup("h", [ConfigError("second")])])
    )
    assert failure is not None
    assert failure.message == "first"


@pytest.mark.parametrize("bug", [KeyError("x"), ExceptionGroup("g", [ConfigError("x"), KeyError("x")])])
def test_a_bug_is_not_taken_for_a_failure(bug: Exception) -> None:
    assert as_click_exception(bug) is None


class CompletionHandler(BaseHTTPRequestHandler):
    """The least that `preble bench` needs of an endpoint; /v1/completions waits while `hold` is clear."""

    hold = threading.Event()
    asked = threading.Event()
    key = ""
    """Of the last question, with how it is to be read."""

    refuses = 0
    """How many completions are refused before one is answered."""

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "m"}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).key = self.headers.get("authorization", "")
        type(self).asked.set()
        self.hold.wait(60)
        if type(self).refuses:
            type(self).refuses -= 1
            return self._answer(b'{"error": {"message": "not served here"}}', 404)
        self._answer(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    CompletionHandler.hold.set()
    CompletionHandler.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), CompletionHandler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        CompletionHandler.hold.set()
        server.shutdown()
        thread.join()


def bench_arguments(endpoint: str, *more: str) -> list[str]:
    return ["bench", "--url", endpoint, "--rps", "500", "--requests", "5", *more]


def test_bench_puts_json_on_stdout_and_talk_on_stderr(endpoint: str) -> None:
    result = preble(*bench_arguments(endpoint, "--json", "-", "--seed", "9"))
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert (shown["summary"]["requests"], shown["summary"]["errors"], shown["partial"]) == (5, 0, False)
    assert (shown["settings"]["plan"]["seed"], shown["settings"]["url"]) == (9, endpoint)
    assert "5/5 requests" in result.stderr


def test_bench_shows_a_table_and_writes_every_record(endpoint: str, tmp_path: Path) -> None:
    result = preble(*bench_arguments(endpoint, "--json", str(tmp_path / "result.json")))
    assert result.exit_code == 0, result.stderr
    assert "TTFT mean" in result.stdout
    assert len(json.loads((tmp_path / "result.json").read_text())["records"]) == 5


def test_a_key_may_come_from_the_environment(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREBLE_API_KEY", "secret")
    assert preble(*bench_arguments(endpoint)).exit_code == 0
    assert CompletionHandler.key == "Bearer secret"


@pytest.mark.parametrize("name", ["bench", "check", "explain", "profile"])
def test_a_key_has_the_same_name_in_every_command(name: str) -> None:
    assert "[env var: PREBLE_API_KEY]" in " ".join(preble(name, "--help").stdout.split())


def test_bench_fails_when_a_request_failed(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionHandler, "refuses", 1)
    result = preble(*bench_arguments(endpoint))
    assert result.exit_code == 1
    assert "1 × status 404" in result.stdout
    assert "1 of 5 requests failed" in result.stderr


def test_check_at_a_replica_says_to_give_the_gateway(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionHandler, "refuses", 1)
    result = preble("check", "--url", endpoint)
    assert result.exit_code == 1
    assert "not served here; is that a Preble gateway? Give the gateway's address" in result.stderr


def test_a_default_workload_has_a_default_rate() -> None:
    result = preble("simulate", "--requests", "3")
    assert result.exit_code == 0, result.stderr


def test_an_interrupted_bench_says_partial_and_exits_130(endpoint: str) -> None:
    CompletionHandler.hold.clear()
    process = subprocess.Popen(
        [sys.executable, "-m", "preble", *bench_arguments(endpoint, "--json", "-")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert CompletionHandler.asked.wait(PATIENCE_S)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 130, stderr
    assert json.loads(stdout)["partial"] is True
    assert "partial" in stderr
    assert "Traceback" not in stderr


def test_a_bug_is_one_report_without_a_traceback() -> None:
    code = (
        "import preble.cli as c\n"
        "def broken(*_): raise RuntimeError('boom')\n"
        "c.LazyGroup.get_command = broken\n"
        "c.main()\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PREBLE_TRACEBACK"}
    process = subprocess.run(
        [sys.executable, "-c", code, "serve"], capture_output=True, text=True, env=environment, check=False
    )
    assert process.returncode == 1
    assert process.stderr.startswith("preble: internal error, RuntimeError: boom\n")
    assert "Traceback" not in process.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_a_full_disk_is_no_bug() -> None:
    with Path("/dev/full").open("wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "preble", "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (process.returncode, process.stderr) == (1, "preble: cannot write: No space left on device\n")


@pytest.mark.parametrize("group", [(), ("workload",)])
def test_the_help_of_a_group_imports_no_command(group: tuple[str, ...]) -> None:
    """So it is there within the time that a start of Python takes."""
    code = (
        "import sys\nfrom preble.cli import cli\n"
        f"cli.main([*{group}, '--help'], standalone_mode=False)\n"
        "print(*sorted(name for name in sys.modules if name.startswith('preble.')))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    of_groups = {"preble.cli", "preble.cli.failure", "preble.errors", *(f"preble.cli.{name}" for name in group)}
    assert set(process.stdout.splitlines()[-1].split()) == of_groups


def test_a_configuration_can_be_checked_without_serving(tmp_path: Path) -> None:
    file, keys = tmp_path / "preble.toml", tmp_path / "keys.toml"

    def check(text: str) -> tuple[int, str]:
        file.write_text(f'replicas = ["{NOWHERE}"]\n{text}')
        command = [sys.executable, "-m", "preble", "serve", "--check", "--config", str(file)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=PATIENCE_S)
        return run.returncode, run.stdout + run.stderr

    assert check("") == (0, f"{file} is usable\n")
    for text, says in [
        ('polcy = "e2"', "did you mean 'policy'"),
        ('policy = "mine:Policy"', "mine:Policy"),
        ('profile = "none"', "no profile is called 'none'"),
        ('tokenizer = "./none"', "tokenizer './none': no such folder"),
        (f'[auth]\nkeys_file = "{keys}"', str(keys)),
        ('[peers]\nservers = ["http://bus"]', "not a NATS URL"),
    ]:
        status, said = check(text)
        assert status == 2 and says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("setting", "module", "extra"),
    [
        ({"groups": (GroupConfig(dns="engines", port=8000),)}, "preble.discovery.dns", "dns"),
        ({"groups": (GroupConfig(pool="engines"),)}, "preble.discovery.kubernetes", "k8s"),
        ({"tracing": TracingConfig(endpoint="http://collector:4318/v1/traces")}, "opentelemetry.sdk.trace", "otel"),
        ({"peers": PeersConfig(servers=("nats://bus:4222",))}, "nats.aio.client", "ha"),
    ],
)
def test_a_check_misses_the_library_that_a_setting_needs(
    setting: dict[str, Any], module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_settings(GatewayConfig(replicas=(NOWHERE,), **setting))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"preble\[{extra}\]"):
        check_settings(GatewayConfig(replicas=(NOWHERE,), **setting))
