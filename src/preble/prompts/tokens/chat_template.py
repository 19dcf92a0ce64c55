"""Renders chat messages as prompt text, as engines do: with the model's own Jinja template.

The template runs in the environment that Hugging Face templates expect, and gets messages in the form that an engine
gives them (`Form`). It comes with the model and runs in Jinja's immutable sandbox. A client adds only data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from preble.errors import ConfigError, RequestError

Message = dict[str, Any]
_CONTINUE_MARK = "PREBLE-CONTINUES-HERE "
_LATE_SYSTEM: tuple[Message, ...] = tuple({"role": role, "content": "t"} for role in ("system", "user") * 2)
"""What a template must accept so that vLLM leaves Anthropic's inline system messages where they are."""
_RESERVED = frozenset({"messages", "tools", "documents", "tokenize", "chat_template"})


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training. Here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Do as Jinja's own filter, without its HTML escapes: models were trained without them."""
    if not isinstance(value, _Shown):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    form = (ensure_ascii, indent, separators and tuple(separators), sort_keys)
    text = value._texts.get(form)
    if text is None:
        text = value._texts[form] = _tojson(dict(value), ensure_ascii, indent, separators, sort_keys)
    return text


class _Shown(dict[str, Any]):
    """A part of a tool as templates see it. They cannot change it, so its JSON is made once for many chats."""

    __slots__ = ("_texts",)

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._texts: dict[Any, str] = {}


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 (engines use their local time)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One model's template. `special_tokens`: `bos_token` and the like, as the template names them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises: ConfigError: the template is not valid Jinja."""
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._wants_parts = _walks_content(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error
        self._template.globals = dict(self._template.globals)  # a chain, which each rendering would copy slowly
        self._special_tokens = dict(special_tokens)
        self._takes_late_system = self._accepts([*_LATE_SYSTEM])
        self._knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        *,
        documents: list[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        form: Form | None = None,
    ) -> str:
        """Return the prompt's text. `tools`: as `form` shows them. `variables`: what the client adds for the template
        (`chat_template_kwargs`). `form`: vLLM's unless given.

        Raises: RequestError: messages of a wrong form, or the template refuses them.
        """
        shown = _developer_as_system(messages, self._knows_developer)
        if not self._takes_late_system:
            shown = _system_first(shown)
        form = form or VLLM
        conversation = [self._prepared(message, form) for message in shown]
        if continue_final_message:
            _mark_final(conversation)
        context = {key: value for key, value in (variables or {}).items() if key not in _RESERVED}
        try:
            text = self._template.render(
                **{**self._special_tokens, "add_generation_prompt": add_generation_prompt, **context},
                messages=conversation,
                tools=tools or None,
                documents=documents,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses the messages: {error.message}", param="messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            raise RequestError(f"the chat template fails on the messages: {error}", param="messages") from error
        return _cut_at_mark(text) if continue_final_message else text

    def _accepts(self, conversation: list[Message]) -> bool:
        try:
            self._template.render(messages=conversation, add_generation_prompt=False, **self._special_tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return False
        return True

    def _prepared(self, message: Message, form: Form) -> Message:
        """Return a message as engines give it to the template: content as text or parts, tool arguments as objects."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("each message must be an object with a `role`", param="messages")
        role = message["role"]
        prepared: Message = {"role": role, "content": self._content(message.get("content"), role, form)}
        if role == "assistant":
            if calls := message.get("tool_calls"):
                prepared["tool_calls"] = [form.tool_call(call, *_function_of(call)) for call in calls]
            if (reasoning := message.get("reasoning")) is not None:
                prepared["reasoning"] = prepared["reasoning_content"] = reasoning
        elif role == "tool" and "tool_call_id" in message:
            prepared["tool_call_id"] = message["tool_call_id"]
        if isinstance(message.get("name"), str):
            prepared["name"] = message["name"]
        return prepared

    def _content(self, content: Any, role: str, form: Form) -> Any:
        parts = [] if content is None else [content] if isinstance(content, str) else content
        if not isinstance(parts, list):
            raise RequestError("a message's `content` must be text or a list of parts", param="messages")
        texts = [text for text in map(_part_text, parts) if text is not None]
        if self._wants_parts and role != "tool":
            return [{"type": "text", "text": text} for text in texts]
        return form.between_parts.join(texts)


def _part_text(part: Any) -> str | None:
    """Return the text of a content part, None for an image and the like: only text takes part in matching prefixes."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError("a content part must be text or an object with a `type`", param="messages")
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else None


def _developer_as_system(messages: list[Message], known: bool) -> list[Message]:
    """Return the messages, with all `developer` ones as one `system` message first unless the template knows them."""
    if known or not any(isinstance(message, dict) and message.get("role") == "developer" for message in messages):
        return messages
    system = [message for message in messages if message.get("role") in ("developer", "system")]
    others = [message for message in messages if message.get("role") not in ("developer", "system")]
    texts = [_joined_text(message.get("content")) for message in system]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]


def _system_first(messages: list[Message]) -> list[Message]:
    """Return the messages with later `system` ones merged into the first, as vLLM shows Anthropic's to such templates.

    >>> _system_first([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}])
    [{'role': 'system', 'content': 'b'}, {'role': 'user', 'content': 'a'}]
    """
    if not any(map(_is_system, messages[1:])):
        return messages
    texts = [_joined_text(message.get("content")) for message in messages if _is_system(message)]
    return [{"role": "system", "content": "".join(texts)}, *(m for m in messages if not _is_system(m))]


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "system"


def _joined_text(content: Any) -> str:
    parts = content if isinstance(content, list) else [] if content is None else [content]
    return "\n".join(text for text in map(_part_text, parts) if text)


@dataclass(frozen=True, slots=True)
class Form:
    """How an engine shows tools and calls to templates: the order of keys, the nulls, what it leaves out.

    `tool`: of a tool and its function. `tool_call`: of a call, its function, and the arguments as an object.
    `between_parts`: what joins the texts of a message's parts. `by_choice`: it hides tools that `tool_choice` excludes.
    """

    tool: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]
    tool_call: Callable[[dict[str, Any], dict[str, Any], dict[str, Any]], dict[str, Any]]
    between_parts: str
    by_choice: bool

    def tools(self, given: list[Any], only: str | None = None) -> list[Any]:
        """Return the tools as templates see them; with `only`, those of that name. Raises: RequestError."""
        pairs = [(tool, _function(tool)) for tool in given]
        return [self.tool(tool, function) for tool, function in pairs if only in (None, function.get("name"))]


def _vllm_tool(tool: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    shown = {key: function.get(key) for key in ("name", "description", "parameters")}
    shown |= {key: function[key] for key in ("strict", "defer_loading") if function.get(key) is not None}
    return _Shown({"type": tool.get("type", "function"), "function": _shown_function(shown)})


def _vllm_call(call: dict[str, Any], function: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    shown = {"arguments": arguments} | ({"name": function["name"]} if "name" in function else {})
    return {key: call[key] for key in ("id",) if key in call} | {"function": shown, "type": "function"}


_SGLANG_KEYS = ("description", "name", "parameters", "strict", "defer_loading")


def _sglang_tool(tool: dict[str, Any], function: dict[str, Any]) -> dict[str, Any]:
    deferred = tool.get("defer_loading")
    shown = {key: function.get(key) for key in _SGLANG_KEYS}
    if shown["defer_loading"] is None:
        shown["defer_loading"] = deferred
    order = [key for key in function if key in shown]
    order += [key for key in shown if key not in function]
    left_out = {key for key in ("strict", "defer_loading") if shown[key] is None}
    shown = {key: shown[key] for key in order if key not in left_out}
    whole = {"type": tool.get("type", "function"), "function": _shown_function(shown), "defer_loading": deferred}
    return _Shown(whole)


def _sglang_call(call: dict[str, Any], function: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    shown = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": shown}


VLLM = Form(_vllm_tool, _vllm_call, between_parts="\n", by_choice=False)
SGLANG = Form(_sglang_tool, _sglang_call, between_parts=" ", by_choice=True)
"""As SGLang 0.5.23 dumps them: a function's keys in the client's order, then those that it did not give."""


def form_of(engine: str) -> Form:
    """Return the form of an engine, by the name that its adapter reports."""
    return SGLANG if engine == "sglang" else VLLM


def _function(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(function := tool.get("function"), dict):
        raise RequestError("each of `tools` must be an object with a `function`", param="tools")
    return function


def _shown_function(function: dict[str, Any]) -> dict[str, Any]:
    if isinstance(function.get("parameters"), dict):
        function["parameters"] = _Shown(function["parameters"])
    return _Shown(function)


def _function_of(call: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the function of a tool call, and its arguments. Raises: RequestError."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        raise RequestError("each of `tool_calls` must be an object with a `function`", param="messages")
    return function, _arguments(function.get("arguments"))


def _arguments(given: Any) -> dict[str, Any]:
    """Return the arguments as an object; an empty one for anything else.

    A model may have made that mistake earlier in the conversation, which must go on.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return {}
    return given if isinstance(given, dict) else {}


def _mark_final(conversation: list[Message]) -> None:
    """Mark the end of the last message's text, so that the rendered prompt can be cut there."""
    if not conversation:
        raise RequestError("`continue_final_message` needs a last message", param="continue_final_message")
    last = conversation[-1]
    if isinstance(content := last["content"], str):
        last["content"] = content + _CONTINUE_MARK
    elif content:
        last["content"] = [*content[:-1], {"type": "text", "text": content[-1]["text"] + _CONTINUE_MARK}]


def _cut_at_mark(text: str) -> str:
    """Return the text up to the end of the last message.

    The mark ends in a space. A template that trims this space would have trimmed the message's end too.
    """
    head, found, tail = text.rpartition(_CONTINUE_MARK.rstrip())
    if not found:
        raise RequestError("the chat template does not show the last message", param="continue_final_message")
    return head if tail.startswith(" ") else head.rstrip()


def _walks_content(tree: nodes.Template) -> bool:
    """Return whether the template loops over the parts of a message's content. Others expect one text."""
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    for inner in _unwrapped(node):
        match inner:
            case nodes.Getattr(attr="content") | nodes.Name(name="content"):
                return True
            case nodes.Getitem(arg=nodes.Const(value="content")):
                return True
    return False


def _unwrapped(node: nodes.Node | None) -> Iterator[nodes.Node]:
    """Yield the expression, then what its filters and slices apply to."""
    while node is not None:
        yield node
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        node = node.node if isinstance(node, nodes.Filter) or sliced else None  # type: ignore[attr-defined]
