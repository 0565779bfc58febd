"""Agent frameworks, unmodified, use a rollout's tools over MCP: the second rollout hits, the third leaves the tree."""

import json
import os
import re

import pytest

from tests.agents.clients import packages, run
from tests.agents.serving import real_proxy
from tests.machine import require_sandboxes

TOGETHER = (
    "smolagents==1.26.0", "mcpadapt==0.1.19", "langgraph==1.2.22", "langchain==1.4.7", "langchain-mcp-adapters==0.3.2",
    "openai-agents==0.24.0", "mcp==1.30.0",
)  # fmt: skip
FRAMEWORKS = {
    "smolagents": TOGETHER,
    "langgraph": TOGETHER,
    "openai_agents": TOGETHER,
    "pydantic_ai": ("pydantic-ai-slim[mcp]==2.68.0",),
    # Its harness program is a script whose packages uv installs.
    "verifiers": ("verifiers==0.4.0", "uv"),
}
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Large packages take seconds to compile; the next run finds them compiled."""
CERTIFICATES = {name: os.environ[name] for name in ("SSL_CERT_FILE",) if name in os.environ}
PREFIX = [
    "mkdir -p src && cd src",
    "shopt -s extglob; word=kept",
    "echo $RANDOM$RANDOM > drawn; cat drawn",
    "ls no-such",
]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_framework_group_shares_its_prefix(framework: str) -> None:
    """The model of the third rollout sees files, shell and random numbers of the prefix that the first one executed.

    All models see that a command failed.
    """
    require_sandboxes()
    place = packages(*FRAMEWORKS[framework])
    env = {**COMPILED, **CERTIFICATES, "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    lasts = {"first": "echo first > mine", "second": "echo first > mine", "third": "echo $word $PWD; cat drawn; ls"}
    with real_proxy() as proxy:
        group = [[f"{proxy.url}/t/task/r/{name}/mcp", [*PREFIX, last]] for name, last in lasts.items()]
        first, second, third = run(place, "framework_client.py", framework, json.dumps(group), env=env)
        assert [proxy.outcomes("task", name) for name in lasts] == [["miss"] * 5, ["hit"] * 5, ["hit"] * 4 + ["miss"]]
    assert len(first) == 5
    assert re.search(r"No such file.*(exit code 2|exit_code\W+2)", first[3], re.DOTALL)
    assert second == first
    assert third[:4] == first[:4]
    drawn = re.search(r"\d{2,}", first[2])
    assert drawn is not None
    assert all(word in third[4] for word in ("kept", "/src", "drawn", drawn[0]))
    assert "mine" not in third[4]
