"""Measure prefill and decode of a model's shape on a GPU and fit a cost profile, without a server or any weights.

    python benchmarks/repro/gpu_profile.py --shape mistral-7b --out FOLDER
    python benchmarks/repro/gpu_profile.py --shape llama-3-70b --gpus 4 --out FOLDER

The model has the shape of a known one and random weights: a matrix product takes as long for these as for trained
ones. Attention is PyTorch's own (scaled_dot_product_attention), the rest plain PyTorch; iterations of few tokens are
replayed as CUDA graphs, as engines do. The figures stand for the GPU, not for an engine: to profile a replica that
serves, use `preble profile`.

`--gpus N` computes one GPU's part of a model that N GPUs share (tensor parallel), and adds the time of the all-reduces
that join the parts, which one GPU cannot measure: `ALL_REDUCE_S` and `ALL_REDUCE_BYTES_PER_S` are assumed.

It also times how fast KV comes from the host's memory, and then iterations that the fit has not seen, among them mixed
ones: a chunk of a prompt beside decodes, as an engine runs them. Writes NAME.raw.json (every time measured), NAME.json
(the profile) and NAME.unseen.json (what the profile says of the unseen ones). Needs PyTorch, numpy and msgspec, and
`src` on the PYTHONPATH where the package is not installed. On a CPU it runs with `--shape tiny`, to try the script out.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles

import msgspec
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from preble.core.costs.model import CostModel, CostProfile
from preble.core.types import Tier
from preble.lab.profiling import DecodeTimes, LoadTimes, Measurements, Plan, PrefillTimes, fit_profile, make_plan
from preble.profiles import profile_json

COMMAND = "benchmarks/repro/gpu_profile.py"
WARM_UPS = 2
LONG_S = 1.0
"""Iterations that take longer are timed twice, whatever the plan says: they vary little."""

MEMORY_SHARE = 0.9
"""Of the GPU's memory, as engines take by default."""

ACTIVATION_BYTES = 2 * 2**30
"""Left for what is computed on the way."""

CPU_KV_TOKENS = 16_384

GRAPH_TOKENS = 512
"""Iterations of at most this many tokens are replayed as CUDA graphs; vLLM captures up to 512 by default."""

ALL_REDUCE_S = 10e-6
ALL_REDUCE_BYTES_PER_S = 370e9
"""Assumed of the links between the GPUs of one server (NVLink, 450 GB/s each way): what an all-reduce of a few bytes
takes, and the bytes a second that each GPU's link carries in a large one."""

UNSEEN = 40
UNSEEN_REPETITIONS = 3
"""Iterations of each kind that the fit has not seen, and how often each is timed."""


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama family: the parts that decide how long it takes."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def part(self, gpus: int) -> Shape:
        """What one of `gpus` GPUs computes: its share of the heads, of the layers' width and of the vocabulary."""
        return replace(
            self,
            heads=self.heads // gpus,
            kv_heads=self.kv_heads // gpus,
            intermediate=self.intermediate // gpus,
            vocabulary=self.vocabulary // gpus,
        )

    def joining_s(self, tokens: int, element_bytes: int, gpus: int) -> float:
        """Seconds of an iteration's all-reduces, two a layer. Assumed, not measured; 0.0 for one GPU."""
        if gpus == 1:
            return 0.0
        sent = 2 * (gpus - 1) / gpus * tokens * self.hidden * element_bytes
        return 2 * self.layers * (ALL_REDUCE_S + sent / ALL_REDUCE_BYTES_PER_S)

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


SHAPES = {
    "mistral-7b": Shape(4096, 32, 32, 8, 128, 14336, 32_000),
    "llama-3-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256),
    "llama-3-70b": Shape(8192, 80, 64, 8, 128, 28672, 128_256),
    "tiny": Shape(64, 2, 4, 2, 16, 128, 512),
}


@dataclass(frozen=True)
class Sequences:
    """Equally long sequences in one iteration. `token_ids`: (sequences, new tokens), the last ones of the cache.

    `cache`: (layers, 2, sequences, kv heads, all tokens, head dim). `rotary`: of the new tokens' positions.
    """

    token_ids: torch.Tensor
    cache: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]

    @property
    def num_new(self) -> int:
        return self.token_ids.numel()


