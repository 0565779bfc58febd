"""A harness that is frozen, branched and repeated does what a twin does that was never frozen."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from examples.harness_tree import best_of, branching_grpo
from forkpoint.client import Client
from proxy.cli.main import app
from proxy.compat.harness import model as models
from proxy.tree.tree import Node
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.proxy.cli.test_json import documented
from tests.proxy.cli.typing_commands import as_json, typed
from tests.proxy.compat.harness import scripted_agent_text
from tests.proxy.serving import Running, serving
from tests.sandboxes.box import local_driver
from tests.scripted_model import ScriptedModel, scripted_model

TURNS = 4


def say(number: int, who: str) -> str | None:
    if number >= TURNS:
        return None
    return f"echo {who or number} >> /root/log; cat /root/log"


def spec(style: str = "anthropic", **more: Any) -> EnvironmentSpec:
    harness = {"command": f"exec python3 /agent.py {style}", "env": {"MODEL_URL": "{model}"}, **more}
    return EnvironmentSpec.model_validate({"files": {"/agent.py": scripted_agent_text()}, "harness": harness})


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    require_criu()
    data = tmp_path_factory.mktemp("harness")
    with serving(data, drivers={"local": local_driver(data / "local")}, default_spec=spec()) as running:
        yield running


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with scripted_model(say) as server:
        yield server


def ran(proxy: Running, name: str, url: str, task: str = "task", **more: Any) -> list[dict[str, Any]]:
    answer = proxy.client.post(f"/t/{task}/r/{name}/harness", json={"upstream": url, **more})
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def told(events: list[dict[str, Any]]) -> list[str]:
    """Return what the agent has printed at its end, without the readings of its clock."""
    assert events[-1].get("exit") == 7, events[-1]
    printed: list[str] = json.loads(events[-1]["log"])
    return [text.rpartition("|")[0] if "|" in text else text for text in printed]


def outcomes(events: list[dict[str, Any]]) -> list[str]:
    return [event["outcome"] for event in events[:-1]]


def put(proxy: Running, task: str, given: EnvironmentSpec) -> None:
    members = given.model_dump(mode="json", exclude_defaults=True)
    proxy.client.put(f"/api/v1/tasks/{task}", json=members).raise_for_status()


def expected(secret: str, *own: str) -> list[str]:
    texts, log = [secret, secret], ""
    for number in range(TURNS):
        word = own[number] if number < len(own) and own[number] else str(number)
        log += f"{word}\n"
        texts += [f"echo {word} >> /root/log; cat /root/log", f"{log}|moves"]
    return texts


@pytest.mark.parametrize("style", ["anthropic", "chat", "responses", "google"])
def test_a_rollout_repeats_without_a_sandbox_and_branches_at_each_turn(
    proxy: Running, model: ScriptedModel, style: str
) -> None:
    put(proxy, style, spec(style))
    first = ran(proxy, "first", model.url(), style)
    assert outcomes(first) == ["miss"] * (TURNS + 2)
    assert not any("not_kept" in event for event in first)
    secret = told(first)[0]
    assert told(first) == expected(secret)
    # Ids, usage and chunks are others. The key of the rollout's own model replaces that of the sandbox.
    again = ran(proxy, "again", model.url("other"), style, headers={"x-api-key": "outside"})
    assert outcomes(again) == ["hit"] * (TURNS + 2)
    assert told(again) == told(first)
    assert set(model.keys[-TURNS - 1 :]) == {"outside"}
    for turn in range(TURNS):
        branch = ran(proxy, f"b{turn}", model.url(f"own{turn}", turn), style, parent="first", turn=turn)
        assert told(branch) == expected(secret, *[""] * turn, f"own{turn}")
        assert branch[0]["turn"] == turn + 1


def test_what_a_model_says_is_compared_and_the_end_of_a_rollout_can_be_left(
    proxy: Running, model: ScriptedModel
) -> None:
    put(proxy, "branches", spec())
    first = ran(proxy, "a", model.url(), "branches")
    proxy.client.delete("/api/v1/tasks/branches/rollouts/a").raise_for_status()
    two = [ran(proxy, f"w{i}", model.url("word", 2), "branches", parent="a", turn=1) for i in (1, 2)]
    assert outcomes(two[0]) == ["hit", "miss", "miss", "miss"]
    assert outcomes(two[1]) == ["hit"] * 4
    assert told(two[0]) == told(two[1]) == expected(told(first)[0], "", "", "word")


def test_a_task_that_shares_nothing_starts_its_own_harness_for_each_rollout(
    proxy: Running, model: ScriptedModel
) -> None:
    put(proxy, "own", spec().model_copy(update={"cache": "never"}))
    one, two = (ran(proxy, name, model.url(), "own") for name in ("a", "b"))
    assert set(outcomes(one) + outcomes(two)) == {"bypass"}
    assert told(one)[0] != told(two)[0]
    assert told(two) == expected(told(two)[0])


def test_earlier_steps_of_a_request_that_is_made_again_are_passed_over(
    proxy: Running, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a new owner of a cluster answers what an ingress sends once more."""
    put(proxy, "made-again", spec())
    run = proxy.engine.step.run
    answers: list[Any] = []

    async def repeating(*arguments: Any) -> Any:
        if len(answers) in (1, 3):
            answers.append(None)
            return answers[0]
        answers.append(await run(*arguments))
        return answers[-1]

    monkeypatch.setattr(proxy.engine.step, "run", repeating)
    events = ran(proxy, "a", model.url(), "made-again")
    assert [event["turn"] for event in events[:-1]] == list(range(TURNS + 2))
    assert told(events) == expected(told(events)[0])
    assert len(model.asked) == TURNS + 1


