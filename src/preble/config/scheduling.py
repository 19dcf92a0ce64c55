"""From prompt to replica: tokens, what the scheduler remembers, when it moves load, what is kept of its decisions."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from preble.config.knobs import about


class TokenizerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How prompts become token ids."""

    inline_bytes: Annotated[
        int,
        about(
            "Prompts up to this size are tokenized in the event loop where the fast tokenizer is in use.",
            unit="bytes",
            is_expert=True,
            why="16 KiB take about 0.1 ms there, about what handing them to a thread costs",
            ge=0,
        ),
    ] = 16 * 1024
    workers: Annotated[
        int,
        about(
            "Threads (fast tokenizer) or processes (`tokenizers`, which keeps the interpreter's lock) for the others.",
            unit="workers",
            is_expert=True,
            why="two keep a long prompt from delaying the short ones behind it",
            ge=1,
        ),
    ] = 2
    memory_mib: Annotated[
        int,
        about(
            "Memory for token ids of pieces of prompts (a sixteenth of it is for decoded tools): known beginnings are"
            " not tokenized again. 0 turns it off.",
            unit="MiB",
            why="holds about 30 MB of text, which is 7 million tokens",
            ge=0,
        ),
    ] = 64
    send_ids: Annotated[
        bool,
        about(
            "Send vLLM and SGLang token ids in place of a completion's text, if the parity check finds equal answers.",
            why="the engine then does not tokenize the text again",
        ),
    ] = True
    chat_template: Annotated[
        str | None,
        about("File with a chat template to use instead of the model's.", why="use the same one as the engines"),
    ] = None


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler remembers and expects."""

    window_s: Annotated[
        float,
        about(
            "H: the time over which a replica's load and a prefix's popularity are counted.",
            unit="s",
            why="the paper's three minutes",
            gt=0,
        ),
    ] = 180.0
    report_grace_s: Annotated[
        float,
        about(
            "Time after a request's end for the KV events of what it stored to arrive.",
            unit="s",
            is_expert=True,
            why="they take milliseconds; a busy event loop may take longer",
            ge=0,
        ),
    ] = 1.0
    belief_ttl_s: Annotated[
        float,
        about(
            "How long an unused prefix counts as cached on a replica without KV events.",
            unit="s",
            is_expert=True,
            why="prefixes that are used less often are mostly evicted",
            gt=0,
        ),
    ] = 600.0
    index_budget_mib: Annotated[
        int,
        about(
            "Memory of the prefix index. At the limit it forgets the least recently used prefixes, then adds no more.",
            unit="MiB",
            why="holds some 45 million tokens of replicas with KV blocks of 16 tokens, 30 million with pages of 1",
            ge=1,
        ),
    ] = 256
    refit: Annotated[
        bool,
        about(
            "Correct the cost profile from live requests, by a factor for prefill and one for decode.",
            why="a profile that is off by a factor of two is right after a minute or two (docs/decisions/0006)",
        ),
    ] = True
    learned_file: Annotated[
        str | None,
        about(
            "File that keeps over a restart what was learned: the lengths of answers by prefix, and the correction of "
            "the cost profile. It has digests of prompts, no text. One gateway, one file.",
            why="only an operator knows a folder that outlives the process",
        ),
    ] = None


class DecisionsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of placements for questions (`/debug`, `preble explain`) and replays (`preble replay`)."""

    remembered: Annotated[
        int,
        about(
            "Decisions kept in memory; fewer on a cluster of more than 25 replicas.",
            unit="decisions",
            why="minutes of a busy gateway in tens of MB",
            ge=1,
        ),
    ] = 10_000
    log: Annotated[
        str | None,
        about(
            "File for the decision log, new at each start; the previous one is kept as FILE.1. "
            "**It holds the token ids of every prompt.**",
            why="prompts are private unless an operator decides otherwise",
        ),
    ] = None
    log_tokens: Annotated[
        Literal["renamed", "plain"],
        about(
            "`renamed`: a secret permutation, stored nowhere, replaces the token ids, so that nobody can look the text "
            "up; the log still replays.",
            why="prompts need not be readable for a replay",
        ),
    ] = "renamed"
    log_max_mib: Annotated[int, about("Size at which a log ends.", unit="MiB", why="the disk has other uses", ge=1)] = (
        1024
    )
