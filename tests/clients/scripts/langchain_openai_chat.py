"""LangChain against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, model = sys.argv[1:]
base = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}


@tool
def look(at: int) -> str:
    """Look."""
    return "a cat"


chat = ChatOpenAI(**base, max_tokens=5)
answer = chat.invoke("Hi")
assert answer.content and answer.usage_metadata["output_tokens"] == 5
assert "".join(str(chunk.content) for chunk in chat.stream("Hi"))
assert len(chat.batch(["Hi", "Ho", "Ha"])) == 3
assert OpenAI(**base, max_tokens=5).invoke("Hi")
assert ChatOpenAI(**base, max_tokens=20, use_responses_api=True).invoke("Hi").text
if "PREBLE_EMULATED" in os.environ:
    called = ChatOpenAI(**base).bind_tools([look]).invoke("Hi")
    assert called.tool_calls[0]["name"] == "look" and isinstance(called.tool_calls[0]["args"]["at"], int)
    schema = {"title": "trip", "description": "A trip.", "type": "object", "properties": {"city": {"type": "string"}}}
    assert ChatOpenAI(**base).with_structured_output(schema).invoke("Hi")["city"]
    vectors = OpenAIEmbeddings(**base, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert len(vectors) == 2 and len(vectors[0]) > 1
print("ok")
