"""What a workload says about its prompts and their answers."""

from __future__ import annotations

from preble.core.types import TOKEN_BYTES, PackedTokens, pack_tokens
from preble.lab.workloads import Workload, WorkloadRequest, packed_prompt

NO_PROMPT_HAS = 1 << 31
"""Token ids from here on stand for generated tokens that are not in the workload."""


class Script:
    """The prompts of a workload, the answers that they quote, and the order of sessions.

    The turns of a session quote what was answered before: where the prompt of a request's follower begins with the
    request's own prompt, what comes next in it is the answer. So the follower finds the answer in the cache of the
    replica that made it, as on a real engine.
    """

    def __init__(self, workload: Workload) -> None:
        self._followers = workload.children()
        self._prompts: dict[str, PackedTokens] = {}
        """Those that had to be made before their request is sent."""

    def followers(self, request: WorkloadRequest) -> list[WorkloadRequest]:
        """Return the requests that wait for this one, in order."""
        return self._followers.get(request.request_id, [])

    def take_prompt(self, request: WorkloadRequest) -> PackedTokens:
        """Return the prompt of a request that is sent now. O(its length)."""
        prompt = self._prompts.pop(request.request_id, None)
        return packed_prompt(request) if prompt is None else prompt

    def drop(self, request: WorkloadRequest) -> None:
        """Drop a request that is never sent."""
        self._prompts.pop(request.request_id, None)

    def answer(self, request: WorkloadRequest, prompt: PackedTokens) -> PackedTokens:
        """`output_tokens` tokens: what the first follower that continues `prompt` quotes of them, then made-up ones.

        Made-up answers are the same for all prompts. O(the prompts of the followers).
        """
        num_bytes = request.output_tokens * TOKEN_BYTES
        quoted = b""
        for follower in self.followers(request):
            continued = self._prompts[follower.request_id] = packed_prompt(follower)
            if continued.startswith(prompt) and not quoted:
                quoted = continued[len(prompt) : len(prompt) + num_bytes]
        made_up = range(NO_PROMPT_HAS + len(quoted) // TOKEN_BYTES, NO_PROMPT_HAS + request.output_tokens)
        return PackedTokens(quoted + pack_tokens(made_up))
