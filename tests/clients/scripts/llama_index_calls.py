"""LlamaIndex against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import asyncio
import os
import sys

from llama_index.core.llms import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

url, model = sys.argv[1:]
base = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0}
HI = [ChatMessage(role="user", content="Hi")]

chat = OpenAILike(model=model, is_chat_model=True, max_tokens=5, **base)
assert chat.chat(HI).message.content
assert "".join(chunk.delta or "" for chunk in chat.stream_chat(HI))
assert asyncio.run(chat.achat(HI)).message.content
text = OpenAILike(model=model, is_chat_model=False, max_tokens=5, **base)
assert text.complete("Hi").text
assert "".join(chunk.delta or "" for chunk in text.stream_complete("Hi"))
embedding = OpenAILikeEmbedding(model_name=os.environ["EMBEDDING_MODEL"], **base)
assert len(embedding.get_text_embedding_batch(["a", "b"])) == 2
print("ok")
