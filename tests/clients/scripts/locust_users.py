"""locust against a gateway: run in an environment that has it, with the gateway's URL and a model's name.

It starts locust with this file, whose three users are stopped after thirty requests; one that fails makes the status 1.
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
    import gevent
    from locust import FastHttpUser, events, task
    from locust.env import Environment

    @events.init.add_listener
    def stop_after_thirty(environment: Environment, **_: object) -> None:
        """Not a user: it would be stopped itself before it has stopped all of them."""

        def stop() -> None:
            while environment.stats.total.num_requests < 30:
                gevent.sleep(0.05)
            environment.runner.quit()

        gevent.spawn(stop)

    class Asker(FastHttpUser):
        @task
        def ask(self) -> None:
            chat = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            self.client.post("/v1/chat/completions", json=chat)
            with self.client.post("/v1/chat/completions", json=chat | {"stream": True}, stream=True) as answer:
                assert answer.text.strip().endswith("data: [DONE]")
