"""From prompt to replica: tokens, what the scheduler remembers, when it moves load, what is kept of its decisions."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from preble.config.knobs import NotNegative, OneOrMore, Positive, ZeroOrMore


class TokenizerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How prompts become token ids."""

    inline_bytes: ZeroOrMore = 16 * 1024
    """[bytes, expert] Prompts up to this size are tokenized in the event loop where the fast tokenizer is in use. Why:
    16 KiB take about 0.1 ms there, about what handing them to a thread costs."""
    workers: OneOrMore = 2
    """[workers, expert] Threads (fast tokenizer) or processes (`tokenizers`, which keeps the interpreter's lock) for
    the others. Why: two keep a long prompt from delaying the short ones behind it."""
    memory_mib: ZeroOrMore = 64
    """[MiB] Memory for token ids of pieces of prompts (a sixteenth of it is for decoded tools): known beginnings are
    not tokenized again. 0 turns it off. Why: holds about 30 MB of text, which is 7 million tokens."""
    send_ids: bool = True
    """Send vLLM and SGLang token ids in place of a completion's text, if the parity check finds equal answers. Why: the
    engine then does not tokenize the text again."""
    chat_template: str | None = None
    """File with a chat template to use instead of the model's. Why: use the same one as the engines."""


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the scheduler remembers and expects."""

    window_s: Positive = 180.0
    """[s] H: the time over which a replica's load and a prefix's popularity are counted. Why: the paper's three
    minutes."""
    report_grace_s: NotNegative = 1.0
    """[s, expert] Time after a request's end for the KV events of what it stored to arrive. Why: they take
    milliseconds; a busy event loop may take longer."""
    belief_ttl_s: Positive = 600.0
    """[s, expert] How long an unused prefix counts as cached on a replica without KV events. Why: prefixes that are
    used less often are mostly evicted."""
    index_budget_mib: OneOrMore = 256
    """[MiB] Memory of the prefix index. At the limit it forgets the least recently used prefixes, then adds no more.
    Why: holds some 45 million tokens of replicas with KV blocks of 16 tokens, 30 million with pages of 1."""
    refit: bool = True
    """Correct the cost profile from live requests, by a factor for prefill and one for decode. Why: a profile that is
    off by a factor of two is right after a minute or two (docs/decisions/0006)."""
    learned_file: str | None = None
    """File that keeps over a restart what was learned: the lengths of answers by prefix, and the correction of the cost
    profile. It has digests of prompts, no text. One gateway, one file. Why: only an operator knows a folder that
    outlives the process."""


class DecisionsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of placements for questions (`/debug`, `preble explain`) and replays (`preble replay`)."""

    remembered: OneOrMore = 10_000
    """[decisions] Decisions kept in memory; fewer on a cluster of more than 25 replicas. Why: minutes of a busy gateway
    in tens of MB."""
    log: str | None = None
    """File for the decision log, new at each start; the previous one is kept as FILE.1. **It holds the token ids of
    every prompt.** Why: prompts are private unless an operator decides otherwise."""
    log_tokens: Literal["renamed", "plain"] = "renamed"
    """`renamed`: a secret permutation, stored nowhere, replaces the token ids, so that nobody can look the text up; the
    log still replays. Why: prompts need not be readable for a replay."""
    log_max_mib: OneOrMore = 1024
    """[MiB] Size at which a log ends. Why: the disk has other uses."""
