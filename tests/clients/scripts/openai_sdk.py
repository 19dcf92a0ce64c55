"""OpenAI's SDK against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import asyncio
import base64
import json
import os
import sys

import openai

url, model = sys.argv[1:]
embedding_model = os.environ["EMBEDDING_MODEL"]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
LOOK = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}, "max_tokens": 200}


def chats() -> None:
    answer = client.chat.completions.create(model=model, messages=HI, max_tokens=5)
    assert answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(
        model=model, messages=HI, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 5 and any(chunk.choices for chunk in chunks)
    text = client.completions.create(model=model, prompt=["a b c", "d"], max_tokens=3, n=2)
    assert len(text.choices) == 4
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=HI, max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine" and raw.headers["x-preble-replica"]


def structured() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
    answer = client.chat.completions.create(model=model, messages=HI, max_tokens=200, response_format=form)
    trip = json.loads(answer.choices[0].message.content)
    assert isinstance(trip["city"], str) and isinstance(trip["days"], int)


def tools() -> None:
    answer = client.chat.completions.create(model=model, messages=HI, **LOOK)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "look" and set(json.loads(call.function.arguments)) == {"city", "days"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "a cat"}
    after = [*HI, answer.choices[0].message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model=model, messages=after, tools=[TOOL], tool_choice="none", max_tokens=5)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls
    with client.chat.completions.stream(model=model, messages=HI, **LOOK) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "look"
    logged = client.chat.completions.create(model=model, messages=HI, max_tokens=2, logprobs=True, top_logprobs=1)
    assert len(logged.choices[0].logprobs.content) == 2


def responses() -> None:
    answer = client.responses.create(model=model, input="Hi", instructions="Be brief.", max_output_tokens=20)
    assert answer.output_text and answer.usage.output_tokens == 20
    with client.responses.stream(model=model, input="Hi", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().usage.output_tokens == 8
    assert "response.output_text.delta" in kinds and kinds[-1] in ("response.completed", "response.incomplete")


def stored() -> None:
    first = client.responses.create(model=model, input="Hi", max_output_tokens=5)
    again = client.responses.create(model=model, input="And?", previous_response_id=first.id, max_output_tokens=5)
    assert again.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).id == first.id


def embeddings() -> None:
    vectors = [row.embedding for row in client.embeddings.create(model=embedding_model, input=["a", "b"]).data]
    assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 1
    raw = client.embeddings.create(model=embedding_model, input="a", encoding_format="base64").data[0].embedding
    assert len(base64.b64decode(raw)) == 4 * len(vectors[0])


def errors() -> None:
    for call, kind in (
        (lambda: client.chat.completions.create(model="none", messages=HI), openai.NotFoundError),
        (lambda: client.chat.completions.create(model=model, messages=5), openai.BadRequestError),
        (lambda: client.responses.create(model="none", input="Hi"), openai.NotFoundError),
        (lambda: client.responses.retrieve("resp_none"), openai.NotFoundError),
        (lambda: client.embeddings.create(model="none", input="Hi"), openai.NotFoundError),
        (lambda: client.models.retrieve("none"), openai.NotFoundError),
    ):
        try:
            call()
        except kind as error:
            assert error.status_code in (400, 404)
        else:
            raise AssertionError(f"no {kind.__name__}")
    assert client.models.retrieve(model).id == model


async def many() -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as many_at_once:
        work = [many_at_once.chat.completions.create(model=model, messages=HI, max_tokens=4) for _ in range(8)]
        assert all(answer.usage.completion_tokens == 4 for answer in await asyncio.gather(*work))


chats()
errors()
responses()
asyncio.run(many())
structured()
tools()
stored()
embeddings()
print("ok")
