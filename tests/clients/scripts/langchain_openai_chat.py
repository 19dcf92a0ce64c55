"""LangChain against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import os
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, model = sys.argv[1:]
base = {"model": model, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}


@tool
def look(at: Literal[1, 2]) -> str:
    """Look."""
    return "a cat"


chat = ChatOpenAI(**base, max_tokens=5)
answer = chat.invoke("Hi")
assert answer.content and answer.usage_metadata["output_tokens"] == 5
assert "".join(str(chunk.content) for chunk in chat.stream("Hi"))
assert len(chat.batch(["Hi", "Ho", "Ha"])) == 3
assert OpenAI(**base, max_tokens=5).invoke("Hi")
assert ChatOpenAI(**base, max_tokens=20, use_responses_api=True).invoke("Hi").text
called = ChatOpenAI(**base).bind_tools([look], tool_choice="look").invoke("Hi")
assert called.tool_calls[0]["name"] == "look" and called.tool_calls[0]["args"]["at"] in (1, 2)
city = {"enum": ["Oslo", "Rome"]}
trip = {"title": "trip", "description": "A trip.", "type": "object", "properties": {"city": city}, "required": ["city"]}
assert ChatOpenAI(**base).with_structured_output(trip).invoke("Hi")["city"] in city["enum"]
embeddings = OpenAIEmbeddings(**base | {"model": os.environ["EMBEDDING_MODEL"]}, check_embedding_ctx_length=False)
vectors = embeddings.embed_documents(["a", "b"])
assert len(vectors) == 2 and len(vectors[0]) > 1
print("ok")
