"""Run a group of rollouts with E2B's SDK (`pip install e2b`): `python examples/e2b_agent.py [proxy's URL]`.

All rollouts begin with the same calls. The later ones are answered from the tree until they make a call of their own.
"""

# mypy: disable-error-code="import-not-found"

import os
import sys

PROXY = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8700"
os.environ |= {
    "E2B_API_URL": f"{PROXY}/t/e2b-example/e2b",
    "E2B_SANDBOX_URL": f"{PROXY}/t/e2b-example/e2b",
    "E2B_API_KEY": "e2b_" + "0" * 40,
}

from e2b import Sandbox  # noqa: E402 - the import reads the environment


def rollout(name: str) -> str:
    """Run one rollout and return what it read from its server."""
    box = Sandbox.create(metadata={"name": name})
    box.files.write("/root/notes", "shared\n")
    drawn = box.commands.run("echo $RANDOM | tee /root/drawn").stdout.strip()
    server = box.commands.run("cd /root && exec python3 -m http.server 8000", background=True, timeout=0)
    box.commands.run("until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do sleep 0.05; done")
    # From here on the rollouts differ.
    box.commands.run(f"echo {name} >>/root/notes")
    page = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/notes').read().decode().split())"
    served = box.commands.run(f'python3 -c "{page}"').stdout.strip()
    server.kill()
    box.kill()
    return f"{name}: drawn {drawn}, served {served}"


if __name__ == "__main__":
    for name in ("first", "second", "third"):
        print(rollout(name))
