"""A stand-in for the `vllm` program in tests of starting and stopping: HTTP, and the bad habits of real engines.

Run as `fake_vllm.py serve MODEL --port P ...`; what it does is the MODEL's name: `healthy`, `dies`, `never-ready`,
`refuses` (its arguments), `stubborn` (ignores SIGTERM). As engines do, each starts a child process
and leaves a socket in the temporary folder.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(503 if behaviour == "never-ready" else 200)
        self.end_headers()


behaviour = sys.argv[2].rpartition("/")[2]
port = int(sys.argv[sys.argv.index("--port") + 1])
if behaviour == "dies":
    print("loading weights")
    sys.exit("out of memory, says the engine")
if behaviour == "refuses":
    print("vllm: error: unrecognized arguments", file=sys.stderr)
    sys.exit(2)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
left = f"{tempfile.gettempdir()}/socket"
socket.socket(socket.AF_UNIX).bind(left)
print(f"socket {left}")
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print(f"child {child.pid}", flush=True)
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