class Layer:
    """One decoder layer with random weights."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        def weights(rows: int, columns: int) -> torch.Tensor:
            # Small, so that no activation overflows however deep the model is.
            return torch.randn(rows, columns, device=device, dtype=dtype) * 0.02

        self.shape = shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = weights(shape.hidden, width)
        self.out = weights(shape.heads * shape.head_dim, shape.hidden)
        self.gate_up = weights(shape.hidden, 2 * shape.intermediate)
        self.down = weights(shape.intermediate, shape.hidden)

    def __call__(self, x: torch.Tensor, sharing: list[tuple[Sequences, torch.Tensor]]) -> torch.Tensor:
        """`x`: (new tokens of all, hidden). `sharing`: who has part in the iteration, each with this layer's cache."""
        qkv = _norm(x) @ self.qkv
        parts = qkv.split([sequences.num_new for sequences, _ in sharing])
        mixed = [self._attention(part, *who) for part, who in zip(parts, sharing, strict=True)]
        x = x + torch.cat(mixed) @ self.out
        gate, up = (_norm(x) @ self.gate_up).chunk(2, dim=-1)
        return x + (silu(gate) * up) @ self.down

    def _attention(self, qkv: torch.Tensor, sequences: Sequences, cache: torch.Tensor) -> torch.Tensor:
        """`cache`: (2, sequences, kv heads, all tokens, head dim); the last tokens are the new ones; it writes them."""
        shape, (count, new) = self.shape, sequences.token_ids.shape
        heads = qkv.view(count, new, -1, shape.head_dim).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cache[0, :, :, -new:] = _rotated(k, sequences.rotary)
        cache[1, :, :, -new:] = v
        mask = causal_lower_right(new, cache.shape[3]) if new > 1 else None
        mixed = scaled_dot_product_attention(_rotated(q, sequences.rotary), cache[0], cache[1], mask, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(count * new, -1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:])


