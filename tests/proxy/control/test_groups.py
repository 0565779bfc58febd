"""Groups of rollouts: the comparison by state, chosen by labels, as the route, the command and the client show it."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from forkpoint import Client
from proxy.cli.main import app
from tests.proxy.serving import Running, get, serving

GROUP = {
    "w1": ("step=3,reward=1", "mkdir d", "ls", "cd d", "echo right > f"),
    "w2": ("step=3,reward=0.9", "mkdir d", "cd d", "ls", "echo right > f"),
    "l1": ("step=3,reward=0", "ls", "mkdir d", "cd d", "echo wrong > f"),
    "other": ("step=4,reward=0", "mkdir d", "cd d", "echo right > f"),
}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("data")) as running:
        for name, (labels, *commands) in GROUP.items():
            for command in commands:
                running.client.post(
                    f"/t/task/r/{name}/shell/exec", json={"command": command}, headers={"x-forkpoint-labels": labels}
                ).raise_for_status()
        yield running


def test_group_is_aligned_by_state(proxy: Running) -> None:
    view = get(proxy, "tasks/task/compare?label=step=3")
    assert (view["rollouts"], view["above"], view["high"], view["truncated"]) == (3, 0.5, ["w1", "w2"], False)
    [part] = view["parts"]
    ends = {name: get(proxy, f"tasks/task/rollouts/{name}")["node"] for name in GROUP}
    right, wrong = ends["w1"], ends["l1"]
    assert part["ways"] == [
        {"call": "echo right > f", "node": right, "rollouts": ["w1", "w2"]},
        {"call": "echo wrong > f", "node": wrong, "rollouts": ["l1"]},
    ]
    assert part["node"] == get(proxy, f"tasks/task/nodes/{right}")["parent"]
    assert view["same_end"] == [{"call": None, "node": right, "rollouts": ["w1", "w2"]}]
    assert view["winning_states"] == [{"call": None, "node": right, "rollouts": ["w1", "w2"]}]
    assert view["winning_calls"] == [{"call": "echo right > f", "node": None, "rollouts": ["w1", "w2"]}]


def test_state_that_a_loser_reached_is_no_winning_state(proxy: Running) -> None:
    view = get(proxy, "tasks/task/compare")
    assert (view["rollouts"], view["winning_states"], view["winning_calls"]) == (4, [], [])
    assert get(proxy, "tasks/task/compare?label=step=3&above=0.95")["high"] == ["w1"]
    assert get(proxy, "tasks/task/compare?label=step=9")["rollouts"] == 0
    assert get(proxy, "tasks/task/compare?rollout=w1&rollout=l1")["high"] == ["w1"]
    get(proxy, "tasks/task/compare?above=nan", 422)
    get(proxy, "tasks/nosuch/compare", 404)


def test_command_and_client_show_it(proxy: Running) -> None:
    url = str(proxy.client.base_url)
    shown = CliRunner().invoke(app, ["compare", "task", "--label", "step=3", "--url", url], env={"COLUMNS": "150"})
    assert shown.exit_code == 0, shown.output
    for text in ("3 rollouts, 2 with a reward above 0.5", "echo wrong > f", "only high: states", "w1, w2"):
        assert text in shown.output
    with Client(url, trust_env=False) as client:
        assert client.task("task").compare(labels={"step": 3})["high"] == ["w1", "w2"]
