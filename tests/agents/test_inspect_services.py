"""Inspect AI, unmodified, evaluates samples with several sandboxes each, which are one rollout."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agents.clients import packages, run
from tests.agents.serving import real_proxy
from tests.agents.test_inspect import AS_ROOT, SLOW
from tests.machine import require_criu, require_sandboxes
from tests.sandboxes.image_archives import agent_image

COMPOSE = """
services:
  agent:
    image: IMAGE
    x-default: true
    command: tail -f /dev/null
    init: true
    working_dir: /root
    cpus: 1.0
    mem_limit: 512m
  store:
    image: IMAGE
    command:
      - python3
      - -c
      - |
        import socketserver
        memory = {}
        class Answer(socketserver.StreamRequestHandler):
            def handle(self):
                verb, *words = self.rfile.readline().decode().split() or [""]
                if verb == "set":
                    memory[words[0]] = words[1]
                    open("/opt/log", "a").write(words[0] + "\\n")
                if verb:
                    self.wfile.write((memory.get(words[0], "none") + "\\n").encode())
        server = socketserver.TCPServer(("0.0.0.0", 7000), Answer)
        while True:
            server.handle_request()
    environment: {KIND: side}
    working_dir: /opt
    expose: ["7000"]
"""
"""An Inspect task with a service that remembers words in its memory."""
IN_SERVICE = [*AS_ROOT, "test_exec_as_user", "test_exec_large_command", "test_exec_as_nonexistent_user"]
"""Checks that fail in this service: the image has neither adduser nor a program printf, and chroot names no user."""


def ask(words: str) -> list[str]:
    return ["bash", f"exec 3<>/dev/tcp/store/7000; echo {words} >&3; cat <&3"]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_inspect_samples_with_a_service(checkpoints: bool, tmp_path: Path) -> None:
    """Three samples in two sandboxes each: the second hits, and the third meets both as its own calls left them.

    With CRIU the state at the fork is restored; without it, it is reached by replay.
    """
    require_sandboxes()
    if checkpoints:
        require_criu()
    place = packages("inspect-ai==0.3.285")
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    # A state that chance made comes back from a snapshot only.
    number = "$RANDOM$RANDOM" if checkpoints else "4711"
    draw = ["bash", f"echo {number} > drawn; cat drawn seed.txt ready.txt"]
    look = ["in_store", f"pwd; echo $KIND {number} >>kept; cat log kept extra.txt"]
    first = [draw, ask("set x 1"), look, ask("get x")]
    third = [draw, ask("set x 1"), look, ask("set y 2"), ask("get x"), ["bash", "cat drawn"]]
    (tmp_path / "compose.yaml").write_text(COMPOSE.replace("IMAGE", agent_image()))
    with real_proxy(checkpoints=checkpoints) as proxy:
        left_out = IN_SERVICE if checkpoints else [*IN_SERVICE, *SLOW]
        result = run(
            place, "inspect_services_client.py", str(tmp_path), json.dumps([first, first, third]), *left_out,
            python=sys.executable, FORKPOINT_URL=proxy.url,
            env={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "INSPECT_DISPLAY": "none"},
        )  # fmt: skip
        [task] = [each["task"] for each in proxy.client.get("/api/v1/tasks").json()["items"] if each["rollouts"] == 3]
        rollouts: list[Any] = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
        outcomes = [proxy.outcomes(task, each["rollout"]) for each in rollouts]
    [[shown, facts], second, [others, other_facts]] = result["samples"]
    assert shown[0].endswith("seed\nok\n")
    assert (shown[1], shown[3]) == ("1\n", "1\n")
    assert shown[2].startswith("/opt\nx\nside ")
    assert shown[2].endswith("\nextra\n")
    assert (facts["log"], facts["same"], facts["bytes"], facts["one"]) == ("x\n", True, "76800", True)
    assert facts["main"].startswith("drawn\nready.txt\nseed.txt\n")
    assert "forkpoint shell" in facts["terminal"]
    assert second[0] == shown
    # Each sample has a rollout of its own, and so another name in the refusal of a terminal.
    assert second[1] | {"terminal": ""} == facts | {"terminal": ""}
    assert others == [*shown[:3], "2\n", "1\n", shown[0].split()[0] + "\n"]
    assert other_facts["log"] == "x\ny\n"
    assert set(outcomes[0]) == {"miss"}
    assert set(outcomes[1]) == {"hit"}
    # Behind the fork: the model's last calls, and the scorer's eleven.
    assert outcomes[2] == ["hit"] * (len(outcomes[0]) - 12) + ["miss"] * 14
    assert all(each["finished"] for each in rollouts)
    assert (result["checks"], result["failed"]) == (44 - len(left_out), {})
    build, host, dockerfile = result["refused"]
    assert "is no directory" in build
    assert "Service 'default' has 'pid'" in host
    assert "neither docker nor buildah" in dockerfile
