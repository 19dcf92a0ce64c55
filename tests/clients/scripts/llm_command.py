"""The command `llm` against a gateway: run in an environment that has it, with the gateway's URL and a model's name."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    entry = {"model_id": "preble", "model_name": model, "api_base": f"{url}/v1"}
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps([entry]))
    environ = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
    command = [sys.executable, "-m", "llm", "prompt", "--model", "preble", "--option", "max_tokens", "5", "Hi"]
    for how in ([], ["--no-stream"]):
        answer = subprocess.run([*command, *how], env=environ, check=True, stdout=subprocess.PIPE, text=True)
        assert answer.stdout.strip()
print("ok")
