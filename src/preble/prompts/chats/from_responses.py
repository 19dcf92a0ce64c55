"""What vLLM makes of a body for OpenAI's Responses before it renders it: the same conversation as an OpenAI chat.

Lenient: what cannot be translated is left out, since the engine judges the body. What an earlier response said is known
to its engine only.
"""

from __future__ import annotations

from typing import Any

import msgspec

Item = dict[str, Any]
_KEPT = ("chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs", "cache_salt")


def chat_of_response(given: Item) -> Item:
    """Return the chat that a decoded body for `/v1/responses` becomes: what rendering it needs, and what it may say."""
    instructions, asked = given.get("instructions"), given.get("input")
    messages: list[Item] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(asked, str):
        messages.append({"role": "user", "content": asked})
    items = [item for item in asked if isinstance(item, dict)] if isinstance(asked, list) else []
    for item in items:
        _add(item, messages)
    continues = bool(items) and _is_unfinished(items[-1])
    chat: Item = {
        "model": given.get("model"),
        "messages": messages,
        "add_generation_prompt": not continues,
        "continue_final_message": continues,
    }
    chat |= {name: given[name] for name in _KEPT if given.get(name) is not None}
    return chat | _tools(given) | _wishes(given)


def _tools(given: Item) -> Item:
    tools = given.get("tools")
    listed = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    chat: Item = {}
    if functions := [_tool(tool) for tool in listed if tool.get("type") == "function"]:
        chat["tools"] = functions
    choice = given.get("tool_choice")
    if isinstance(choice, dict):
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif isinstance(choice, str):
        chat["tool_choice"] = choice
    return chat


def _wishes(given: Item) -> Item:
    """Return how hard to think, and which form the answer is to have."""
    wishes: Item = {}
    if isinstance(reasoning := given.get("reasoning"), dict) and isinstance(effort := reasoning.get("effort"), str):
        wishes["reasoning_effort"] = effort
    form = text.get("format") if isinstance(text := given.get("text"), dict) else None
    if isinstance(form, dict) and form.get("type") == "json_schema":
        wishes["response_format"] = {"type": "json_schema", "json_schema": form}
    elif isinstance(form, dict) and form.get("type") == "json_object":
        wishes["response_format"] = {"type": "json_object"}
    return wishes


def _is_unfinished(item: Item) -> bool:
    """Return whether the answer goes on with this item, instead of following it."""
    return item.get("type", "message") in ("message", "reasoning") and item.get("status") in (
        "in_progress",
        "incomplete",
    )


def _tool(tool: Item) -> Item:
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _add(item: Item, messages: list[Item]) -> None:
    """Add an item of the input as a message, or to the assistant's message before it."""
    before = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item.get("type", "message"):
        case "function_call" | "custom_tool_call":
            _add_call(_call(item), before, messages)
        case "function_call_output" | "custom_tool_call_output":
            messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
        case "reasoning":
            _add_field("reasoning", _reasoning(item), before, messages)
        case _ if item.get("role") == "assistant" and (text := _first_text(item.get("content"))) is not None:
            _add_field("content", text, before, messages)
        case _ if isinstance(item.get("role"), str):
            messages.append(item)


def _add_field(name: str, value: str, before: Item | None, messages: list[Item]) -> None:
    if before is not None and before.get(name) is None:
        before[name] = value
    else:
        messages.append({"role": "assistant", name: value})


def _add_call(call: Item, before: Item | None, messages: list[Item]) -> None:
    if before is not None:
        before.setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _call(item: Item) -> Item:
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item.get("input") or ""}).decode()
    name = "__".join(part for part in (item.get("namespace"), item.get("name")) if isinstance(part, str))
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: Item) -> str:
    parts = item.get("content") or item.get("summary")
    return _first_text(parts) or ""


def _first_text(content: Any) -> str | None:
    if isinstance(content, list):
        content = content[0].get("text") if content and isinstance(content[0], dict) else None
    return content if isinstance(content, str) else None
