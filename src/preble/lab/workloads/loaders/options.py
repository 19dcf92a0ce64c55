"""Options of readers: what a file itself does not say."""

from __future__ import annotations

from dataclasses import dataclass

from preble.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Each is for the formats that it names; the others ignore it.

    `spread_ticks` (mooncake): requests of one tick of a coarse clock are spread evenly over it; else they come as one
    burst. `client_share` (servegen): tokens of a client's system prompt, as a share of its median prompt, 0 … 1.
    `default_output_tokens` (openai): if a line does not say how long the answer was. `text` (segments): texts
    instead of made-up tokens.
    """

    spread_ticks: bool = True
    client_share: float = 0.5
    default_output_tokens: int = 128
    text: bool = False

    def __post_init__(self) -> None:
        """Raises: ConfigError: a number that cannot be."""
        if not 0 <= self.client_share <= 1:
            raise ConfigError(f"client_share is a share from 0 to 1, got {self.client_share}")
        if self.default_output_tokens < 1:
            raise ConfigError(f"default_output_tokens must be at least 1, got {self.default_output_tokens}")
