"""LiteLLM against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import asyncio
import os
import sys

import litellm

url, model = sys.argv[1:]
HI = [{"role": "user", "content": "Hi"}]
base = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
answer = litellm.completion(model=f"hosted_vllm/{model}", messages=HI, max_tokens=5, **base)
assert answer.usage.completion_tokens == 5
chunks = litellm.completion(model=f"openai/{model}", messages=HI, max_tokens=5, stream=True, **base)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="Hi", max_tokens=5, **base)
assert text.choices[0].text


async def message() -> None:
    said = await litellm.anthropic.messages.acreate(
        model=f"anthropic/{model}", messages=HI, max_tokens=5, api_base=url, api_key="none"
    )
    assert said["usage"]["output_tokens"] == 5


asyncio.run(message())
try:
    litellm.completion(model="openai/none", messages=HI, **base)
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("no NotFoundError")
vectors = litellm.embedding(model=f"openai/{os.environ['EMBEDDING_MODEL']}", input=["a", "b"], **base).data
assert len(vectors) == 2
print("ok")
