"""Harbor, unmodified, runs trials whose environments are rollouts, with an agent and with its own verifier."""

import json
import os
from pathlib import Path
from typing import Any

from tests.agents.clients import newer_python, packages, run
from tests.agents.serving import real_proxy
from tests.machine import require_sandboxes


def test_harbor_trials_share_their_prefix(tmp_path: Path) -> None:
    """Uploads, downloads, the agent's commands and the verifier's: the second trial makes the first one's calls.

    The third trial diverges at the agent's second command, and its reward is its own.
    """
    require_sandboxes()
    python = newer_python()
    place = packages("harbor==0.24.0", python=python)
    path = f"{place}{os.pathsep}{Path(__file__).parents[2]}"
    draw = "echo $RANDOM$RANDOM $WHO > drawn; cat drawn"
    group = [[draw, "touch mine"], [draw, "touch mine"], [draw, "cat drawn; ls"]]
    with real_proxy() as proxy:
        first, second, third = run(
            place, "harbor_client.py", proxy.url, str(tmp_path), json.dumps(group), python=python,
            env={"PYTHONDONTWRITEBYTECODE": "", "PYTHONPATH": path, "HOME": str(tmp_path)},
        )  # fmt: skip
        task = proxy.client.get("/api/v1/tasks").json()["items"][0]["task"]
        rollouts: list[Any] = proxy.client.get(f"/api/v1/tasks/{task}/rollouts").json()["items"]
        outcomes = [proxy.outcomes(task, row["rollout"]) for row in rollouts]
    shown, rewards, verified = first
    drawn = shown[0][0]
    assert drawn.endswith(" me\n")
    assert (shown[1], rewards, verified) == ([None, None, 0], {"reward": 1.0}, drawn)
    assert second == first
    assert third == [[shown[0], [f"{drawn}drawn\n", None, 0]], {"reward": 0.0}, drawn]
    assert set(outcomes[0]) == {"miss"}
    assert set(outcomes[1]) == {"hit"}
    # What Harbor prepares, what the agent prepares, and the agent's first command.
    assert outcomes[2] == ["hit"] * 3 + ["miss"] * (len(outcomes[0]) - 3)
    assert all(row["finished"] for row in rollouts)
