"""Splits between two vLLM replicas with NIXL: one computes a prompt, the other one fetches its KV and decodes.

The two legs follow each other. The source gets the client's body with one token to generate, and answers with
`kv_transfer_params`. The target gets the client's body with these. They are used once, at once, for the same body, and
only if the source has answered within half its lease: vLLM 0.32 answers with a wrong text if it fetches what is another
prompt's by then, and ends if it fetches a shorter prompt's (docs/reference/engine-facts.md). Where anything is in doubt
the target gets the body as it is, and computes: no client sees that its source has failed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import structlog
from msgspec import Raw

from preble.core.types import PART_OF_LEASE
from preble.core.types.life import TRANSFER_FAILED, TransferFailed
from preble.engines.adapter import Engine
from preble.engines.json_fields import add_fields_before
from preble.engines.pairs import PairedEngine
from preble.errors import EngineError, EngineRefused
from preble.web.client.pool import Ongoing, Receiver
from preble.web.messages import HeaderList

NIXL = "nixl:"
"""Begins `Engine.kv_peer` of a replica with NIXL. The seconds of its lease follow."""
REST_S = 30.0
"""After a leg of its own that failed, a source computes no prompts for others for so long."""
MOST_ANSWER_BYTES = 4 * 1024 * 1024
"""Of a source's answer, which has the number of each block. A larger one is left."""

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_ONE_PROMPT = re.compile(rb'"|\[\s*\d')
"""How a text or a list of token ids begins, and a list of prompts does not."""
_NOT_SPLIT = ("echo", "prompt_logprobs", "suffix", "use_beam_search", "prompt_embeds", "mm_processor_kwargs")
"""Fields with which the target computes the prompt itself, or with which nobody has tried a split."""
_ALONE = ("n", "best_of")
_LEFT_OUT = ("stream_options", "min_tokens", "max_completion_tokens", "n", "best_of")
"""What the source's body does not have."""
_FALSE = (b"null", b"false")
_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_REMOTE_DECODE = Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')


class _ContentType(msgspec.Struct):
    type: str = "text"


class _Message(msgspec.Struct):
    content: str | list[_ContentType] | None = None


class _SourceUsage(msgspec.Struct):
    prompt_tokens: int = -1


