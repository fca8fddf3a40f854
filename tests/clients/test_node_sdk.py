"""The unmodified `openai` package for Node.js."""

import json
import os
import subprocess

from processes import HERE, ROOT


def test_the_node_client(gateway, model):
    env = {**os.environ, "NODE_PATH": str(ROOT / "target/npm/node_modules")}
    done = subprocess.run(
        ["node", HERE / "node_client.cjs", gateway.url + "/v1", model], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["whole"].strip()
    assert seen["model"] == model
    assert len(seen["pieces"]) > 1
    assert seen["usage"] > 0
    assert seen["left"] == 3
    assert model in seen["models"]
    assert seen["error"]["name"] == "NotFoundError"
    assert seen["error"]["status"] == 404
    assert model in seen["error"]["message"].removeprefix(f"404 the model '{model}x'")
