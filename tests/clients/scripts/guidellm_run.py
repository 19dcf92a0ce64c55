"""guidellm against a gateway: run in an environment that has it, with the gateway's URL and a model's name.

It takes torch and transformers from vLLM's environment: PyPI's torch has several GB of CUDA.
"""

import json
import os
import site
import sys
import tempfile
from pathlib import Path

site.addsitedir(os.environ["ENGINE_PACKAGES"])  # after our own; the processes that it starts get the same path


def main(url: str, model: str) -> None:
    from guidellm.__main__ import cli

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        cli(
            [
                "run",
                *("--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/chat/completions"),
                *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
                *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=4"),
                *("--tokenizer", f"kind=huggingface_auto,model={os.environ['TOKENIZER']}"),
                *("--output", f"kind=json,path={report}"),
            ],
            standalone_mode=False,
        )
        [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), totals


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("ok")