class _SourceAnswer(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None
    usage: _SourceUsage | None = None


def may_split(path: str, body: bytes) -> bool:
    """Return whether each prompt of a request may be split; those of a list are asked one by one.

    >>> may_split("/v1/completions", b'{"prompt":["x","y"]}'), may_split("/v1/completions", b'{"prompt":"x","n":2}')
    (True, False)
    """
    try:
        fields = _OBJECT.decode(body)
        return _is_plain(fields) and (path == _COMPLETIONS or _is_one_text(path, fields))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False


def body_of_source(path: str, body: bytes) -> bytes | None:
    """Return what the source of a split is to compute; None for a request that must not be split.

    >>> body_of_source("/v1/completions", b'{"prompt":"x","max_tokens":9,"stream":true}')
    b'{"prompt":"x","max_tokens":1,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false}}'
    >>> body_of_source("/v1/completions", b'{"prompt":["x","y"]}')
    """
    try:
        fields = _OBJECT.decode(body)
        is_one = _is_one_text(path, fields)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if not is_one or not _is_plain(fields):
        return None
    cap = "max_completion_tokens" if path == _CHAT and "max_completion_tokens" in fields else "max_tokens"
    kept = {name: value for name, value in fields.items() if name not in _LEFT_OUT}
    if cap != "max_tokens":
        kept.pop("max_tokens", None)
    changes = {cap: Raw(b"1"), "stream": Raw(b"false"), "kv_transfer_params": _REMOTE_DECODE}
    return msgspec.json.encode(kept | changes)


def _is_plain(fields: Mapping[str, Raw]) -> bool:
    """Return whether nothing but the form of its prompt can be against a split."""
    return all(bytes(fields.get(name, Raw(b"null"))) in _FALSE for name in _NOT_SPLIT) and all(
        bytes(fields.get(name, Raw(b"1"))) in (b"1", b"null") for name in _ALONE
    )


def _is_one_text(path: str, fields: Mapping[str, Raw]) -> bool:
    """Return whether it is one prompt of text alone. Raises: MsgspecError."""
    if path == _COMPLETIONS:
        return _ONE_PROMPT.match(bytes(fields.get("prompt", Raw(b"")))) is not None
    if path != _CHAT:
        return False
    messages = msgspec.json.decode(fields.get("messages", Raw(b"")), type=list[_Message])
    parts = (part for message in messages if isinstance(message.content, list) for part in message.content)
    return all(part.type == "text" for part in parts)


class VllmPair(PairedEngine):
    """Two vLLM replicas with NIXL."""

    def begin(self, path: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> Ongoing:
        of_source = body_of_source(path, body)
        if of_source is None:
            self.tell(TRANSFER_FAILED)
            return self.decode.begin(path, body, headers, receiver)
        legs = _LegsInTurn(self, path, body, headers, receiver)
        legs.begin(of_source)
        return legs


class _LegsInTurn:
    """The source's leg and then the target's: an `Ongoing`, and the `Receiver` of the first."""

    def __init__(self, pair: VllmPair, path: str, body: bytes, headers: Mapping[str, str], receiver: Receiver) -> None:
        self._pair = pair
        self._path, self._body, self._headers = path, body, headers
        self._receiver: Receiver | None = receiver
        self._under_way: Ongoing | None = None
        self._late: asyncio.TimerHandle | None = None
        self._status, self._answer = 0, bytearray()
        self._is_paused = False

    def begin(self, of_source: bytes) -> None:
        """Send the first leg. Raises: EngineRefused: the target cannot be reached, nor the source."""
        within_s = PART_OF_LEASE * lease_s(self._pair.prefill)
        try:
            self._under_way = self._pair.prefill.begin(self._path, of_source, self._headers, self)
        except EngineRefused as error:
            self._under_way = self._pair.decode.begin(self._path, self._body, self._headers, self._passed_to())
            self._failed(str(error), TransferFailed(self._pair.prefill.replica_id))
        else:
            self._late = asyncio.get_running_loop().call_later(within_s, self._on_late, within_s)
            self._pair.on_loss(self.failed)

    def pause(self) -> None:
        self._is_paused = True
        if self._under_way is not None and self._late is None:
            self._under_way.pause()

    def resume(self) -> None:
        self._is_paused = False
        if self._under_way is not None:
            self._under_way.resume()

    def abort(self) -> None:
        self._receiver = None
        self._leave_source()

    def _leave_source(self) -> None:
        self._pair.on_loss(None)
        if self._late is not None:
            self._late.cancel()
            self._late = None
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.abort()

    def _passed_to(self) -> Receiver:
        assert self._receiver is not None
        return self._receiver

    def _on_late(self, within_s: float) -> None:
        self._give_up(f"no answer within {within_s:g} s, half its lease", is_busy=True)

    def _give_up(self, reason: str, *, is_busy: bool = False) -> None:
        """Let the target compute. `is_busy`: the source is not to blame; it has a queue."""
        self._leave_source()
        self._decode(self._body)
        self._failed(reason, TRANSFER_FAILED if is_busy else TransferFailed(self._pair.prefill.replica_id))

    def _failed(self, reason: str, fact: TransferFailed) -> None:
        """Let the source rest. To be called last: who hears of it may raise."""
        source, target = self._pair.prefill.replica_id, self._pair.decode.replica_id
        structlog.get_logger().warning("split_failed", replica=target, source=source, reason=reason)
        self._pair.prefill.rests_until = asyncio.get_running_loop().time() + REST_S
        self._pair.tell(fact)

    def _decode(self, body: bytes) -> None:
        receiver = self._receiver
        if receiver is None:
            return
        try:
            self._under_way = self._pair.decode.begin(self._path, body, self._headers, receiver)
        except EngineError as error:
            receiver.failed(error)
            return
        if self._is_paused:
            self._under_way.pause()

    # the source's leg

    def answered(self, status: int, headers: HeaderList) -> None:
        self._status = status

    def received(self, data: bytes) -> None:
        self._answer += data
        if len(self._answer) > MOST_ANSWER_BYTES:
            self._give_up(f"an answer of more than {MOST_ANSWER_BYTES} bytes")

    def ended(self) -> None:
        self._under_way = None
        if self._late is None:
            return  # given up before
        if 400 <= self._status < 500 and self._status != 429:  # so will the target: the request is at fault
            self._leave_source()
            self._decode(self._body)
            self._pair.tell(TRANSFER_FAILED)
            return
        params = self._params()
        if params is None:
            reason = f"an answer of status {self._status} with nothing to fetch"
            self._give_up(reason, is_busy=self._status in (429, 503))
            return
        self._leave_source()
        self._pair.kept_until = asyncio.get_running_loop().time() + lease_s(self._pair.prefill)
        self._decode(add_fields_before(self._body, {"kv_transfer_params": params}))

    def failed(self, error: EngineError) -> None:
        self._give_up(str(error))

    def _params(self) -> dict[str, Any] | None:
        """Return what the target is to fetch; None if it is not the whole prompt."""
        if self._status != 200:
            return None
        try:
            answer = msgspec.json.decode(self._answer, type=_SourceAnswer)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return None
        params, usage = answer.kv_transfer_params, answer.usage or _SourceUsage()
        if params is None or params.get("do_remote_prefill") is not True:
            return None
        return params if params.get("remote_num_tokens") == usage.prompt_tokens else None


def lease_s(engine: Engine) -> float:
    """Return how long a replica with NIXL keeps a prompt for another one; 0 for one without."""
    peer = engine.kv_peer or ""
    return float(peer.removeprefix(NIXL)) if peer.startswith(NIXL) else 0.0