def test_a_branch_of_a_branch_has_the_turns_of_that_branch(proxy: Running, model: ScriptedModel) -> None:
    put(proxy, "twice", spec())
    secret = told(ran(proxy, "a", model.url(), "twice"))[0]
    for name in ("one", "two"):
        ran(proxy, name, model.url(name, 1), "twice", parent="a", turn=1)
    branch = ran(proxy, "three", model.url(), "twice", parent="two", turn=2)
    assert told(branch) == expected(secret, "", "two")


@pytest.mark.parametrize("keep", [["all"], ["first"]])
def test_a_branch_that_was_cut_off_goes_on(proxy: Running, model: ScriptedModel, keep: list[str]) -> None:
    """Where no turn is kept, it is cut off on its way to the turn at which it leaves its parent."""
    task = f"cut-{keep[0]}"
    put(proxy, task, spec(keep=keep))
    secret = told(ran(proxy, "a", model.url(), task))[0]
    body = {"upstream": model.url("own", 2), "parent": "a", "turn": 2}
    with proxy.client.stream("POST", f"/t/{task}/r/b/harness", json=body) as response:
        next(response.iter_lines())
    # Until the proxy has noticed.
    while (again := proxy.client.post(f"/t/{task}/r/b/harness", json=body)).status_code == 409:
        assert "runs already" in again.text
    assert told([json.loads(line) for line in again.text.splitlines()]) == expected(secret, "", "", "own")
    other = {**body, "parent": "b", "turn": 3}
    ran(proxy, "c", model.url(), task)
    assert proxy.client.post(f"/t/{task}/r/c/harness", json=other).status_code == 409


