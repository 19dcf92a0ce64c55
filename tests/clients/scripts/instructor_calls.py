"""instructor against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import asyncio
import sys
from enum import Enum

import instructor
import openai
from pydantic import BaseModel

url, model = sys.argv[1:]
base = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
HI = [{"role": "user", "content": "Hi"}]


class Pet(Enum):
    CAT = "cat"
    DOG = "dog"


class Seen(BaseModel):
    pet: Pet
    good: bool


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(openai.OpenAI(**base), mode=mode)
    seen = client.chat.completions.create(model=model, messages=HI, response_model=Seen, max_tokens=200, max_retries=0)
    assert isinstance(seen.pet, Pet)


async def later() -> Seen:
    client = instructor.from_openai(openai.AsyncOpenAI(**base), mode=instructor.Mode.JSON_SCHEMA)
    return await client.chat.completions.create(
        model=model, messages=HI, response_model=Seen, max_tokens=200, max_retries=0
    )


assert isinstance(asyncio.run(later()).good, bool)
print("ok")
