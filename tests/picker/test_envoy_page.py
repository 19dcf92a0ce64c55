"""The page's commands for Envoy alone: what they make is what `test_envoy.py` runs real Envoy with."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import click
import yaml

from preble.cli import cli
from support.envoy import envoy_config
from support.servers import ROOT

PAGE = (ROOT / "docs" / "howto" / "kubernetes-gateway.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## With Envoy alone")[1].split("\n## ")[0]
[COMMANDS] = re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
ENVOY = ROOT / "deploy" / "helm" / "preble" / "files" / "envoy.yaml"


def test_the_commands_fill_in_the_configuration_that_envoy_is_tested_with(tmp_path: Path) -> None:
    [fill_in] = re.findall(r"^sed .*?envoy\.yaml$", COMMANDS, re.DOTALL | re.MULTILINE)
    subprocess.run(fill_in.replace("> envoy.yaml", f"> {tmp_path}/envoy.yaml"), shell=True, check=True, cwd=ROOT)
    made = (tmp_path / "envoy.yaml").read_text(encoding="utf-8")
    assert made == envoy_config(8080, 9901, 9002, ["10.0.0.5:8000", "10.0.0.6:8000"])
    assert yaml.safe_load(made)["static_resources"]["clusters"]


def test_the_picker_is_started_by_a_command_that_there_is() -> None:
    [start] = re.findall(r"^preble (.+)$", COMMANDS, re.MULTILINE)
    name, *arguments = shlex.split(start)
    found = cli.get_command(group := click.Context(cli, **cli.context_settings), name)
    assert found is not None
    assert found.make_context(name, arguments, parent=group).params["replicas"]


def test_the_page_lists_the_words_between_at_signs() -> None:
    rows = re.findall(r"^\| (`@.+?) \|", SECTION, re.MULTILINE)
    listed = {word for row in rows for word in re.findall(r"@([A-Z_]+)@", row)}
    assert listed == set(re.findall(r"@([A-Z_]+)@", ENVOY.read_text(encoding="utf-8")))
