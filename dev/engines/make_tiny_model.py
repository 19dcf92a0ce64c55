#!/usr/bin/env python3
"""Make a tiny Llama with random weights and a real tokenizer, for tests and the demo.

    .engines/vllm/bin/python dev/engines/make_tiny_model.py .engines/models/tiny-llama

The weights are noise from a fixed seed: what it says means nothing, but it computes, caches and schedules like any
other Llama. The tokenizer is a byte-level BPE trained on the standard library's own sources, so text of any kind gets a
plausible number of tokens; like Llama's it puts a BOS token before plain text. The chat template knows system, user,
assistant and tool messages, tool definitions, tool calls and content given in parts.

Deterministic for one version of Python, torch and tokenizers. Needs torch, transformers and tokenizers; no network.
A model that this very script has made already is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCAB_SIZE = 4096
MAX_POSITIONS = 32768
SEED = 0
TRAINING_BYTES = 8_000_000
STAMP = "preble-stamp"
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content -%}
        {%- for part in content -%}
            {%- if part['type'] == 'text' %}{{ part['text'] }}
            {%- else %}{{ raise_exception('only text content is supported, got ' + part['type']) }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro -%}
{{- bos_token }}
{%- if messages and messages[0]['role'] == 'system' %}
    {%- set system_text = text_of(messages[0]['content']) %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system_text = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- if system_text or tools %}
    {{- '<|system|>\\n' + system_text }}
    {%- if tools %}
        {{- '\\nYou may call these tools:\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson + '\\n' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in rest %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role: ' + message['role']) }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\\n' + text_of(message['content']) }}
    {%- for call in message['tool_calls'] or [] %}
        {{- '\\ncall: ' + call['function'] | tojson }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


def training_texts() -> Iterator[str]:
    """The standard library's modules in a fixed order, up to a fixed amount of text."""
    left = TRAINING_BYTES
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        left -= len(text)
        if left < 0:
            return


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer with a BOS token in front of every plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(training_texts(), trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=MAX_POSITIONS
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_weights() -> Any:
    """1.4 million random parameters in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def make(target: Path) -> None:
    """Write the model; `target` appears only when it is complete."""
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    make_tokenizer().save_pretrained(unfinished)
    make_weights().save_pretrained(unfinished)
    (unfinished / STAMP).write_text(stamp())
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)


def stamp() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="the folder to make")
    target: Path = parser.parse_args().target
    existing = target / STAMP
    if existing.is_file() and existing.read_text() == stamp():
        return 0
    print(f"making the tiny model in {target} (about 10 s)", file=sys.stderr, flush=True)
    make(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
