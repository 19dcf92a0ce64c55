"""Anthropic's SDK against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import asyncio
import sys

import anthropic

url, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "name": "look",
    "description": "Look.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "integer", "enum": [1, 2]}}, "required": ["at"]},
}
LOOK = {"max_tokens": 100, "tools": [TOOL], "tool_choice": {"type": "tool", "name": "look"}}


def messages() -> None:
    answer = client.messages.create(model=model, max_tokens=5, system="Be brief.", messages=HI)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 5 and answer.content[0].type == "text"
    with client.messages.stream(model=model, max_tokens=5, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text and final.usage.output_tokens == 5
    beta = client.beta.messages.create(model=model, max_tokens=2, messages=HI, betas=["prompt-caching-2024-07-31"])
    assert beta.usage.output_tokens == 2


def counted() -> None:
    count = client.messages.count_tokens(model=model, messages=HI, system="Be brief.")
    answer = client.messages.create(model=model, max_tokens=1, system="Be brief.", messages=HI)
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def tools() -> None:
    answer = client.messages.create(model=model, messages=HI, **LOOK)
    [use] = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and use.name == "look" and use.input["at"] in (1, 2)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "a cat"}
    after = [*HI, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    quiet = {"max_tokens": 5, "tools": [TOOL], "tool_choice": {"type": "none"}}
    answer = client.messages.create(model=model, messages=after, **quiet)
    assert answer.content[0].type == "text"
    with client.messages.stream(model=model, messages=HI, **LOOK) as stream:
        assert stream.get_final_message().content[0].input["at"] in (1, 2)


def errors() -> None:
    for kind, changes in (
        (anthropic.NotFoundError, {"model": "none"}),
        (anthropic.BadRequestError, {"max_tokens": -1}),
    ):
        try:
            client.messages.create(**{"model": model, "max_tokens": 1, "messages": HI} | changes)
        except kind as error:
            assert error.body["type"] == "error" and error.body["error"]["message"], error.body
        else:
            raise AssertionError(f"no {kind.__name__}")


async def many() -> None:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as many_at_once:
        work = [many_at_once.messages.create(model=model, max_tokens=3, messages=HI) for _ in range(8)]
        assert all(answer.usage.output_tokens == 3 for answer in await asyncio.gather(*work))


messages()
counted()
errors()
asyncio.run(many())
tools()
print("ok")
