"""What vLLM makes of an Anthropic message before it renders it: the same conversation as an OpenAI chat.

Lenient: what cannot be translated is left out, since the engine judges the body.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

_BILLING = "x-anthropic-billing-header"
"""Claude Code begins a system block with it: a hash of the request, which engines leave out."""

Part = dict[str, Any]


def chat_of_message(given: Part) -> Part:
    """Return the chat that a decoded body for `/v1/messages` becomes: what rendering it needs, and what it may say."""
    system = _texts_of_system(given.get("system"))
    messages = [{"role": "system", "content": "".join(system)}] if system else []
    for message in _parts(given.get("messages")):
        messages += _translated(message)
    chat: Part = {"model": given.get("model"), "messages": messages}
    for name in ("chat_template_kwargs", "cache_salt"):
        if given.get(name) is not None:
            chat[name] = given[name]
    if isinstance(tools := given.get("tools"), list):
        chat["tools"] = [_tool(tool) for tool in _parts(tools)]
    if choice := _choice(given.get("tool_choice")):
        chat["tool_choice"] = choice
    return chat | _wishes(given)


def _wishes(given: Part) -> Part:
    """Return how hard to think, and which form the answer is to have."""
    wishes: Part = {}
    config = given.get("output_config")
    config = config if isinstance(config, dict) else {}
    if isinstance(effort := config.get("effort"), str):
        wishes["reasoning_effort"] = effort
    if isinstance(thinking := given.get("thinking"), dict) and thinking.get("type") == "disabled":
        wishes["reasoning_effort"] = "none"
    if isinstance(form := config.get("format"), dict) and isinstance(schema := form.get("schema"), dict):
        wishes["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    return wishes


def _choice(choice: Any) -> Any:
    """Return Anthropic's choice of a tool as OpenAI's."""
    if not isinstance(choice, dict):
        return None
    if choice.get("type") == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return {"auto": "auto", "any": "required", "none": "none"}.get(str(choice.get("type")))


def _texts_of_system(system: Any) -> list[str]:
    """Return the texts of a system prompt or message, without Claude Code's billing header."""
    if isinstance(system, str):
        return [system] if system else []
    texts = [part["text"] for part in _parts(system) if part.get("type") == "text" and _is_text(part.get("text"))]
    return [text for text in texts if text and not text.startswith(_BILLING)]


def _parts(content: Any) -> list[Part]:
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _translated(message: Part) -> Iterator[Part]:
    """Yield the messages of a chat that one of Anthropic's messages becomes: tool results become messages before it."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        if text := "".join(text for text in _texts_of_system(content) if not text.startswith(_BILLING)):
            yield {"role": "system", "content": text}
        return
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    shown: Part = {"role": role}
    parts: list[Part] = []
    calls: list[Part] = []
    reasoning: list[str] = []
    for part in _parts(content):
        match part.get("type"):
            case "text" if part.get("text"):
                parts.append({"type": "text", "text": part["text"]})
            case "image" if isinstance(part.get("source"), dict):
                parts.append(_image(part["source"]))
            case "thinking" if _is_text(part.get("thinking")):
                reasoning.append(part["thinking"])
            case "tool_use":
                calls.append(_call(part))
            case "tool_result" if role == "user":
                yield from _tool_result(part)
            case "tool_result":
                result = part.get("content") or ""
                parts.append({"type": "text", "text": f"Tool result: {result}"})
    if reasoning:
        shown["reasoning"] = "".join(reasoning)
    if calls:
        shown["tool_calls"] = calls
    if parts:
        shown["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if role != "user" or "content" in shown:
        yield shown


def _image(source: Part) -> Part:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _call(part: Part) -> Part:
    arguments = msgspec.json.encode(part.get("input") or {}).decode()
    return {
        "id": part.get("id") or "",
        "type": "function",
        "function": {"name": part.get("name") or "", "arguments": arguments},
    }


def _tool_result(part: Part) -> Iterator[Part]:
    content, call_id = part.get("content"), part.get("tool_use_id") or ""
    inner = _parts(content)
    texts = [item.get("text", "") for item in inner if item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(text for text in texts if _is_text(text))
    yield {"role": "tool", "tool_call_id": call_id, "content": text}
    sources = [item.get("source") for item in inner if item.get("type") == "image"]
    if images := [_image(source) for source in sources if isinstance(source, dict)]:
        yield {"role": "user", "content": images}
    names = [item.get("tool_name") or item.get("name") for item in inner if item.get("type") == "tool_reference"]
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        yield {"role": "tool", "tool_call_id": call_id, "content": references}


def _tool(tool: Part) -> Part:
    schema = tool.get("input_schema")
    parameters = {**schema, **({} if "type" in schema else {"type": "object"})} if isinstance(schema, dict) else {}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    function |= {key: tool[key] for key in ("strict", "defer_loading") if tool.get(key) is not None}
    return {"type": "function", "function": function}
