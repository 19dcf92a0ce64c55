"""Run one program, and see to it that nothing of it is left behind. Standard library only; run as a script.

    python -I -S guard.py GRACE_S PROGRAM [ARGUMENT...]

The program runs in a process group of its own, its output going to this process's stderr; its process id is the one
line on stdout. When this process's stdin ends, because the owner closed it or is no more, however it died, the group is
asked to end and after GRACE_S seconds killed. Exits as the program does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In the program, before it starts: be killed should even this guard be killed. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def stop_at_end_of_input(program: subprocess.Popen[bytes], grace_s: float) -> None:
    while os.read(0, 4096):
        pass
    signal_group(program.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(grace_s)
    signal_group(program.pid, signal.SIGKILL)


def main(argv: list[str]) -> int:
    # Ctrl-C in a terminal and polite requests are the owner's to act on: it closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grace_s, command = float(argv[0]), argv[1:]
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
        preexec_fn=prepare_program,  # noqa: PLW1509 (no thread runs yet)
    )
    print(program.pid, flush=True)
    threading.Thread(target=stop_at_end_of_input, args=(program, grace_s), daemon=True).start()
    status = program.wait()
    # Its own children (worker processes) may have outlived it.
    signal_group(program.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def prepare_program() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
