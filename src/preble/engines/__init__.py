"""Adapters for the programs that Preble calls (vLLM, SGLang, any OpenAI-compatible server), and the emulator.

`connect(url)` gives a server, whose `probe` gives the client of the replica there. `Engine` is what every client can
do, and the base class of your own adapter (docs/howto/own-engine.md).
"""

from __future__ import annotations

from preble.engines.adapter import Engine, EngineInfo, EngineLoad, ModelNames
from preble.engines.awaited import AwaitedAnswer
from preble.engines.http import HttpClient, HttpTimeouts
from preble.engines.kv_sockets import KvEventEndpoints
from preble.engines.server import EngineServer, Found, connect
from preble.web.client.pool import Ongoing, Receiver

__all__ = [
    "AwaitedAnswer",
    "Engine",
    "EngineInfo",
    "EngineLoad",
    "EngineServer",
    "Found",
    "HttpClient",
    "HttpTimeouts",
    "KvEventEndpoints",
    "ModelNames",
    "Ongoing",
    "Receiver",
    "connect",
]
