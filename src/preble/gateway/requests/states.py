"""The life of a request with a JSON body as two tables of states: what may follow what. Tests check each step.

```
 the client's side            READING ─▶ PREPARING ─▶ CARRIED ─▶ STREAMING ─▶ OVER
                                              │          └──────▶ OWED ────────▲
                                              └───────────────────▲            │
                              any of them ─────────────────────────────────────┘

 each try at a replica        SENT ─▶ HELD ─▶ STREAMS ─▶ STREAMED
                                │      └──────────────▶ UNANSWERED
                                └───▶ WHOLE ─▶ ANSWERED, UNANSWERED
```
A request with one prompt has one try after the other; a list of prompts has those of each prompt, several at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType


class RequestState(Enum):
    """How far a request is, as its client sees it."""

    READING = auto()
    """Its body comes."""
    PREPARING = auto()
    """It is parsed, admitted, tokenized and placed."""
    CARRIED = auto()
    """Replicas have it, and the client has nothing of the answer."""
    STREAMING = auto()
    """The client gets a stream."""
    OWED = auto()
    """The answer is written as a whole, and the client has not read most of it: it takes memory."""
    OVER = auto()
    """It has given back all that it took."""


class AttemptState(Enum):
    """How far one try at a replica is."""

    SENT = auto()
    """The replica has it, and has answered nothing."""
    WHOLE = auto()
    """The answer comes, and will be passed on as a whole."""
    HELD = auto()
    """A stream comes; its beginning is kept until the prefill is over, so that the request can still move."""
    STREAMS = auto()
    """The stream goes to the client. The request cannot move any more."""
    UNANSWERED = auto()
    """There is no answer: the replica failed, or nobody wants it."""
    ANSWERED = auto()
    """The answer is complete, in `Attempt.body`; it may be an error."""
    STREAMED = auto()
    """The stream has ended, or was broken off."""


State = RequestState | AttemptState
R, A = RequestState, AttemptState
NEXT: Mapping[State, Mapping[State, str]] = MappingProxyType(
    {
        R.READING: {
            R.PREPARING: "the body is complete",
            R.OVER: "it is refused, its body is late, or its client has gone",
        },
        R.PREPARING: {
            R.CARRIED: "it goes to a replica",
            R.OWED: "the gateway answers it itself, and the client reads slowly",
            R.OVER: "the gateway answers it itself, refuses it or fails, or it is stopped",
        },
        R.CARRIED: {
            R.STREAMING: "a stream begins",
            R.OWED: "a whole answer is written, and the client reads slowly",
            R.OVER: "the answer is written, no replica answers, or it is stopped",
        },
        R.STREAMING: {R.OVER: "the stream has ended, or it is stopped"},
        R.OWED: {R.OVER: "the client has read most of it, or has gone"},
        R.OVER: {},
        A.SENT: {
            A.WHOLE: "the head says that the answer comes as a whole, or is an error",
            A.HELD: "the head of a stream",
            A.UNANSWERED: "the replica cannot be reached or is silent, or it is aborted",
        },
        A.WHOLE: {
            A.ANSWERED: "the answer is complete",
            A.UNANSWERED: "it breaks off, is too large or none of the endpoint, or it is aborted",
        },
        A.HELD: {
            A.STREAMS: "the first token, or a stream without one is complete",
            A.UNANSWERED: "it breaks off, begins with an error or is no stream, or it is aborted",
        },
        A.STREAMS: {A.STREAMED: "it is complete, breaks off, or is aborted"},
        A.UNANSWERED: {},
        A.ANSWERED: {},
        A.STREAMED: {},
    }
)
"""What may follow each state, and when."""
ENDS = frozenset(state for state, after in NEXT.items() if not after)
"""Nothing follows these."""
