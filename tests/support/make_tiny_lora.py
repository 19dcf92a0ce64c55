"""Make a LoRA adapter of random weights for the tiny Llama, as peft would write it. Runs in vLLM's environment.

.engines/vllm/bin/python tests/support/make_tiny_lora.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, RANK = 128, 2, 8
"""The tiny Llama's, and the adapter's."""


def make(target: Path) -> None:
    target.mkdir(parents=True)
    torch.manual_seed(1)
    weights = {}
    for layer in range(LAYERS):
        for projection in ("q_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, dtype=torch.bfloat16)
            weights[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, dtype=torch.bfloat16)
    save_file(weights, target / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": RANK,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "inference_mode": True,
    }
    (target / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
