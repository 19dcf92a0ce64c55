"""Make a tiny LLaVA: the tiny Llama's tokenizer, an image encoder of two layers. Runs in vLLM's environment.

    .engines/vllm/bin/python tests/support/make_tiny_llava.py FOLDER

It has no weights: start it with `--load-format dummy`. An image of any size is 64 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "dev" / "engines"))

import make_tiny_model as tiny
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaProcessor

SIDE, PATCH = 112, 14
IMAGE = "<image>"
FOR_IMAGES = "{%- elif part['type'] == 'image' %}{{ '<image>' }}\n            {%- else %}{{ raise_exception("


def make(target: Path) -> None:
    tiny.SPECIAL_TOKENS.append(IMAGE)
    tokenizer = tiny.make_tokenizer()
    template = tiny.CHAT_TEMPLATE.replace("{%- else %}{{ raise_exception(", FOR_IMAGES, 1)
    assert template != tiny.CHAT_TEMPLATE
    image_id = tokenizer.convert_tokens_to_ids(IMAGE)
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=64,
    )
    text = LlamaConfig(
        vocab_size=tiny.VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=tiny.MAX_POSITIONS,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=image_id,
        image_token_index=image_id,
        image_seq_length=(SIDE // PATCH) ** 2,
        architectures=["LlavaForConditionalGeneration"],
        dtype="bfloat16",
    )
    config.save_pretrained(target)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
        image_token=IMAGE,
    ).save_pretrained(target)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
