"""Adapters for the programs that Preble calls (vLLM, SGLang, any OpenAI-compatible server), and the emulator.

`connect(url)` gives the client of a replica; `adapter.Engine` is what every client can do.
"""

from __future__ import annotations

from preble.engines.adapter import Engine, EngineInfo, EngineResponse
from preble.engines.detect import EngineKind, connect
from preble.engines.http import HttpTimeouts
from preble.engines.kv_sockets import KvEventEndpoints

__all__ = ["Engine", "EngineInfo", "EngineKind", "EngineResponse", "HttpTimeouts", "KvEventEndpoints", "connect"]
