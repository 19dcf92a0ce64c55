"""Every error that Preble raises on purpose, and whose fault each one is.

```
PrebleError
├── ConfigError              the operator's: a flag, a file, an environment variable  exit 2
├── TraceFormatError         the operator's: a line of a trace, workload or decision log  exit 2
├── RequestError             the client's                                         4xx
│   ├── PromptTooLong        no replica can ever hold this prompt                 400
│   ├── UnknownModel         no replica serves this model                         404
│   ├── Quarantined          replicas have died of such a request                 400
│   ├── UnknownResponse      no replica has stored this response                  404
│   ├── BodyEncoded          the body is compressed                               415
│   ├── BodyTooLarge         the body is over the configured limit                413
│   ├── AnswerTooLarge       the answer, asked for in one piece, is over the limit 400
│   └── BodyTooSlow          the body did not arrive in time                      408
├── NoReplicaError           no replica can serve it now                          503 + Retry-After
├── Overloaded               too many requests wait                               429 + Retry-After
├── UnknownRequest           a bug in the driver: a request that is not in flight
├── PolicyError              a bug in the policy: it failed, or chose what is not a candidate
└── EngineError              the replica's
    ├── EngineRefused        no connection, or the replica said "not now"         502, may move
    ├── EngineGone           the connection broke                                 502, may move before 1st byte
    ├── EngineFailed         the replica answered with an error of its own (5xx)  its own status, may move
    ├── EngineTimeout        no answer in time                                    504
    └── EngineProtocolError  an answer that is not what the protocol says         502, may move before 1st byte
```

Anything else that escapes is a bug.
"""

from __future__ import annotations


class PrebleError(Exception):
    """Root of every error that Preble raises on purpose."""


class ConfigError(PrebleError):
    """A flag, configuration key, file or environment variable is wrong; the message says which and what to do."""


class TraceFormatError(PrebleError):
    """A trace, workload or decision log has a line that cannot be read; the message names file and line."""


class RequestError(PrebleError):
    """The client must change its request.

    `code` is the short machine-readable word in OpenAI's error object; `param` names the offending field.
    """

    status: int = 400
    code: str = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """The prompt does not fit into any replica's context or KV cache. See `prompt_too_long`."""

    code = "context_length_exceeded"


def prompt_too_long(num_tokens: float, most_tokens: float) -> PromptTooLong:
    """Return the error of a prompt with so many tokens, or more, where `most_tokens` fit.

    Clients shorten a chat where they find the words of OpenAI ("maximum context length") or of Anthropic ("prompt is
    too long: ..."), so every such error has both.

    >>> str(prompt_too_long(20008, 8192.0))[:49]
    'prompt is too long: 20008 tokens > 8192 maximum. '
    """
    most = f"{most_tokens:.0f}"
    return PromptTooLong(
        f"prompt is too long: {num_tokens:.0f} tokens > {most} maximum. This model's maximum context length is {most} "
        "tokens; shorten the prompt"
    )


class UnknownModel(RequestError):
    """No replica serves the model that the request names."""

    status = 404
    code = "model_not_found"


class Quarantined(RequestError):
    """Replicas have died of such a request, so it is refused for a while."""

    code = "request_quarantined"


class UnknownResponse(RequestError):
    """No replica has stored the response that the request names."""

    status = 404
    code = "response_not_found"


class BodyEncoded(RequestError):
    """The request body is compressed, which no engine reads either."""

    status = 415
    code = "unsupported_media_type"


class BodyTooLarge(RequestError):
    """The request body is larger than the gateway accepts."""

    status = 413
    code = "request_too_large"


class AnswerTooLarge(RequestError):
    """The client asked for more in one piece than the gateway keeps in memory."""

    code = "answer_too_large"


class BodyTooSlow(RequestError):
    """The client did not send the whole request body in time."""

    status = 408
    code = "request_timeout"


class NoReplicaError(PrebleError):
    """No replica can take this request now. `retry_after_s` is a hint for the client, in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(PrebleError):
    """Too many requests are waiting already. `retry_after_s` is a hint for the client, in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnknownRequest(PrebleError):
    """A driver named a request that is not in flight, or placed one twice: a bug in the driver."""


class PolicyError(PrebleError):
    """A policy failed, or chose a replica that may not get the request: a bug in the policy."""


class EngineError(PrebleError):
    """A replica failed. `replica_id`: which one, where it is known.

    `is_silent`: its machine sent nothing at all, not even a refusal. Requests that wait for it on open connections may
    wait in vain.
    """

    def __init__(self, message: str, *, replica_id: str | None = None, is_silent: bool = False) -> None:
        super().__init__(message)
        self.replica_id = replica_id
        self.is_silent = is_silent


class EngineRefused(EngineError):
    """The replica could not be reached, or refused the request. It has done no work."""


class EngineGone(EngineError):
    """The connection to the replica broke while it worked."""


class EngineFailed(EngineError):
    """The replica answered with an error of its own, a status of 500 or above."""


class EngineTimeout(EngineError):
    """The replica did not answer in time."""


class EngineProtocolError(EngineError):
    """The replica's answer violates the protocol."""
