"""Time a live replica: prefill by prompt length and behind a cached prefix, decode by batch and context.

Prompts are random token ids, so that none of them is cached by chance. Each round of repetitions visits all lengths, so
that a disturbance of some seconds does not fall on one length alone. The replica must have no other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from random import Random

from preble.core.types import Tier
from preble.engines import EngineServer
from preble.errors import ConfigError, EngineProtocolError
from preble.lab.profiling.measurements import (
    NOISY_SPREAD,
    AdmissionTimes,
    DecodeTimes,
    LoadTimes,
    Measurements,
    PrefillTimes,
    spread,
)
from preble.lab.profiling.plan import ADMITTED_TOKENS, BURST, Plan, make_plan, output_tokens
from preble.lab.profiling.request_overhead import Burst, extra_s
from preble.lab.profiling.timing import TimedAnswer, Timer

TOKEN_IDS = range(100, 1000)
"""Ids to draw from: every vocabulary has them, and special tokens are below or far above them."""

STRETCHES = 4
"""Stretches in which a sequence's tokens are timed: a client may get several tokens in one read."""

CLOCK_S = 1e-6
"""A shorter time means that all tokens arrived at once."""

OnStep = Callable[[], None]


@dataclass(eq=False)
class Measuring:
    """One measurement of one replica.

    `max_tokens`: longest sequence to measure; `kv_tokens`: size of the KV cache; None for what the replica reports.
    `tier`: where it keeps KV besides its own memory, to measure how long loading takes. `model`: None takes the base
    model. `machine`: what the replica runs on, in words.
    """

    server: EngineServer
    _: KW_ONLY
    machine: str
    seed: int
    quick: bool = False
    model: str | None = None
    max_tokens: int | None = None
    kv_tokens: int | None = None
    tier: Tier | None = None

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._notes: list[str] = []

    async def prepare(self) -> Plan:
        """Ask the replica for its limits and decide what to measure. Call it before `run`.

        Raises: EngineError: it does not answer. ConfigError: it serves another model, or does not report its limits.
        """
        found = await self.server.probe()
        self._engine, self._info = found.engine, found.info
        model = self.model or self._info.models[0]
        if model not in self._info.models:
            raise ConfigError(f"{self._engine.url} does not serve {model!r}; it serves {', '.join(self._info.models)}")
        self._served = model
        self._timer = Timer(self._engine, model)
        max_tokens = _smaller(self.max_tokens, self._info.max_model_len)
        self._capacity = self.kv_tokens or self._info.spec.kv_capacity_tokens
        if max_tokens is None:
            raise ConfigError(f"{self._engine.url} does not report its longest sequence; give --max-tokens")
        if self._capacity is None:
            remedy = "give --kv-tokens, or, if this is a gateway, a replica's address"
            raise ConfigError(f"{self._engine.url} does not report the size of its KV cache; {remedy}")
        self._plan = make_plan(max_tokens, self._capacity, quick=self.quick, loads=self.tier is not None)
        return self._plan

    async def run(self, on_step: OnStep = lambda: None) -> Measurements:
        """Measure; `on_step` is called `plan.num_steps` times. Raises: EngineError."""
        await self._warm_up()
        prefill = [*await self._prefill(on_step), *await self._behind(on_step)]
        decode = await self._decode(on_step)
        admissions = await self._admissions(on_step)
        loads = await self._loads(on_step)
        assert self._capacity is not None
        return Measurements(
            date=datetime.now(UTC).date().isoformat(),
            machine=self.machine,
            engine=f"{self._info.engine} {self._info.version or ''}".rstrip(),
            model=self._served,
            seed=self.seed,
            kv_capacity_tokens=self._capacity,
            prefill=tuple(prefill),
            decode=tuple(decode),
            admissions=tuple(admissions),
            tier=self.tier,
            loads=tuple(loads),
            notes=tuple(self._notes),
        )

    async def _warm_up(self) -> None:
        """Send prompts that are not timed: an engine compiles and allocates once."""
        lengths = self._plan.lengths
        for length in (lengths[0], lengths[len(lengths) // 2], lengths[-1]):
            await self._timer.ask(self._prompt(length), 1)
        await self._ask_together(4, 16, 16)

    async def _prefill(self, on_step: OnStep) -> list[PrefillTimes]:
        """Measure every length in turn, as often as planned; again as often where the times differ."""
        seconds: dict[int, list[float]] = {length: [] for length in self._plan.lengths}
        for _ in range(self._plan.repetitions):
            for length, times in seconds.items():
                times.append(await self._from_nothing(length))
                on_step()
        disturbed = [length for length, times in seconds.items() if spread(tuple(times)) > NOISY_SPREAD]
        for _ in range(self._plan.repetitions):
            for length in disturbed:
                seconds[length].append(await self._from_nothing(length))
        return [PrefillTimes(length, 0, tuple(times)) for length, times in seconds.items()]

    async def _from_nothing(self, length: int) -> float:
        """Return the TTFT of an uncached prompt, in seconds."""
        answer = await self._timer.ask(self._prompt(length), 1)
        if answer.cached_tokens:
            raise EngineProtocolError(
                f"replica {self._engine.url} reports {answer.cached_tokens} cached tokens of a random prompt; "
                "was this seed used before? Give another --seed"
            )
        return answer.ttft_s

    async def _behind(self, on_step: OnStep) -> list[PrefillTimes]:
        """Measure behind a cached prefix, grouped by the cached tokens that the replica reports."""
        found: dict[tuple[int, int], list[float]] = {}
        for context, new in self._plan.behind:
            prefix = self._prompt(context)
            await self._timer.ask(prefix, 1)
            for _ in range(self._plan.repetitions):
                answer = await self._timer.ask(prefix + self._prompt(new), 1)
                cached = self._cached(answer, context)
                if cached:
                    found.setdefault((context + new - cached, cached), []).append(answer.ttft_s)
                on_step()
        return [PrefillTimes(new, cached, tuple(times)) for (new, cached), times in found.items()]

    def _cached(self, answer: TimedAnswer, context: int) -> int:
        if answer.cached_tokens is None:
            self._note(
                "the replica does not report cached tokens (vLLM: --enable-prompt-tokens-details), so what a cached "
                "prefix adds to a prefill could not be measured and counts as nothing"
            )
        elif answer.cached_tokens < context // 2:
            self._note("a prompt's prefix was not cached a moment later: is prefix caching off?")
        else:
            return answer.cached_tokens
        return 0

    async def _decode(self, on_step: OnStep) -> list[DecodeTimes]:
        found: list[DecodeTimes] = []
        too_many: int | None = None
        for batch, context in self._plan.decode:
            if too_many is None or batch < too_many:
                times = await self._decode_together(batch, context)
                if times is None:
                    too_many = batch
                    self._note(f"the replica does not decode {batch} sequences at once; measured up to fewer")
                else:
                    found.append(times)
            on_step()
        if all(times.median_s <= CLOCK_S for times in found):
            raise EngineProtocolError(
                f"replica {self._engine.url}: decoding cannot be timed, because all tokens of an answer arrive at "
                "once: does a proxy on the way collect them? Give the replica's own address"
            )
        return found

    async def _decode_together(self, batch: int, context: int) -> DecodeTimes | None:
        """Return times of an iteration while all decode; None if they never do so for long enough."""
        tokens = output_tokens(batch, context, self._plan.decode_tokens)
        answers = await self._ask_together(batch, context, tokens)
        together = _together(answers)
        seconds = [time for answer in answers for time in _gaps(answer, *together)]
        if not seconds:
            return None
        generated = [_tokens_until(answer, sum(together) / 2) for answer in answers]
        return DecodeTimes(batch, round(batch * context + sum(generated)), tuple(seconds))

    async def _admissions(self, on_step: OnStep) -> list[AdmissionTimes]:
        found = []
        for batch, tokens in self._plan.admitting:
            times = await self._admit_beside(batch, tokens)
            if times is not None:
                found.append(times)
            on_step()
        if not found:
            self._note("no request could be timed beside a decoding batch, so what each costs counts as nothing")
        return found

    async def _admit_beside(self, batch: int, tokens: int) -> AdmissionTimes | None:
        """Return times of bursts while `batch` sequences decode; None if no burst was complete."""
        async with self._asking_together(batch, ADMITTED_TOKENS, tokens) as asked:
            bursts = await self._bursts(asked)
        answers = [task.result() for task in asked]
        start_s, end_s = _together(answers)
        one = answers[0]
        arrivals = [time for time in one.arrivals_s if start_s <= time <= end_s]
        seconds = extra_s(arrivals, bursts)
        if not seconds:
            return None
        context = ADMITTED_TOKENS + sum(_tokens_until(answer, (start_s + end_s) / 2) for answer in answers) / batch
        return AdmissionTimes(batch, round(batch * context), ADMITTED_TOKENS, tuple(seconds))

    async def _bursts(self, batch: Sequence[asyncio.Task[TimedAnswer]]) -> list[Burst]:
        """Send bursts, each followed by an equally long pause, until a sequence of the batch has ended."""
        found: list[Burst] = []
        while not any(task.done() for task in batch):
            answers = [await self._timer.ask(self._prompt(ADMITTED_TOKENS), 1) for _ in range(BURST)]
            found.append(Burst(answers[0].sent_s, answers[-1].arrivals_s[-1], BURST))
            await asyncio.wait(batch, timeout=found[-1].seconds, return_when=asyncio.FIRST_COMPLETED)
        return found

    async def _loads(self, on_step: OnStep) -> list[LoadTimes]:
        """Measure prompts that other ones have driven out of the engine's memory, and again when they are back."""
        found = []
        for length in self._plan.loading:
            pairs = []
            for _ in range(self._plan.repetitions):
                prompt = self._prompt(length)
                await self._timer.ask(prompt, 1)
                await self._drive_out()
                loaded, resident = await self._timer.ask(prompt, 1), await self._timer.ask(prompt, 1)
                if loaded.cached_tokens and loaded.cached_tokens == resident.cached_tokens:
                    pairs.append((loaded, resident))
                on_step()
            if pairs:
                tokens = pairs[0][0].cached_tokens or 0
                times = [tuple(answer.ttft_s for answer in answers) for answers in zip(*pairs, strict=True)]
                found.append(LoadTimes(tokens, *times))
        if self._plan.loading and not found:
            self._note("nothing was loaded from the tier: is it on, and larger than the KV cache?")
        return found

    async def _drive_out(self) -> None:
        """Fill the engine's memory with other prompts."""
        assert self._capacity is not None
        length = self._plan.lengths[-1]
        for _ in range(self._capacity // length + 1):
            await self._timer.ask(self._prompt(length), 1)

    async def _ask_together(self, batch: int, context: int, tokens: int) -> list[TimedAnswer]:
        """Run all. Raises: EngineError: the first that failed; the others are aborted."""
        async with self._asking_together(batch, context, tokens) as asked:
            pass
        return [task.result() for task in asked]

    @asynccontextmanager
    async def _asking_together(
        self, batch: int, context: int, tokens: int
    ) -> AsyncIterator[list[asyncio.Task[TimedAnswer]]]:
        """Wait for all answers on leaving. Raises: EngineError: the first that failed; the others are aborted."""
        try:
            async with asyncio.TaskGroup() as tasks:
                yield [tasks.create_task(self._timer.ask(self._prompt(context), tokens)) for _ in range(batch)]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(TOKEN_IDS, k=length)

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)


def _smaller(one: int | None, other: int | None) -> int | None:
    known = [value for value in (one, other) if value is not None]
    return min(known, default=None)


def _together(answers: Sequence[TimedAnswer]) -> tuple[float, float]:
    """Return when all began to decode together and when they ended; the end may be before the start."""
    return max(answer.arrivals_s[0] for answer in answers), min(answer.arrivals_s[-1] for answer in answers)


def _gaps(answer: TimedAnswer, start_s: float, end_s: float) -> list[float]:
    """Return seconds per iteration in each of `STRETCHES` stretches of the time; empty if it has too few tokens."""
    times = [time for time in answer.arrivals_s if start_s <= time <= end_s]
    length = (len(times) - 1) // STRETCHES
    if length < 1:
        return []
    tokens = length * answer.output_tokens / len(answer.arrivals_s)
    ends = [times[i * length] for i in range(STRETCHES + 1)]
    return [max((later - earlier) / tokens, CLOCK_S) for earlier, later in pairwise(ends)]


def _tokens_until(answer: TimedAnswer, time_s: float) -> float:
    events = sum(time <= time_s for time in answer.arrivals_s)
    return events * answer.output_tokens / len(answer.arrivals_s)
