"""A task with a side service, through the proxy: the group's answers equal those of private sandboxes."""

import pytest

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_criu, require_sandboxes
from tests.sandboxes.image_archives import bash_image
from tests.sandboxes.local.test_image_services import FILES, STORE_SERVICE


def walk(proxy: Proxy, task: str, rollout: str, *words: str) -> list[str]:
    outputs = []
    for word in words:
        command = {"command": f"python3 /client.py store {word}; cat /.services/store/data/log 2>/dev/null; true"}
        answer = proxy.client.post(f"/t/{task}/r/{rollout}/shell/exec", json=command)
        assert answer.is_success, answer.text
        outputs.append(answer.json()["stdout"])
    return outputs


@pytest.mark.parametrize("checkpoints", [True, False])
def test_group_of_rollouts_with_a_service(checkpoints: bool) -> None:
    """The second rollout only hits; the third leaves the tree and meets the service as its own calls left it.

    With CRIU the state at the fork is restored; without it, it is reached by replay.
    """
    require_sandboxes()
    if checkpoints:
        require_criu()
    image = bash_image()
    spec = {"image": image, "files": FILES, "services": {"store": {**STORE_SERVICE, "image": image}}}
    with real_proxy(checkpoints=checkpoints) as proxy:
        proxy.put("store", **spec)
        proxy.put("private", **spec, cache="never")
        first, third = ["set x 1", "get x", "set x 2", "get x"], ["set x 1", "get x", "set y 3", "get x", "get y"]
        answers = walk(proxy, "store", "1", *first)
        assert walk(proxy, "store", "2", *first) == answers
        assert set(proxy.outcomes("store", "2")) == {"hit"}
        assert walk(proxy, "store", "3", *third) == walk(proxy, "private", "3", *third)
        assert proxy.outcomes("store", "3")[:2] == ["hit", "hit"]
        # What the third rollout did has not reached the first one's sandbox.
        assert walk(proxy, "store", "1", "get y") == ["none\nx\nx\n"]
