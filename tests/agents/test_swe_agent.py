"""SWE-agent's calls, by swe-rex's own deployment and client, unmodified: a group that parts behind a shared prefix."""

from pathlib import Path

import pytest

from tests.agents.clients import packages, run
from tests.agents.serving import real_proxy
from tests.agents.test_swe_rex import REQUIREMENTS, SERVER, plain
from tests.machine import require_criu

GROUP = ("a1", "a2", "a3")
REPOSITORY = (
    "mkdir repo && cd repo && git init -q . && printf 'one\\nbug\\n' > main.py && git add . && "
    "git -c user.name=n -c user.email=e commit -q -m first && touch /root/.bashrc"
)


@pytest.fixture(scope="module")
def place() -> Path:
    require_criu()
    return packages(*REQUIREMENTS)


def test_group_shares_its_prefix_then_diverges(place: Path) -> None:
    """A group shares its prefix, and after it each rollout has its own state."""
    server = {"command": SERVER, "port": 9000, "dialect": "swe-rex", "env": {"PYTHONPATH": "/opt/x"}, "ready": "/"}
    answers_by_part = {}
    with real_proxy(checkpoints=True, keeps_all=False, warm_sandboxes=8) as proxy:
        archives = [{"source": str(place), "target": "/opt/x"}]
        proxy.put("swe", archives=archives, setup=[REPOSITORY], servers={"rex": server})
        for part in GROUP:
            shared, answers_by_part[part] = run(place, "swe_agent_client.py", f"{proxy.url}/t/swe/r/{part}/rex", part)
        steps = {part: proxy.outcomes("swe", part) for part in GROUP}
        counts = proxy.client.get("/api/v1/stats").json()
    first = answers_by_part["a1"]
    behind = [answer["output"] for answer in first[shared:] if "output" in answer]
    drawn = next(answer["output"] for answer in first if "0." in answer.get("output", "")).strip()
    assert behind[0].split()[:5] == ["note", "1:", "a1", "/root/repo", "here"]
    for part, answers in answers_by_part.items():
        assert plain(answers, part) == plain(first, "a1")
        assert answers[:shared] == first[:shared]
        assert drawn in answers[shared]["output"]
    # Four steps of three calls each are sent behind the prefix.
    behind_prefix = 4 * 3
    for part in GROUP[1:]:
        known, left = steps[part][:-behind_prefix], steps[part][-behind_prefix:]
        assert known == ["hit"] * len(known)
        assert len(left) == behind_prefix
    assert counts["divergences"] == 0
