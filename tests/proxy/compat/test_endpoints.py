"""An installation without the endpoints of other products works, and loads nothing of them."""

import subprocess
import sys

PROGRAM = """
import importlib.metadata as metadata, sys
real = metadata.entry_points
metadata.entry_points = lambda **select: [] if select == {"group": "forkpoint.endpoints"} else real(**select)
import sandboxes.plugins
sandboxes.plugins.entry_points = metadata.entry_points

import tempfile
from pathlib import Path
import httpx
from proxy.settings import Settings
from tests.proxy.serving import serving

with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as proxy:
    answers = [
        proxy.client.get("/t/task/r/1/docker/version"), proxy.client.get("/t/task/e2b/sandboxes"),
        proxy.exec("1", "echo hi", task="task"),
    ]
print([each.status_code for each in answers])
print([name for name in sys.modules if name.startswith(("proxy.compat.docker", "proxy.compat.e2b"))])
"""


def test_proxy_works_without_docker_and_e2b() -> None:
    """Their entry points are all that the core knows of them: without these, their URLs are 404."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    assert run.stdout.splitlines()[-2:] == ["[404, 404, 200]", "[]"]
