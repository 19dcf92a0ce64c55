"""Run one program, and see to it that nothing of it is left behind. Standard library only; run as a script.

    python -I -S guard.py GRACE_S PROGRAM [ARGUMENT...]

The program runs in a process group of its own, its output going to this process's stderr; its process id is the one
line on stdout. When this process's stdin ends, because the owner closed it or is no more, however it died, the group is
asked to end and after GRACE_S seconds killed. Exits as the program does.

The program's temporary folder is one of its own, which goes when it has ended: engines leave their sockets there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REAP_S = 10.0
TIDY_S = 5.0
"""How long Python's own helpers may take to remove the shared memory of processes that were killed."""
TIDIES = b"multiprocessing.resource_tracker"
LEFT = "/dev/shm/sglang_loads_"
"""How the file begins in which SGLang shares its load. SGLang never removes it."""


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the process group alone has to do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value)


def signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def stop_at_end_of_input(program: subprocess.Popen[bytes], grace_s: float, left: set[str]) -> None:
    while os.read(0, 4096):
        pass
    # Of a program that has just been killed the descendants are ours.
    left.update(left_by(program.pid) | left_by(os.getpid()))
    signal_group(program.pid, signal.SIGTERM)
    try:
        program.wait(grace_s)
    except subprocess.TimeoutExpired:
        program.kill()  # the rest follows in `run`


def left_by(pid: int) -> set[str]:
    """Return the files that a process and its descendants have open, and will leave."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(descriptor.readlink()))
    found = {name for name in found if name.startswith(LEFT)}
    return found.union(*map(left_by, children(pid)))


def end_descendants() -> None:
    """Kill and reap what the program has left: as its subreaper, we have inherited even those that left its group.

    Python's resource trackers end by themselves once the others are gone; they are killed only after a while.
    """
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < REAP_S:
        for pid in children(os.getpid()):
            if waited_s < TIDY_S and is_tracker(pid):
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if reaped == 0:
            time.sleep(0.01)


def is_tracker(pid: int) -> bool:
    """Return whether a process removes the shared memory of others."""
    with contextlib.suppress(OSError):
        return TIDIES in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def children(parent: int) -> list[int]:
    """Return the processes that the first thread of one has started, if the kernel lists them."""
    with contextlib.suppress(OSError):
        listing = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        return [int(pid) for pid in listing.split()]
    return []


def main(argv: list[str]) -> int:
    # Ctrl-C in a terminal and polite requests are the owner's to act on: it closes our stdin.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory(prefix="preble-", ignore_cleanup_errors=True) as folder:
        return run(float(argv[0]), argv[1:], folder)


def run(grace_s: float, command: list[str], temporary_folder: str) -> int:
    """Run the program to its end, with `temporary_folder` as its own. Returns its exit status."""
    own_pid = os.getpid()
    program = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": temporary_folder},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        start_new_session=True,
        preexec_fn=lambda: prepare_program(own_pid),  # noqa: PLW1509 (no thread runs yet)
    )
    print(program.pid, flush=True)
    left: set[str] = set()
    threading.Thread(target=stop_at_end_of_input, args=(program, grace_s, left), daemon=True).start()
    status = program.wait()
    left |= left_by(own_pid)  # the descendants of a program that was killed
    end_descendants()
    for name in left:
        Path(name).unlink(missing_ok=True)
    signal_group(program.pid, signal.SIGKILL)  # what is not ours to reap, where there are no subreapers
    return status if status >= 0 else 128 - status


def prepare_program(guard_pid: int) -> None:
    """Prepare the program's process before it is the program: should even the guard be killed, the program goes with
    it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A guard that was killed before the line above took effect cannot be waited for any more.
    if os.getppid() != guard_pid:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
