"""The endpoints of the engines: one table, and how to read the bodies and answers of each. Does no I/O."""

from preble.serving.endpoints.answers import MOST_TOKENS, PromptTokensDetails, Usage
from preble.serving.endpoints.bodies import Fields, Prompt
from preble.serving.endpoints.by_load import UploadHead
from preble.serving.endpoints.endpoint import Endpoint
from preble.serving.endpoints.errors import JSON_TYPE, ErrorForm, ErrorStyle, HeaderList, error_form, in_style
from preble.serving.endpoints.events import StreamMeter
from preble.serving.endpoints.table import CHAT, COMPLETIONS, ENDPOINTS, OTHER, endpoint_of

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
]
