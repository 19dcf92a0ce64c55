"""The endpoints of the engines: one table, and how to read the bodies and answers of each. Does no I/O."""

from preble.prompts.endpoints.answers import MOST_TOKENS as MOST_TOKENS
from preble.prompts.endpoints.answers import Usage as Usage
from preble.prompts.endpoints.bodies import Fields as Fields
from preble.prompts.endpoints.bodies import Prompt as Prompt
from preble.prompts.endpoints.by_load import UploadHead as UploadHead
from preble.prompts.endpoints.errors import JSON_TYPE as JSON_TYPE
from preble.prompts.endpoints.errors import ErrorForm as ErrorForm
from preble.prompts.endpoints.errors import ErrorStyle as ErrorStyle
from preble.prompts.endpoints.errors import HeaderList as HeaderList
from preble.prompts.endpoints.errors import error_form as error_form
from preble.prompts.endpoints.errors import in_style as in_style
from preble.prompts.endpoints.errors import read_retry_after as read_retry_after
from preble.prompts.endpoints.events import StreamMeter as StreamMeter
from preble.prompts.endpoints.shared_fields import FLEX as FLEX
from preble.prompts.endpoints.table import CHAT as CHAT
from preble.prompts.endpoints.table import COMPLETIONS as COMPLETIONS
from preble.prompts.endpoints.table import ENDPOINTS as ENDPOINTS
from preble.prompts.endpoints.table import OTHER as OTHER
from preble.prompts.endpoints.table import Endpoint as Endpoint
from preble.prompts.endpoints.table import endpoint_of as endpoint_of
from preble.prompts.endpoints.table import nearest_path as nearest_path
