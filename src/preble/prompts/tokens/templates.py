"""The chat templates of a model's folder, as they apply to the body of a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from preble.errors import ConfigError, RequestError
from preble.prompts.endpoints.bodies import ChatBody
from preble.prompts.tokens.chat_template import SGLANG, VLLM, ChatTemplate, Form, form_of
from preble.prompts.tokens.known_tools import KnownTools

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NULL = msgspec.Raw(b"null")


class _Named(msgspec.Struct):
    name: str


class _ToolChoice(msgspec.Struct):
    function: _Named


_CHOICE = msgspec.json.Decoder(str | _ToolChoice | None)


class ModelTemplates:
    """The template of a model, and its own one for chats with tools where it has one. For several threads.

    `is_there`: whether the model has a template.
    """

    def __init__(self, folder: Path, chat_template: Path | None = None, tools_bytes: int = 0) -> None:
        """`chat_template`: in place of the model's own. `tools_bytes`: for decoded tools. Raises: ConfigError."""
        config = json_file(folder / "tokenizer_config.json")
        special = _special_tokens(json_file(folder / "special_tokens_map.json") | config)
        default, for_tools = _template_sources(folder, config, chat_template)
        self._template = ChatTemplate(default, special) if default else None
        self._tool_template = ChatTemplate(for_tools, special) if for_tools else self._template
        self._known_tools = {form: KnownTools(tools_bytes // 2) for form in (VLLM, SGLANG)}
        self.is_there = self._template is not None

    def knows_tools(self, parsed: ChatBody, engine: str = "") -> bool:
        """Return whether the chat's tools are remembered, so that they need not be decoded."""
        return self._known_tools[form_of(engine)].get(bytes(parsed.tools))[0]

    def render(self, parsed: ChatBody, engine: str = "", messages: list[Any] | None = None) -> str:
        """Return the prompt's text of a chat. `engine`: whose form it has. `messages`: those of the body, decoded.

        Raises: RequestError.
        """
        form = form_of(engine)
        tools = self._tools(parsed, form)
        template = self._tool_template if tools else self._template
        if template is None:
            raise RequestError("the model has no chat template; use /v1/completions")
        return template.render(
            messages or decoded_list(parsed.messages, "messages") or [],
            tools,
            documents=None if parsed.documents == _NULL else decoded_list(parsed.documents, "documents"),
            add_generation_prompt=parsed.add_generation_prompt,
            continue_final_message=parsed.continue_final_message,
            variables=_variables(parsed),
            form=form,
        )

    def _tools(self, parsed: ChatBody, form: Form) -> list[Any] | None:
        """Return the tools of a chat as templates see them, None for none. Raises: RequestError."""
        raw, known = bytes(parsed.tools), self._known_tools[form]
        if form.by_choice and (only := _only_tool(parsed.tool_choice)) is not None:
            return _tools(raw, form, only)
        is_known, tools = known.get(raw)
        if not is_known:
            known.put(raw, tools := _tools(raw, form))
        return tools


def _variables(parsed: ChatBody) -> dict[str, Any]:
    given = dict(parsed.chat_template_kwargs or {})
    if parsed.reasoning_effort is not None:
        given.setdefault("reasoning_effort", parsed.reasoning_effort)
        given.setdefault("enable_thinking", parsed.reasoning_effort != "none")
    return given


def _tools(raw: bytes, form: Form, only: str | None = None) -> list[Any] | None:
    tools = decoded_list(raw, "tools")
    return form.tools(tools, only) if tools else None


def _only_tool(choice: msgspec.Raw) -> str | None:
    """Return the only tool that a chat may call, "" if it may call none, None if it may call any."""
    try:
        chosen = _CHOICE.decode(choice)
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # the engine refuses it
        return None
    return chosen.function.name if isinstance(chosen, _ToolChoice) else "" if chosen == "none" else None


def decoded_list(raw: msgspec.Raw | bytes, param: str) -> list[Any] | None:
    """Return a list in a body, None for null. Raises: RequestError."""
    try:
        return msgspec.json.decode(raw, type=list[Any] | None)
    except msgspec.ValidationError as error:
        raise RequestError(f"`{param}` must be a list", param=param) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"`{param}` is not valid JSON: {error}", param=param) from error


def json_file(path: Path) -> dict[str, Any]:
    """Return the object in a file of a model, an empty one if there is no file. Raises: ConfigError."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer file {str(path)!r} cannot be read: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like, written as a text or as an object with `content`."""
    contents = {
        name: token.get("content") if isinstance(token := config.get(name), dict) else token for name in _SPECIAL
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _template_sources(folder: Path, config: dict[str, Any], given: Path | None) -> tuple[str | None, str | None]:
    """Return the default template, and the one for requests with tools where the model has its own."""
    if given is not None:
        return _text_file(given), None
    if (file := folder / "chat_template.jinja").exists():
        return _text_file(file), None
    source = config.get("chat_template") or json_file(folder / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        by_name = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        return by_name.get("default"), by_name.get("tool_use")
    return source, None


def _text_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {str(path)!r} cannot be read: {error}") from error
