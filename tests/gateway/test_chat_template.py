from __future__ import annotations

from typing import Any

import msgspec
import pytest

from preble.errors import ConfigError, RequestError
from preble.prompts.tokens.chat_template import SGLANG, VLLM, ChatTemplate

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def rendered(source: str, messages: Any, tools: Any = None, **options: Any) -> str:
    shown = VLLM.tools(tools) if tools else None
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, shown, **options)


def test_roles_contents_special_tokens_and_the_generation_prompt() -> None:
    assert rendered(PLAIN, user("hi")) == "<s><|user|>hi<|end|><|assistant|>"
    assert rendered(PLAIN, user("hi"), add_generation_prompt=False) == "<s><|user|>hi<|end|>"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "image_url", "image_url": {"url": "http://x"}}], "a"),
        (None, ""),
        ([], ""),
    ],
)
def test_parts_become_one_text_for_a_template_that_wants_text(content: Any, text: str) -> None:
    assert rendered("{{ messages[0].content }}", user(content)) == text


def test_text_becomes_parts_for_a_template_that_walks_them_but_not_of_tools() -> None:
    messages = [*user("a"), *user([{"type": "text", "text": "b"}])]
    assert rendered(PARTS, messages) == "[text:a][text:b]"
    tool = [{"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "x"}]}]
    assert rendered(PARTS + "{{ messages[0].content }}", tool).endswith("x")


def test_tools_are_shown_in_the_engines_order_with_its_nulls() -> None:
    tools = [{"function": {"parameters": {"b": 1, "a": 2}, "name": "f", "odd": 1}, "type": "function"}]
    shown = '{"type": "function", "function": {"name": "f", "description": null, "parameters": {"b": 1, "a": 2}}}'
    assert rendered("{{ tools[0] | tojson }}", user("a"), tools) == shown
    assert rendered("{{ tools is none }}", user("a"), []) == "True"


def test_sglang_keeps_the_clients_order_and_says_whether_a_tool_is_deferred() -> None:
    function = {"parameters": {"b": 1, "a": 2}, "name": "f", "odd": 1}
    call = {"id": "1", "function": {"arguments": '{"x": 1}', "name": "f"}}
    messages = [
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    source = "{{ messages[0].content }}{{ tools | tojson }}{{ messages[1].tool_calls[0] | tojson }}"
    shown = SGLANG.tools([{"type": "function", "function": function}])
    assert ChatTemplate(source, {}).render(messages, shown, form=SGLANG) == (
        'a b[{"type": "function", "function": {"parameters": {"b": 1, "a": 2}, "name": "f", "description": null}, '
        '"defer_loading": null}]{"id": "1", "index": null, "type": "function", "function": {"name": "f", '
        '"arguments": {"x": 1}}}'
    )


def test_sglang_shows_a_deferred_tool_and_the_only_one_that_may_be_called() -> None:
    tools = [{"function": {"name": name, "strict": True}, "defer_loading": name == "g"} for name in "fg"]
    [shown] = SGLANG.tools(tools, "g")
    assert msgspec.json.encode(shown) == (
        b'{"type":"function","function":{"name":"g","strict":true,"description":null,"parameters":null,'
        b'"defer_loading":true},"defer_loading":true}'
    )
    assert SGLANG.tools(tools, "") == []


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"x": [1]}', '{"x": [1]}'), ({"x": 1}, '{"x": 1}'), ("", "{}"), ("not json", "{}"), ("[1]", "{}")],
)
def test_arguments_of_tool_calls_are_objects(arguments: Any, shown: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert rendered("{{ messages[0].tool_calls[0].function.arguments | tojson }}", messages) == shown


def test_tools_that_many_chats_have_are_rendered_alike_each_time_in_every_form() -> None:
    function = {"name": "f", "description": "é", "parameters": {"b": 1, "a": {"c": [2]}}}
    shown = VLLM.tools([{"type": "function", "function": function}])
    forms = ("", "indent=2", "sort_keys=true", "ensure_ascii=true", "separators=[',', ':']", "separators=(', ', ':')")
    parts = ("tools[0]", "tools[0].function", "tools[0].function.parameters", "tools[0].function.parameters.a")
    template = ChatTemplate("|".join(f"{{{{ {part} | tojson({form}) }}}}" for form in forms for part in parts), {})
    texts = [template.render(user("a"), shown) for _ in range(2)]
    plain = msgspec.json.decode(msgspec.json.encode(shown))  # without any memory
    assert texts == [template.render(user("a"), plain)] * 2


def test_a_template_cannot_change_the_tools_of_other_chats() -> None:
    shown = VLLM.tools([{"type": "function", "function": {"name": "f", "parameters": {}}}])
    for change in ("update({'name': 'g'})", "pop('name')", "clear()", "setdefault('x', 1)"):
        with pytest.raises(RequestError, match="refuses"):
            ChatTemplate("{{ tools[0].function.%s }}" % change, {}).render(user("a"), shown)  # noqa: UP031
    assert shown[0]["function"]["name"] == "f"


def test_tool_calls_are_shown_in_the_engines_order() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}, "id": "1"}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    shown = '{"id": "1", "function": {"arguments": {}, "name": "f"}, "type": "function"}'
    assert rendered("{{ messages[0].tool_calls[0] | tojson }}", messages) == shown


