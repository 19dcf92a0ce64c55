"""The limit of open files, in a process of its own: it is the whole process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from preble.web.server.open_files import open_files_limit, raise_open_files_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
assert open_files_limit() == 100
raise_open_files_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
assert open_files_limit() > 100
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name limits that they do not grant")
def test_the_limit_is_raised_as_far_as_it_may_be() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
