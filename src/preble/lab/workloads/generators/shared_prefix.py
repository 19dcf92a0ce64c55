"""Prompts that begin with a piece that many requests share, made from statistics alone.

Tool use, programming, and questions about videos or documents all have this form: a system prompt in every request,
then a *shared piece* (the tool's documentation, the problem, the video, the document), then the request's own question.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from preble.lab.workloads.generators.pieces import Asked, draw_uses, made_up_segment
from preble.lab.workloads.lengths import Lengths
from preble.lab.workloads.model import Segment, Workload, WorkloadRequest
from preble.lab.workloads.popularity import Popularity
from preble.lab.workloads.trace import own_tokens


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A workload of this form; call it to make it. All lengths are in tokens.

    `noun`: what the shared piece is. `uses`: how many requests share one piece. `related`: the fraction of pieces
    with a sibling that begins the same, for `common` of its length.
    """

    name: str
    noun: str
    system_tokens: int
    shared_tokens: Lengths
    uses: Lengths
    question_tokens: Lengths
    output_tokens: Lengths
    related: float = 0.0
    common: float = 0.0

    def __call__(self, asked: Asked) -> Workload:
        """Return the workload; by default as many shared pieces as `uses` implies, and each as popular as it says."""
        seed, num_requests, popularity = asked.seed, asked.num_requests, asked.popularity or Popularity()
        rng = random.Random(f"{self.name}/{seed}")
        uses = draw_uses(num_requests, self.uses, asked.num_prefixes, rng)
        pieces = self._pieces(len(uses), seed, rng)
        requests = tuple(
            self._request(f"{self.name}-{i}", pieces[piece], f"{self.noun}:{piece}", rng)
            for i, piece in enumerate(popularity.picks(num_requests, uses, rng))
        )
        note = f"{self.name}: {len(pieces)} {self.noun}s, popularity {popularity}, seed {seed}; made-up tokens"
        return Workload(self.name, requests, note)

    def _pieces(self, count: int, seed: int, rng: random.Random) -> list[tuple[Segment, ...]]:
        """Return the beginning of the prompts about each piece: the system prompt, then one or two segments."""
        system = made_up_segment(f"{self.name}:system", self.system_tokens)
        pieces: list[tuple[Segment, ...]] = []
        while len(pieces) < count:
            name = f"{self.name}/{seed}:{self.noun}:{len(pieces)}"
            length = self.shared_tokens.draw(rng)
            if rng.random() >= self.related / (2 - self.related):  # a pair comes at once
                pieces.append((system, made_up_segment(name, length)))
                continue
            common = made_up_segment(f"{name}:common", round(self.common * length))
            rests = (made_up_segment(f"{name}:{n}", length - round(self.common * length)) for n in (1, 2))
            pieces += [(system, common, rest) for rest in rests]
        return pieces[:count]

    def _request(self, request_id: str, piece: tuple[Segment, ...], group: str, rng: random.Random) -> WorkloadRequest:
        question = Segment(tokens=own_tokens(request_id, self.question_tokens.draw(rng)))
        return WorkloadRequest(request_id, (*piece, question), self.output_tokens.draw(rng), group=group)
