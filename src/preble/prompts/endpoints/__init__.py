"""The endpoints of the engines: one table, and how to read the bodies and answers of each. Does no I/O."""

from preble.prompts.endpoints.answers import MOST_TOKENS, PromptTokensDetails, Usage
from preble.prompts.endpoints.bodies import Fields, Prompt
from preble.prompts.endpoints.by_load import UploadHead
from preble.prompts.endpoints.errors import (
    JSON_TYPE,
    ErrorForm,
    ErrorStyle,
    HeaderList,
    error_form,
    in_style,
    read_retry_after,
)
from preble.prompts.endpoints.events import StreamMeter
from preble.prompts.endpoints.table import CHAT, COMPLETIONS, ENDPOINTS, OTHER, Endpoint, endpoint_of

__all__ = [
    "CHAT",
    "COMPLETIONS",
    "ENDPOINTS",
    "JSON_TYPE",
    "MOST_TOKENS",
    "OTHER",
    "Endpoint",
    "ErrorForm",
    "ErrorStyle",
    "Fields",
    "HeaderList",
    "Prompt",
    "PromptTokensDetails",
    "StreamMeter",
    "UploadHead",
    "Usage",
    "endpoint_of",
    "error_form",
    "in_style",
    "read_retry_after",
]
