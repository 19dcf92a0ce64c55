"""Make the cost profiles that Preble ships, from the published fits and from measurements.

    python benchmarks/repro/make_profiles.py [FOLDER]

writes one JSON file a profile (default: the package's own folder). The published fits are regressions over pieces and
in places fall or jump, so each is evaluated at fixed prompt lengths and the running maximum of the values is taken;
between the points a profile is linear. `n` is new tokens, `c` context tokens with the new ones; fits are in ms.

A measured one is fitted again to the times that `benchmarks/repro/gpu_profile.py` kept in benchmarks/results/gpu.

Source of the fits: the authors' repository, github.com/WukLab/preble, commit 8e7906a, its regression functions for
prefill time by GPU and model. Only the coefficients are taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import msgspec

from preble.core.costs.model import CostProfile
from preble.lab.profiling import Measurements, fit_profile
from preble.profiles import profile_json

FOLDER = Path(__file__).parents[2] / "src" / "preble" / "profiles" / "data"

MEASURED = Path(__file__).parents[1] / "results" / "gpu"

POINTS = (*range(0, 2048, 64), *range(2048, 8192, 512), *range(8192, 32768 + 1, 2048))
"""Prompt lengths at which a fit is evaluated; the fits are at most quadratic, so the long pieces err by under 2 ms."""

PUBLISHED_KV_TOKENS = 198_516
"""The KV capacity that the published simulator gives every GPU and model."""

KV_BYTES_PER_TOKEN_LLAMA_3_70B = 327_680
KV_BYTES_PER_TOKEN_MISTRAL_7B = 131_072
A100_BYTES_PER_S = 2.0e12
H100_BYTES_PER_S = 3.35e12

HOW = (
    "Fit of WukLab/preble@8e7906a ({function}) evaluated for prompts computed from nothing at {count} lengths from 0 "
    "to 32768 tokens, running maximum of the values, so that it is monotone and not negative. "
)
CONTEXT = (
    "The context terms of the fit hold for every context here, not only for new x context tokens above 2^20, where the "
    "fit jumps. "
)
BANDWIDTH = "No decode attention was published: it is the KV bytes of a token over the memory bandwidth ({how}). "
KV = "KV capacity: the published simulator's 198516 tokens for every GPU and model{remark}."

Fit = Callable[[int, int], float]


def a6000_mistral_7b_ms(n: int, c: int) -> float:
    if n >= 384:
        linear = 0.10842571 * n + 4.209777
    elif n >= 192:
        linear = -118 + 1.25 * n - 2.56e-3 * n * n
    else:
        linear = 22.0
    attention = 0.32 if c <= 1024 else 1.86e-4 * c + 0.159
    quadratic = 1.13e-3 * n + 1.75e-3 * c + 2.19e-6 * n * c if n * c > 2**20 else 0.0
    return (linear + attention + quadratic) / 0.9


def a100_mistral_7b_ms(n: int, c: int) -> float:
    linear = 0.05031337 * n + 5.505997 if n >= 256 else 10.5 if n >= 64 else 8.96
    attention = 0.123864 - 7.45359e-4 * n + 1.720227e-3 * c + 1.362658e-6 * n * c if n * c >= 2**20 else 0.0
    return (linear + attention) / 0.85


def a100_llama_3_70b_ms(n: int, c: int) -> float:
    return 28.931389 + 0.182233431 * n + 4.00365e-3 * c + 2.55050e-6 * n * c


def h100_llama_3_70b_ms(n: int, c: int) -> float:
    return 18.667307 + 0.0798791 * n + 2.685315e-3 * c + 7.443449e-7 * n * c


def a6000_llama_2_7b_ms(n: int, c: int) -> float:
    linear = 0.131 * n + 5.67 if n >= 384 else 0.114 * n + 12.4 if n >= 128 else 26.07
    return linear + c / 2048 * 1.66366


def points_of(fit: Fit) -> tuple[tuple[int, float], ...]:
    """(tokens, seconds) of prompts computed from nothing: the running maximum of the fit."""
    seconds = accumulate((max(0.0, fit(n, n)) / 1000 for n in POINTS), max)
    return tuple((n, round(s, 7)) for n, s in zip(POINTS, seconds, strict=True))


def source_of(function: str, *sentences: str) -> str:
    return HOW.format(function=function, count=len(POINTS)) + "".join(sentences)


def a6000_mistral_7b() -> CostProfile:
    return CostProfile(
        name="a6000-mistral-7b",
        source=source_of(
            "Mistral-7B on A6000, SGLang with flashinfer",
            CONTEXT,
            "Decode: the published simulator's step, (22 + 0.32 + 1.86e-4 x context) / 0.9 ms. ",
            KV.format(remark=""),
        ),
        prefill_points=points_of(a6000_mistral_7b_ms),
        attention_s_per_pair=2.19e-9 / 0.9,
        attention_s_per_context_token=(1.75e-6 + 1.86e-7) / 0.9,
        decode_base_s=(22 + 0.32) / 0.9 / 1000,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=1.86e-7 / 0.9,
        kv_capacity_tokens=PUBLISHED_KV_TOKENS,
    )


def a100_mistral_7b() -> CostProfile:
    return CostProfile(
        name="a100-mistral-7b",
        source=source_of(
            "Mistral-7B on A100",
            CONTEXT,
            "Decode: the fit's value below 64 tokens. ",
            BANDWIDTH.format(how="131072 B, 2.0 TB/s"),
            KV.format(remark=""),
        ),
        prefill_points=points_of(a100_mistral_7b_ms),
        attention_s_per_pair=1.362658e-9 / 0.85,
        attention_s_per_context_token=1.720227e-6 / 0.85,
        decode_base_s=8.96 / 0.85 / 1000,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=KV_BYTES_PER_TOKEN_MISTRAL_7B / A100_BYTES_PER_S,
        kv_capacity_tokens=PUBLISHED_KV_TOKENS,
    )


def a100x2_llama_3_70b() -> CostProfile:
    return CostProfile(
        name="a100x2-llama-3-70b",
        source=source_of(
            "Llama-3-70B on two A100, tensor parallel",
            "Decode: the fit's constant. ",
            BANDWIDTH.format(how="327680 B over two GPUs of 2.0 TB/s"),
            KV.format(remark=", more than 16-bit weights would leave on these two"),
        ),
        prefill_points=points_of(a100_llama_3_70b_ms),
        attention_s_per_pair=2.55050e-9,
        attention_s_per_context_token=4.00365e-6,
        decode_base_s=28.931389e-3,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=KV_BYTES_PER_TOKEN_LLAMA_3_70B / (2 * A100_BYTES_PER_S),
        kv_capacity_tokens=PUBLISHED_KV_TOKENS,
    )


def h100x2_llama_3_70b() -> CostProfile:
    return CostProfile(
        name="h100x2-llama-3-70b",
        source=source_of(
            "Llama-3-70B on two H100, tensor parallel; not the function that carries the A100's coefficients",
            "Decode: the fit's constant. ",
            BANDWIDTH.format(how="327680 B over two GPUs of 3.35 TB/s"),
            KV.format(remark=", more than 16-bit weights would leave on these two"),
        ),
        prefill_points=points_of(h100_llama_3_70b_ms),
        attention_s_per_pair=7.443449e-10,
        attention_s_per_context_token=2.685315e-6,
        decode_base_s=18.667307e-3,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=KV_BYTES_PER_TOKEN_LLAMA_3_70B / (2 * H100_BYTES_PER_S),
        kv_capacity_tokens=PUBLISHED_KV_TOKENS,
    )


def a6000_llama_2_7b_vllm() -> CostProfile:
    return CostProfile(
        name="a6000-llama-2-7b-vllm",
        source=source_of(
            "Llama-2-7B on A6000, vLLM",
            "Decode: the fit's value below 128 tokens and its context term. ",
            "KV capacity: a quarter of the published simulator's 198516 tokens, since a token takes four times the "
            "bytes (524288 B) in the same 26.0 GB.",
        ),
        prefill_points=points_of(a6000_llama_2_7b_ms),
        attention_s_per_pair=0.0,
        attention_s_per_context_token=1.66366e-3 / 2048,
        decode_base_s=26.07e-3,
        decode_s_per_sequence=0.0,
        decode_s_per_context_token=1.66366e-3 / 2048,
        kv_capacity_tokens=PUBLISHED_KV_TOKENS // 4,
    )


def tiny_cpu() -> CostProfile:
    return CostProfile(
        name="tiny-cpu",
        source=(
            "Llama of 1.4 M parameters under vLLM 0.32 on one core (avx512, no AMX), rounded from measurements: "
            "prefill 20 to 30 thousand tokens/s up to 4k and 12 thousand at 7.9k, decode 405 tokens/s alone and 1950 "
            "with eight sequences. KV capacity: 64 MiB of 1 KiB a token."
        ),
        prefill_points=((0, 0.002), (512, 0.0215), (1024, 0.041), (2048, 0.082), (4096, 0.17), (7900, 0.638)),
        attention_s_per_pair=1.0e-8,
        attention_s_per_context_token=0.0,
        decode_base_s=0.00224,
        decode_s_per_sequence=0.00023,
        decode_s_per_context_token=0.0,
        kv_capacity_tokens=65_536,
        typical_batch=8,
    )


def measured(name: str) -> CostProfile:
    kept = msgspec.json.decode((MEASURED / f"{name}.raw.json").read_bytes(), type=Measurements)
    return fit_profile(kept, name=name, source=kept.source("benchmarks/repro/gpu_profile.py")).profile


PROFILES = (
    a6000_mistral_7b,
    a100_mistral_7b,
    a100x2_llama_3_70b,
    h100x2_llama_3_70b,
    a6000_llama_2_7b_vllm,
    partial(measured, "h100-mistral-7b"),
    partial(measured, "h100-llama-3-8b"),
    partial(measured, "h100x4-llama-3-70b"),
    tiny_cpu,
)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for make in PROFILES:
        profile = make()
        (folder / f"{profile.name}.json").write_text(profile_json(profile), encoding="utf-8")
        print(folder / f"{profile.name}.json")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    main(parser.parse_args().folder)