def _rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Model:
    """The whole of it: embedding, layers, the last token's logits."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.embedding = torch.randn(shape.vocabulary, shape.hidden, device=device, dtype=self.dtype) * 0.02
        self.layers = [Layer(shape, device, self.dtype) for _ in range(shape.layers)]
        self.head = torch.randn(shape.hidden, shape.vocabulary, device=device, dtype=self.dtype) * 0.02

    def sequences(self, count: int, total: int, new: int) -> Sequences:
        """`count` sequences of `total` tokens, `new` of each to compute, behind what keys and values look like."""
        s = self.shape
        cache = torch.randn(s.layers, 2, count, s.kv_heads, total, s.head_dim, device=self.device, dtype=self.dtype)
        token_ids = torch.randint(s.vocabulary, (count, new), device=self.device)
        return Sequences(token_ids, cache, self._rotary(torch.arange(total - new, total, device=self.device)))

    def run(self, sharing: list[Sequences]) -> torch.Tensor:
        """One iteration: the next token of each sequence."""
        x = torch.cat([self.embedding[sequences.token_ids].flatten(0, 1) for sequences in sharing])
        for i, layer in enumerate(self.layers):
            x = layer(x, [(sequences, sequences.cache[i]) for sequences in sharing])
        parts = x.split([sequences.num_new for sequences in sharing])
        ends = [p.view(*of.token_ids.shape, -1)[:, -1] for p, of in zip(parts, sharing, strict=True)]
        return (_norm(torch.cat(ends)) @ self.head).argmax(dim=-1)

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.shape.head_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half, device=self.device) / half)
        angles = positions[:, None] * frequencies[None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    @property
    def element_bytes(self) -> int:
        return self.embedding.element_size()

    def kv_bytes_per_token(self) -> int:
        return self.shape.kv_bytes_per_token(self.element_bytes)

    def kv_capacity_tokens(self) -> int:
        """What an engine would have room for on this GPU."""
        if self.device.type != "cuda":
            return CPU_KV_TOKENS
        total = torch.cuda.get_device_properties(self.device).total_memory
        room = MEMORY_SHARE * total - torch.cuda.memory_allocated(self.device) - ACTIVATION_BYTES
        return int(room) // self.kv_bytes_per_token()


@dataclass(frozen=True)
class Unseen:
    """An iteration that the fit has not seen. `prefills`: (new, cached) tokens of each; `decodes`: their contexts."""

    prefills: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]
    measured_s: float
    fitted_s: float = 0.0

    def judged_by(self, model: CostModel) -> Unseen:
        return replace(self, fitted_s=model.iteration_s(self.prefills, len(self.decodes), sum(self.decodes)))

    @property
    def error(self) -> float:
        return (self.fitted_s - self.measured_s) / self.measured_s


class Measuring:
    """Times iterations of a model as a plan says. `notes`: what did not fit."""

    def __init__(self, model: Model, plan: Plan, gpus: int) -> None:
        self._model = model
        self._plan = plan
        self._gpus = gpus
        self.notes: list[str] = []

    def prefill(self) -> list[PrefillTimes]:
        chunks = [(0, length) for length in self._plan.lengths] + list(self._plan.behind)
        found = []
        for cached, new in chunks:
            seconds = self._times([(1, cached + new, new)], self._plan.repetitions)
            if seconds:
                found.append(PrefillTimes(new, cached, seconds))
        return found

    def decode(self) -> list[DecodeTimes]:
        found = []
        for sequences, context in self._plan.decode:
            seconds = self._times([(sequences, context, 1)], self._plan.decode_tokens)
            if seconds:
                found.append(DecodeTimes(sequences, sequences * context, seconds))
        return found

    def loads(self) -> list[LoadTimes]:
        """Times to copy the KV of as many tokens from the host's memory, all of it in one piece."""
        return [LoadTimes(tokens, self._load_times(tokens), (0.0,)) for tokens in self._plan.loading]

    def unseen(self, seed: int = 0) -> list[Unseen]:
        """Times of random iterations: a chunk of a prompt, decodes, and both together."""
        rng = random.Random(seed)
        longest = max(self._plan.lengths) // 2
        found = []
        for _ in range(UNSEEN):
            chunk = _between(rng, 16, min(4096, longest)), _between(rng, 16, longest)
            decodes = (_between(rng, 16, min(4096, longest)),) * _between(rng, 1, 64)
            for prefills, beside in (((chunk,), ()), ((), decodes), ((chunk,), decodes)):
                groups = [(1, cached + new, new) for new, cached in prefills]
                groups += [(len(beside), beside[0], 1)] if beside else []
                if seconds := self._times(groups, UNSEEN_REPETITIONS):
                    found.append(Unseen(prefills, beside, median(seconds)))
        return found

    def _load_times(self, tokens: int) -> tuple[float, ...]:
        device = self._model.device
        kv_bytes = tokens * self._model.kv_bytes_per_token()
        held = torch.empty(kv_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.empty(kv_bytes, dtype=torch.uint8, device=device)
        there.copy_(held)
        return tuple(self._timed(lambda: there.copy_(held, non_blocking=True)) for _ in range(self._plan.repetitions))

    def _times(self, groups: list[tuple[int, int, int]], repetitions: int) -> tuple[float, ...]:
        """Seconds of each repetition of one iteration; empty where it does not fit into the GPU's memory.

        `groups`: (sequences, tokens of each, new ones among these).
        """
        said = " beside ".join(f"{count} x {total} tokens, {new} of each new" for count, total, new in groups)
        try:
            sharing = [self._model.sequences(*group) for group in groups]
            first_s = [self._timed(lambda: self._model.run(sharing)) for _ in range(WARM_UPS)]
            step = self._step(sharing)
            if min(first_s) > LONG_S:
                repetitions = 2
            seconds = tuple(self._timed(step) for _ in range(repetitions))
        except torch.OutOfMemoryError:
            self.notes.append(f"{said}: does not fit into the GPU's memory")
            return ()
        print(f"{said}: {min(seconds) * 1000:.3f} ms", file=sys.stderr)
        num_new = sum(sequences.num_new for sequences in sharing)
        joining_s = self._model.shape.joining_s(num_new, self._model.element_bytes, self._gpus)
        return tuple(s + joining_s for s in seconds)

    def _step(self, sharing: list[Sequences]) -> Callable[[], object]:
        num_new = sum(sequences.num_new for sequences in sharing)
        if self._model.device.type != "cuda" or num_new > GRAPH_TOKENS:
            return lambda: self._model.run(sharing)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._model.run(sharing)
        graph.replay()
        return graph.replay

    def _timed(self, work: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def _between(rng: random.Random, low: int, high: int) -> int:
    """Draw a whole number whose logarithm is uniform."""
    return round(low * (high / low) ** rng.random())


def measure(
    shape_name: str, device: torch.device, machine: str, max_tokens: int, *, gpus: int, quick: bool
) -> tuple[Measurements, list[Unseen]]:
    torch.manual_seed(0)
    with torch.inference_mode():
        model = Model(SHAPES[shape_name].part(gpus), device)
        capacity = model.kv_capacity_tokens()
        measuring = Measuring(model, make_plan(max_tokens, capacity, quick=quick, loads=True), gpus)
        prefill, decode, loads = measuring.prefill(), measuring.decode(), measuring.loads()
        unseen = measuring.unseen()
    measurements = Measurements(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine,
        engine=f"PyTorch {torch.__version__}, scaled_dot_product_attention, {model.dtype}".replace("torch.", ""),
        model=f"{shape_name} with random weights" + (f", one of {gpus} GPUs' part" if gpus > 1 else ""),
        seed=0,
        over_http=False,
        kv_capacity_tokens=capacity,
        prefill=tuple(prefill),
        decode=tuple(decode),
        tier=Tier.HOST,
        loads=tuple(loads),
        notes=(*what_it_lacks(gpus), *measuring.notes),
    )
    return measurements, unseen


def what_it_lacks(gpus: int) -> tuple[str, ...]:
    """What a reader of the profile must know of how it was made."""
    joined = (
        f"all-reduces between the {gpus} GPUs are assumed, not measured: two a layer, {ALL_REDUCE_S * 1e6:.0f} us and "
        f"{ALL_REDUCE_BYTES_PER_S / 1e9:.0f} GB/s",
    )
    return (
        f"no engine around it; CUDA graphs up to {GRAPH_TOKENS} tokens",
        *(joined if gpus > 1 else ()),
        f"KV capacity: what is left beside the weights of {MEMORY_SHARE:.0%} of the memory",
    )


def judge(unseen: list[Unseen], profile: CostProfile) -> list[Unseen]:
    """Say of each kind of iteration how far the profile is off, in the middle and at the 95th percentile."""
    model = CostModel(profile)
    judged = [one.judged_by(model) for one in unseen]
    for kind, has_prefill, has_decode in (("prefill", True, False), ("decode", False, True), ("mixed", True, True)):
        of_kind = [one for one in judged if bool(one.prefills) is has_prefill and bool(one.decodes) is has_decode]
        sizes = [abs(one.error) for one in of_kind]
        print(f"unseen {kind}: off by {median(sizes):.1%} (median), {quantiles(sizes, n=20)[-1]:.1%} (95th percentile)")
    return judged


def slug(machine: str) -> str:
    """The GPU's name as a profile's: "NVIDIA H100 80GB HBM3" -> "h100"."""
    words = re.findall(r"[a-z]+\d+[a-z]*|rtx|cpu", machine.lower())
    return words[0] if words else "gpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b")
    parser.add_argument("--out", type=Path, default=Path("build/profiles"), help="folder for the two files")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="longest sequence")
    parser.add_argument("--gpus", type=int, default=1, help="that share the model (tensor parallel)")
    parser.add_argument("--name", help="of the profile; default: GPU and shape")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and given.shape != "tiny":
        parser.error("there is no GPU here; on a CPU only --shape tiny makes sense")
    device = torch.device("cuda" if has_gpu else "cpu")
    machine = torch.cuda.get_device_name(device) if has_gpu else "a CPU"
    measurements, unseen = measure(given.shape, device, machine, given.max_tokens, gpus=given.gpus, quick=given.quick)
    name = given.name or f"{slug(machine)}{f'x{given.gpus}' if given.gpus > 1 else ''}-{given.shape}"
    fit = fit_profile(measurements, name=name, source=measurements.source(COMMAND))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{name}.raw.json").write_bytes(msgspec.json.format(msgspec.json.encode(measurements)))
    (given.out / f"{name}.json").write_text(profile_json(fit.profile), encoding="utf-8")
    print(f"{given.out / name}.json: median error {fit.median_error:.1%}")
    judged = judge(unseen, fit.profile)
    (given.out / f"{name}.unseen.json").write_bytes(msgspec.json.encode(judged))
    for warning in fit.warnings():
        print(warning, file=sys.stderr)


if __name__ == "__main__":
    main()
