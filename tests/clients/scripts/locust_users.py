"""locust against a gateway: run in an environment that has it, with the gateway's URL and a model's name.

It starts locust with this file, whose three users stop after thirty requests; one that fails makes the status 1.
"""

import os
import subprocess
import sys

if __name__ == "__main__":
    url, model = sys.argv[1:]
    command = [sys.executable, "-m", "locust", "--locustfile", __file__, "--headless", "--only-summary", "--host", url]
    subprocess.run([*command, "--users", "3", "--spawn-rate", "3"], env={**os.environ, "MODEL": model}, check=True)
    print("ok")
else:
    from locust import FastHttpUser, task

    class Asker(FastHttpUser):
        @task
        def ask(self) -> None:
            chat = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            self.client.post("/v1/chat/completions", json=chat)
            with self.client.post("/v1/chat/completions", json=chat | {"stream": True}, stream=True) as answer:
                assert answer.text.strip().endswith("data: [DONE]")
            if self.environment.stats.total.num_requests >= 30:
                self.environment.runner.quit()
