"""Measure prefill and decode of a model's shape on a GPU and fit a cost profile, without a server or any weights.

    python benchmarks/repro/gpu_profile.py --shape mistral-7b --out FOLDER

The model has the shape of Mistral-7B or Llama-3-8B and random weights: a matrix product takes as long for these as for
trained ones. Attention is PyTorch's own (scaled_dot_product_attention), the rest plain PyTorch without CUDA graphs, so
an engine with better kernels is somewhat faster, most of all in decoding small batches. The figures stand for the GPU,
not for an engine: to profile a replica that serves, use `preble profile`.

Writes NAME.raw.json (every time measured) and NAME.json (the profile). Needs PyTorch, numpy and msgspec, and `src` on
the PYTHONPATH where the package is not installed. On a CPU it runs with `--shape tiny`, to try the script out.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from preble.lab.profiling import DecodeTimes, Measurements, Plan, PrefillTimes, fit_profile, make_plan
from preble.profiles import profile_json

WARM_UPS = 2
MEMORY_SHARE = 0.9
"""Of the GPU's memory, as engines take by default."""

ACTIVATION_BYTES = 2 * 2**30
"""Left for what is computed on the way."""

CPU_KV_TOKENS = 16_384


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

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * element_bytes


SHAPES = {
    "mistral-7b": Shape(4096, 32, 32, 8, 128, 14336, 32_000),
    "llama-3-8b": Shape(4096, 32, 32, 8, 128, 14336, 128_256),
    "tiny": Shape(64, 2, 4, 2, 16, 128, 512),
}


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

    def __call__(self, x: torch.Tensor, cache: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`x`: (sequences, new tokens, hidden). `cache`: (2, sequences, kv heads, all tokens, head dim); the last
        tokens in it are the new ones, and are written."""
        x = x + self._attention(_norm(x), cache, rotary)
        gate, up = (_norm(x) @ self.gate_up).chunk(2, dim=-1)
        return x + (silu(gate) * up) @ self.down

    def _attention(
        self, x: torch.Tensor, cache: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        shape, (sequences, new, _) = self.shape, x.shape
        heads = (x @ self.qkv).view(sequences, new, -1, shape.head_dim).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cache[0, :, :, -new:] = _rotated(k, rotary)
        cache[1, :, :, -new:] = v
        mask = causal_lower_right(new, cache.shape[3]) if new > 1 else None
        mixed = scaled_dot_product_attention(_rotated(q, rotary), cache[0], cache[1], mask, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(sequences, new, -1) @ self.out


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

    def cache(self, sequences: int, tokens: int) -> torch.Tensor:
        """(layers, 2, sequences, kv heads, tokens, head dim), filled with what keys and values look like."""
        s = self.shape
        return torch.randn(s.layers, 2, sequences, s.kv_heads, tokens, s.head_dim, device=self.device, dtype=self.dtype)

    def run(self, token_ids: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """The next token of each sequence. `token_ids`: (sequences, new tokens), the last ones of the cache."""
        new, total = token_ids.shape[1], cache.shape[4]
        rotary = self._rotary(torch.arange(total - new, total, device=self.device))
        x = self.embedding[token_ids]
        for layer, of_layer in zip(self.layers, cache, strict=True):
            x = layer(x, of_layer, rotary)
        return (_norm(x[:, -1]) @ self.head).argmax(dim=-1)

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.shape.head_dim // 2
        frequencies = 10_000.0 ** (-torch.arange(half, device=self.device) / half)
        angles = positions[:, None] * frequencies[None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def kv_capacity_tokens(self) -> int:
        """What an engine would have room for on this GPU."""
        if self.device.type != "cuda":
            return CPU_KV_TOKENS
        total = torch.cuda.get_device_properties(self.device).total_memory
        room = MEMORY_SHARE * total - torch.cuda.memory_allocated(self.device) - ACTIVATION_BYTES
        return int(room) // self.shape.kv_bytes_per_token(self.embedding.element_size())


class Measuring:
    """Times iterations of a model as a plan says. `notes`: what did not fit."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self.notes: list[str] = []

    def prefill(self) -> list[PrefillTimes]:
        chunks = [(0, length) for length in self._plan.lengths] + list(self._plan.behind)
        found = []
        for cached, new in chunks:
            seconds = self._times(1, cached + new, new, self._plan.repetitions)
            if seconds:
                found.append(PrefillTimes(new, cached, seconds))
        return found

    def decode(self) -> list[DecodeTimes]:
        found = []
        for sequences, context in self._plan.decode:
            seconds = self._times(sequences, context, 1, self._plan.decode_tokens)
            if seconds:
                found.append(DecodeTimes(sequences, sequences * context, seconds))
        return found

    def _times(self, sequences: int, total: int, new: int, repetitions: int) -> tuple[float, ...]:
        """Seconds of each repetition; empty where it does not fit into the GPU's memory."""
        try:
            cache = self._model.cache(sequences, total)
            token_ids = torch.randint(self._model.shape.vocabulary, (sequences, new), device=self._model.device)
            for _ in range(WARM_UPS):
                self._model.run(token_ids, cache)
            seconds = tuple(self._timed(lambda: self._model.run(token_ids, cache)) for _ in range(repetitions))
        except torch.OutOfMemoryError:
            self.notes.append(f"{sequences} sequences of {total} tokens do not fit into the GPU's memory")
            return ()
        print(f"{sequences} x {total} tokens, {new} of each new: {min(seconds) * 1000:.3f} ms", file=sys.stderr)
        return seconds

    def _timed(self, work: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def measure(shape_name: str, device: torch.device, machine: str, max_tokens: int, *, quick: bool) -> Measurements:
    torch.manual_seed(0)
    with torch.inference_mode():
        model = Model(SHAPES[shape_name], device)
        capacity = model.kv_capacity_tokens()
        measuring = Measuring(model, make_plan(max_tokens, capacity, quick=quick))
        prefill, decode = measuring.prefill(), measuring.decode()
    return Measurements(
        date=datetime.now(UTC).date().isoformat(),
        machine=machine,
        engine=f"PyTorch {torch.__version__}, scaled_dot_product_attention, {model.dtype}".replace("torch.", ""),
        model=f"{shape_name} with random weights",
        seed=0,
        over_http=False,
        kv_capacity_tokens=capacity,
        prefill=tuple(prefill),
        decode=tuple(decode),
        notes=tuple(measuring.notes),
    )


def source_of(m: Measurements) -> str:
    return (
        f"Measured by benchmarks/repro/gpu_profile.py ({m.version}) on {m.date}: {m.model} under {m.engine} on "
        f"{m.machine}; no engine around it and no CUDA graphs. KV capacity: what is left beside the weights of "
        f"{MEMORY_SHARE:.0%} of the memory. " + " ".join(f"{note}." for note in m.notes)
    ).strip()


def slug(machine: str) -> str:
    """The GPU's name as a profile's: "NVIDIA H100 80GB HBM3" -> "h100"."""
    words = re.findall(r"[a-z]+\d+[a-z]*|rtx|cpu", machine.lower())
    return words[0] if words else "gpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b")
    parser.add_argument("--out", type=Path, default=Path("build/profiles"), help="folder for the two files")
    parser.add_argument("--max-tokens", type=int, default=32_768, help="longest sequence")
    parser.add_argument("--name", help="of the profile; default: GPU and shape")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and given.shape != "tiny":
        parser.error("there is no GPU here; on a CPU only --shape tiny makes sense")
    device = torch.device("cuda" if has_gpu else "cpu")
    machine = torch.cuda.get_device_name(device) if has_gpu else "a CPU"
    measurements = measure(given.shape, device, machine, given.max_tokens, quick=given.quick)
    name = given.name or f"{slug(machine)}-{given.shape}"
    fit = fit_profile(measurements, name=name, source=source_of(measurements))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / f"{name}.raw.json").write_bytes(msgspec.json.format(msgspec.json.encode(measurements)))
    (given.out / f"{name}.json").write_text(profile_json(fit.profile), encoding="utf-8")
    print(f"{given.out / name}.json: median error {fit.median_error:.1%}")
    for warning in fit.warnings():
        print(warning, file=sys.stderr)


if __name__ == "__main__":
    main()