def test_a_command_branches_and_the_tree_comes_out_as_a_line_for_each_turn(
    proxy: Running, model: ScriptedModel, tmp_path: Path
) -> None:
    put(proxy, "lines", spec())
    secret = told(ran(proxy, "a", model.url(), "lines"))[0]
    words = ["branch", "lines", "a", "2", "b", "--upstream", model.url("own", 2), "--header", "x-api-key: outside"]
    # The proxy of this process logs its calls to the same stdout.
    printed = "\n" + typed(proxy, *words, "--json")
    branch = json.loads("{" + printed.rpartition("\n{\n")[2])
    assert documented("branch") <= set(branch)
    assert told([branch]) == expected(secret, "", "", "own")
    assert model.keys[-1] == "outside"
    assert secret in typed(proxy, *words[:4], "c", *words[5:], code=7)
    assert (
        "no turn 99"
        in CliRunner()
        .invoke(app, ["branch", "lines", "a", "99", "d", *words[5:]], env={"FORKPOINT_URL": str(proxy.client.base_url)})
        .output
    )

    proxy.client.patch("/api/v1/tasks/lines/rollouts/b/labels", json={"reward": 1}).raise_for_status()
    written = as_json(proxy, "trajectories", str(tmp_path / "turns.jsonl"), "lines", "--turns")
    lines = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
    with Client(str(proxy.client.base_url)) as client:
        assert [asdict(turn) for turn in client.turns("lines")] == lines
        client.save_trajectories(tmp_path / "turns.parquet", "lines", turns=True)
    assert parquet.read_table(tmp_path / "turns.parquet").to_pylist() == lines
    assert written["turns"] == len(lines) == TURNS + 1 + 2 * (TURNS - 1)
    above = {line["node"]: line for line in lines}
    leaf = [line for line in lines if line["rollout"] == "b"][-1]
    assert (leaf["reward"], leaf["response"]) == (1.0, "all done")
    way = [leaf]
    while way[-1]["parent"] in above:
        way.append(above[way[-1]["parent"]])
    assert [line["turn"] for line in way] == list(range(TURNS + 1, 0, -1))
    # Each request holds all that was said above it.
    prompts = [json.loads(line["prompt"])["messages"] for line in way[::-1]]
    assert [len(messages) for messages in prompts] == list(range(1, 2 * TURNS + 2, 2))
    assert [message["content"].rpartition("|")[0] or message["content"] for message in prompts[-1]] == expected(
        secret, "", "", "own"
    )[1:]


def test_an_audit_runs_no_turn_again(proxy: Running, model: ScriptedModel) -> None:
    put(proxy, "audited", spec())
    ran(proxy, "a", model.url(), "audited")
    proxy.client.post("/api/v1/tasks/audited/verify", json={"sample": None}).raise_for_status()
    while (audit := proxy.client.get("/api/v1/tasks/audited/audit").json())["running"] is not None:
        time.sleep(0.05)
    assert audit["findings"] == []
    assert outcomes(ran(proxy, "b", model.url(), "audited")) == ["hit"] * (TURNS + 2)


def test_a_harness_stands_still_while_its_model_works(proxy: Running, model: ScriptedModel) -> None:
    put(proxy, "still", spec())
    model.delay_s = 1.0
    began = time.monotonic()
    first = ran(proxy, "a", model.url(), "still")
    assert time.monotonic() - began > TURNS
    # Its threads count at each turn, and not while it waits: 50 a second otherwise.
    node = proxy.client.get(f"/api/v1/tasks/still/nodes/{first[2]['node']}").json()
    assert node["resources"]["cpu_s"] < 0.5
    # Its answers do not grow old.
    model.delay_s = 0.0
    time.sleep(4)
    assert outcomes(ran(proxy, "b", model.url(), "still")) == ["hit"] * (TURNS + 2)


def test_clocks_of_a_restored_harness_go_on_from_where_they_were(proxy: Running, model: ScriptedModel) -> None:
    put(proxy, "clocks", spec())
    ran(proxy, "a", model.url(), "clocks")
    time.sleep(5)
    branch = ran(proxy, "b", model.url("own", 2), "clocks", parent="a", turn=2)
    readings = [float(text.rpartition("|")[2]) for text in json.loads(branch[-1]["log"]) if "|" in text]
    # Timeouts of a client would end its request otherwise, as soon as it is there again.
    assert readings[2] - readings[1] < 4