def test_json_is_not_escaped_for_html_and_can_be_indented() -> None:
    assert rendered("{{ messages[0].content | tojson }}", user("<é>")) == '"<é>"'
    assert rendered("{{ {'a': 1} | tojson(indent=2) }}", user("")) == '{\n  "a": 1\n}'


def test_the_environment_has_what_templates_use() -> None:
    assert rendered("{{ strftime_now('on %% date') }}", user("")) == "on % date"
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert rendered(loop, user("")) == "01"
    assert rendered("{% generation %}x{{ messages[0].content }}{% endgeneration %}", user("y")) == "xy"
    assert rendered("{% if true %}\n  a\n{% endif %}\n", user("")) == "  a\n"


def test_the_clients_variables_reach_the_template_but_cannot_replace_messages() -> None:
    variables = {"enable_thinking": False, "messages": user("other"), "tools": [1]}
    assert rendered("{{ enable_thinking }}{{ messages[0].content }}{{ tools }}", user("a"), variables=variables) == (
        "FalseaNone"
    )


def test_a_continued_message_ends_the_prompt() -> None:
    messages = [*user("q"), {"role": "assistant", "content": "The answer is "}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    assert rendered(PLAIN, messages, **options).endswith("<|assistant|>The answer is ")
    trimming = PLAIN.replace("m['content']", "m['content'] | trim")
    assert rendered(trimming, messages, **options).endswith("<|assistant|>The answer is")
    assert rendered(PARTS, messages, **options) == "[text:q][text:The answer is "
    with pytest.raises(RequestError, match="does not show"):
        rendered("fixed", messages, **options)
    with pytest.raises(RequestError, match="needs a last message"):
        rendered(PLAIN, [], **options)


def test_developer_messages_become_one_system_message_unless_the_template_knows_them() -> None:
    messages = [{"role": "system", "content": "a"}, *user("q"), {"role": "developer", "content": "b"}]
    shown = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    assert rendered(shown, messages) == "system=a\n\nb;user=q;"
    assert rendered(shown + "{# 'developer' #}", messages) == "system=a;user=q;developer=b;"


@pytest.mark.parametrize(
    ("source", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", user("a"), "roles must alternate"),
        ("{{ messages[0].missing.deeper }}", user("a"), "refuses"),
        ("{{ 1 + messages[0].content }}", user("a"), "fails"),
        ("x", ["text"], "object with a `role`"),
        ("x", [{"content": "a"}], "object with a `role`"),
        ("x", user(7), "`content` must be"),
        ("x", user([7]), "content part"),
        ("x", [{"role": "assistant", "tool_calls": [7]}], "`tool_calls`"),
        ("{{ messages.__class__.__mro__ }}", user("a"), "refuses"),
        ("{{ messages.append(1) }}", user("a"), "refuses"),
    ],
)
def test_what_a_template_refuses_is_the_clients_error(source: str, messages: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        rendered(source, messages)


def test_wrong_tools_are_refused() -> None:
    with pytest.raises(RequestError, match="`tools`"):
        rendered("x", user("a"), ["f"])


def test_a_template_that_is_not_jinja_is_the_operators_error() -> None:
    with pytest.raises(ConfigError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})


def test_a_late_system_message_moves_to_the_front_where_the_template_wants_it_there() -> None:
    """As vLLM shows Anthropic's inline system messages, such as Claude Code's reminders."""
    picky = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    given = [{"role": role, "content": role[0]} for role in ("system", "user", "system", "user")]
    assert ChatTemplate(picky, {}).render(given) == "[system]ss[user]u[user]u"
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert ChatTemplate(plain, {}).render(given) == "[system]s[user]u[system]s[user]u"
