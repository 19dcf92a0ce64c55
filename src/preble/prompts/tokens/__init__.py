"""From texts, chats and media to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from preble.config import GatewayConfig
from preble.core.types import ReplicaId
from preble.engines.adapter import Engine
from preble.errors import ConfigError
from preble.prompts.tokens.pool import EngineTokens, LocalTokens
from preble.prompts.tokens.source import PromptEncoder, TokenSource
from preble.prompts.tokens.tokenizer import find_model_files

__all__ = ["PromptEncoder", "TokenSource", "make_token_source"]


def make_token_source(
    config: GatewayConfig,
    engines_for: Callable[[str | None], Sequence[Engine]],
    suspect: Callable[[ReplicaId], None],
) -> TokenSource:
    """Make what is configured: a local tokenizer, else the replicas'. Blocks while it loads. Raises: ConfigError."""
    settings = config.tokenizing
    engines = EngineTokens(engines_for, suspect)

    if config.tokenizer is None:
        if settings.chat_template is not None:
            raise ConfigError("tokenizing.chat_template needs a tokenizer; set `tokenizer` too")
        return engines
    template = Path(settings.chat_template).expanduser() if settings.chat_template else None
    folder = find_model_files(config.tokenizer)
    return LocalTokens(
        folder,
        template,
        inline_bytes=settings.inline_bytes,
        workers=settings.workers,
        memory_bytes=settings.memory_mib * 2**20,
        engines=engines,
    )