def test_a_model_that_fails_is_asked_again_and_the_rollout_stays(
    proxy: Running, model: ScriptedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "PAUSES_S", (0.01, 0.02, 0.03))
    put(proxy, "failing", spec())
    model.failures = 2
    assert told(ran(proxy, "a", model.url(), "failing"))
    model.failures = 1000
    lost = ran(proxy, "b", model.url("own", 1), "failing", parent="a", turn=1)
    assert lost[-1]["error"]["status"] == 502
    model.failures = 0
    assert told(ran(proxy, "b", model.url("own", 1), "failing"))[5] == "0\nown\n|moves"


def test_a_client_that_hangs_up_loses_no_turn(proxy: Running, model: ScriptedModel) -> None:
    put(proxy, "hangs-up", spec())
    model.delay_s = 0.3
    with proxy.client.stream("POST", "/t/hangs-up/r/a/harness", json={"upstream": model.url()}) as answer:
        assert json.loads(next(answer.iter_lines()))["turn"] == 0
    model.delay_s = 0.0

    # Until the proxy has noticed: one run for each rollout.
    while proxy.client.post("/t/hangs-up/r/a/harness", json={"upstream": model.url()}).status_code == 409:
        time.sleep(0.05)
    events = ran(proxy, "again", model.url(), "hangs-up")
    assert outcomes(events) == ["hit"] * (TURNS + 2)


def test_kept_turns_are_those_that_the_spec_names(proxy: Running, model: ScriptedModel) -> None:
    put(proxy, "kept", spec(keep=["first", "every 3"]))
    first = ran(proxy, "a", model.url(), "kept")
    kept = [proxy.client.get(f"/api/v1/tasks/kept/nodes/{event['node']}").json()["snapshot"] for event in first[:-1]]
    assert kept == [True, False, False, True, False, True]
    # Nobody is led to a turn that is nowhere any more: this rollout does it for itself, from the first.
    again = ran(proxy, "b", model.url(), "kept")
    assert outcomes(again)[:2] == ["hit", "miss"]
    assert told(again) == told(first)
    # A branch comes there from the first turn too, by what the model has said.
    branch = ran(proxy, "c", model.url("own", 2), "kept", parent="a", turn=2)
    assert [event["turn"] for event in branch[:-1]] == [1, 2, 3, 4, 5]
    assert told(branch) == expected(told(first)[0], "", "", "own")


def test_a_turn_that_was_given_up_is_reached_by_what_the_model_said(proxy: Running, model: ScriptedModel) -> None:
    """Without any checkpoint the harness is started once more, and draws another secret."""
    put(proxy, "gone", spec())
    first = ran(proxy, "a", model.url(), "gone")
    asked = len(model.asked)
    names = {event["node"] for event in first[:-1]}
    for node in _nodes(proxy, "gone"):
        if f"n{node.id}" in names:
            node.snapshot = None
    branch = ran(proxy, "b", model.url("own", 2), "gone", parent="a", turn=2)
    assert told(branch)[0] != told(first)[0]
    assert told(branch) == expected(told(branch)[0], "", "", "own")
    assert len(model.asked) - asked == TURNS + 1 - 2


def _nodes(proxy: Running, task: str) -> list[Node]:
    found = proxy.engine.tasks.get(task)
    assert found is not None
    return list(found.tree.nodes.values())


def test_requests_that_are_wrong_are_refused_with_what_helps(proxy: Running) -> None:
    url = "/t/task/r/wrong/harness"
    assert proxy.client.get(url).status_code == 405
    for body, part in [
        ({}, "upstream"),
        ({"upstream": "ftp://x"}, "upstream"),
        ({"upstream": "http://127.0.0.1:1", "headers": {"a": "b\r\nc: d"}}, "characters"),
    ]:
        answer = proxy.client.post(url, json=body)
        assert answer.status_code == 422
        assert part in answer.json()["detail"]
    answer = proxy.client.post(url, json={"upstream": "http://127.0.0.1:1", "parent": "nobody"})
    assert answer.status_code == 404


