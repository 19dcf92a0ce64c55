"""Adapters for the programs that Preble calls (vLLM, SGLang, any OpenAI-compatible server), and the emulator.

`connect(url)` gives a server, whose `probe` gives the client of the replica there. `Engine` is what every client can
do, and the base class of your own adapter (docs/howto/own-engine.md).
"""

from __future__ import annotations

from preble.engines.adapter import Engine as Engine
from preble.engines.adapter import EngineInfo as EngineInfo
from preble.engines.adapter import EngineLoad as EngineLoad
from preble.engines.adapter import ModelNames as ModelNames
from preble.engines.awaited import AwaitedAnswer as AwaitedAnswer
from preble.engines.http import HttpClient as HttpClient
from preble.engines.http import HttpTimeouts as HttpTimeouts
from preble.engines.kv_events.sockets import KvEventEndpoints as KvEventEndpoints
from preble.engines.server import EngineServer as EngineServer
from preble.engines.server import Found as Found
from preble.engines.server import connect as connect
from preble.web.client.pool import Ongoing as Ongoing
from preble.web.client.pool import Receiver as Receiver