def test_a_request_that_is_refused_begins_no_rollout(proxy: Running, model: ScriptedModel) -> None:
    put(proxy, "plain", EnvironmentSpec())
    put(proxy, "no-command", spec(command=""))
    put(proxy, "confined", spec().model_copy(update={"confined": True}))
    place = {"parent": "a", "turn": 0}
    for task, more, status in [
        ("plain", {}, 404), ("no-command", {}, 422), ("no-command", place, 404), ("confined", {}, 403),
    ]:  # fmt: skip
        answer = proxy.client.post(f"/t/{task}/r/refused/harness", json={"upstream": model.url(), **more})
        assert answer.status_code == status, answer.text
        assert proxy.client.get(f"/api/v1/tasks/{task}/rollouts/refused").status_code == 404


def test_a_branch_has_its_parents_agent(proxy: Running, model: ScriptedModel) -> None:
    """Also one that begins at the root, because no turn was kept: it starts what its parent has started."""
    for task, keep in (("agent-kept", ["all"]), ("agent-not-kept", [])):
        put(proxy, task, spec(command="", keep=keep))
        first = ran(proxy, "a", model.url(), task, command=f"{spec().harness.command}")  # type: ignore[union-attr]
        place = {"parent": "a", "turn": 1}
        # What is not kept may be started once more, with another secret.
        assert len(told(ran(proxy, "b", model.url(), task, **place))) == len(told(first))
        for more in ({"command": "exit 3"}, {"env": {"A": "b"}}):
            body = {"upstream": model.url(), **place, **more}
            assert proxy.client.post(f"/t/{task}/r/c/harness", json=body).status_code == 422
        assert proxy.client.get(f"/api/v1/tasks/{task}/rollouts/c").status_code == 404
    body = {"upstream": model.url(), "parent": "a"}
    assert proxy.client.post("/t/mistyped/r/c/harness", json=body).status_code == 404
    assert proxy.client.get("/api/v1/tasks/mistyped").status_code == 404


def test_an_idle_server_can_stand_still_between_calls_of_any_task(proxy: Running) -> None:
    members = {"live": "frozen_between_calls"}
    proxy.client.put("/api/v1/tasks/server", json=members).raise_for_status()
    # A file that is being written would be read empty.
    count = "i=$((i+1)); echo $i > /root/new; mv /root/new /root/count"
    start = f"(i=0; while sleep .05; do {count}; done) >/dev/null 2>&1 & sleep .3; echo started"
    assert proxy.exec("a", start, "server").json()["stdout"] == "started\n"
    before = int(proxy.exec("a", "cat /root/count", "server").json()["stdout"])
    time.sleep(2)
    after = int(proxy.exec("a", "cat /root/count; : again", "server").json()["stdout"])
    assert after - before < 20
    time.sleep(3)
    proxy.exec("b", start, "server")
    assert "hit" in proxy.exec("b", "cat /root/count", "server").headers["cache-status"]


def test_examples_of_branching_and_of_the_best_one(proxy: Running) -> None:
    """The word that a rollout's model says in the turn in which it may differ is its own number."""
    put(proxy, "example", spec())

    def say_own(number: int, who: str) -> str | None:
        return say(number, who.rpartition("-")[2] if who.count("-") == 2 and number == int(who.split("-")[1]) else "")

    with scripted_model(say) as model, Client(str(proxy.client.base_url)) as client:
        model.say_whole = say_own
        grade = "tail -n 2 /root/log | head -n 1"
        branches = branching_grpo(client.task("example"), model.root.rstrip("/"), grade, turns=[TURNS - 2], count=3)
        best = best_of(client.task("example"), model.root.rstrip("/"), grade, "first", TURNS - 2, 2)
    assert [(branch.turn, branch.reward) for branch in branches] == [(None, 2.0), (2, 0.0), (2, 1.0), (2, 2.0)]
    assert [round(branch.advantage, 2) for branch in branches[1:]] == [-1.22, 0.0, 1.22]
    assert best.reward == 1.0
