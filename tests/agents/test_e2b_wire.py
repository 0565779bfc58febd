"""E2B's wire as its SDKs seldom show it: severed streams, restarts, snapshots, two at once, and what is wrong."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.compat.e2b import connect_rpc as connect
from tests.agents.serving import Proxy, real_proxy
from tests.machine import Answering, require_sandboxes, wait_until

START = "process.Process/Start"
ENDED = {"end": {"exitCode": 0, "exited": True, "status": "exit status 0"}}


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with real_proxy() as running:
        yield running


class Client:
    """What an SDK does, by hand. sandbox: one to go on with; without it one is created."""

    def __init__(self, proxy: Answering, task: str, sandbox: str = "", **create: Any) -> None:
        self.http, self.base = proxy.client, f"/t/{task}/e2b"
        self.sandbox = sandbox or self.control("POST", "/sandboxes", **create).json()["sandboxID"]
        self.headers = {"e2b-sandbox-id": self.sandbox}

    def control(self, method: str, path: str, **body: Any) -> httpx.Response:
        content = json.dumps(body).encode() if method == "POST" else b""
        return self.http.request(method, self.base + path, content=content)

    def call(self, method: str, **message: Any) -> httpx.Response:
        return self.http.post(f"{self.base}/{method}", json=message, headers=self.headers)

    @contextmanager
    def stream(self, method: str, body: bytes, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
        """Send a request on a connection of its own, which leaving the block closes."""
        given = {**self.headers, "content-type": connect.STREAM, **headers}
        with httpx.Client(base_url=self.http.base_url, timeout=60, trust_env=False) as own:
            request = own.build_request("POST", f"{self.base}/{method}", content=body, headers=given)
            response = own.send(request, stream=True)
            assert response.status_code == 200
            try:
                yield events(response)
            finally:
                response.close()

    def start(self, command: str, **headers: str) -> Any:
        process = {"cmd": "/bin/bash", "args": ["-c", command]}
        return self.stream(START, connect.envelope({"process": process}), **headers)

    def run(self, command: str, **headers: str) -> str:
        """Return what a command that ends well prints."""
        with self.start(command, **headers) as told:
            printed, last = joined(told)
        assert last == ENDED, last
        return printed


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield what the envelopes of a stream say, the last one under `last`."""
    rest = b""
    for chunk in response.iter_raw():
        rest += chunk
        while len(rest) >= 5 and len(rest) >= 5 + (size := int.from_bytes(rest[1:5], "big")):
            value = json.loads(rest[5 : 5 + size])
            yield {"last": value} if rest[0] & 2 else value.get("event", value)
            rest = rest[5 + size :]


def joined(told: Iterator[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return what was printed, and the last event that says anything."""
    printed, last = b"", dict[str, Any]()
    for event in told:
        printed += base64.b64decode(event.get("data", {}).get("stdout", ""))
        last = event if event != {"last": {}} else last
    return printed.decode(), last


def calls(proxy: Answering, task: str, rollout: str) -> list[tuple[str, str]]:
    """Return which tools a rollout called, and how each was answered."""
    steps = proxy.client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}").json()["steps"]
    return [(step["call"]["tool"], step["outcome"]) for step in steps]


def test_a_start_that_is_sent_again_after_its_stream_was_cut_joins_the_first(proxy: Proxy) -> None:
    client = Client(proxy, "again")
    command = "echo ran >>/root/runs; sleep 0.7; wc -l </root/runs"
    for _ in range(2):
        with client.start(command) as told:
            assert "start" in next(told)
    assert client.run(command) == "1\n"
    assert calls(proxy, "again", client.sandbox) == [("run", "miss")]


def test_one_that_ended_while_nobody_listened_is_answered_when_it_is_sent_again(proxy: Proxy) -> None:
    client = Client(proxy, "unheard")
    with client.start("echo ran >>/root/runs; wc -l </root/runs; sleep 0.2") as told:
        next(told)
    wait_until(lambda: bool(calls(proxy, "unheard", client.sandbox)), "it does not end")
    assert client.run("echo ran >>/root/runs; wc -l </root/runs; sleep 0.2") == "1\n"
    assert client.run("echo ran >>/root/runs; wc -l </root/runs; sleep 0.2") == "2\n"


def test_a_client_that_vanishes_and_asks_for_something_else_leaves_its_process_running(proxy: Proxy) -> None:
    client = Client(proxy, "vanish")
    with client.start("mkfifo /root/gate; read -r line </root/gate; echo $line >/root/told; sleep 60") as told:
        pid = next(told)["start"]["pid"]
    assert client.run("until [ -p /root/gate ]; do sleep 0.01; done; echo go >/root/gate") == ""
    assert client.run("until [ -s /root/told ]; do sleep 0.01; done; cat /root/told") == "go\n"
    listed = client.call("process.Process/List").json()["processes"]
    assert [process["pid"] for process in listed] == [pid]
    assert client.call("process.Process/SendSignal", process={"pid": pid}, signal="SIGNAL_SIGKILL").json() == {}
    with client.stream("process.Process/Connect", connect.envelope({"process": {"pid": 1}})) as told:
        assert next(told)["last"]["error"]["code"] == "not_found"


def test_output_that_comes_later_is_told_at_the_same_place_to_who_is_answered_from_the_tree(proxy: Proxy) -> None:
    # Opened once: a second reader would meet the end of what the first writer, who has not ended yet, has written.
    command = "exec 3<>/root/gate; read -r line <&3; echo heard $line; read -r line <&3; echo and $line; exit 3"
    told_to = []
    for _ in range(2):
        client = Client(proxy, "later")
        client.run("mkfifo /root/gate")
        with client.start(command) as told:
            assert "start" in next(told)
            client.run("echo one >/root/gate")
            said = [base64.b64decode(next(told)["data"]["stdout"])]
            client.run("echo two >/root/gate")
            printed, last = joined(told)
        told_to.append((said, printed, last["end"]["exitCode"], client.run("echo after")))
        first = calls(proxy, "later", client.sandbox)
    assert told_to == [([b"heard one\n"], "and two\n", 3, "after\n")] * 2
    assert {outcome for _, outcome in first} == {"hit"}
    assert [tool for tool, _ in first].count("attend") >= 2


def test_a_deadline_ends_one_in_the_background_too(proxy: Proxy) -> None:
    client = Client(proxy, "overdue")
    with client.start("sleep 30; echo late", **{"connect-timeout-ms": "600"}) as told:
        next(told)
        assert client.run("echo more") == "more\n"
        assert joined(told)[1]["last"]["error"]["code"] == "deadline_exceeded"
    assert polled(partial(all_ended, client))


def send(client: Client, pid: int, data: bytes) -> httpx.Response:
    return client.call(
        "process.Process/SendInput", process={"pid": pid}, input={"stdin": base64.b64encode(data).decode()}
    )


def test_a_terminal_is_its_rollouts_own_and_what_came_before_it_everybodys(proxy: Proxy) -> None:
    size = {"size": {"rows": 24, "cols": 80}}
    bash = {"cmd": "/bin/bash", "args": ["--norc", "-i"], "envs": {"TERM": "dumb", "PS1": ""}}
    drawn = set()
    for _ in range(2):
        client = Client(proxy, "typed")
        client.run("echo $RANDOM$RANDOM >/root/drawn")
        with client.stream(START, connect.envelope({"process": bash, "pty": size})) as told:
            process = {"pid": next(told)["start"]["pid"]}
            size["size"]["cols"] = 100
            assert client.call("process.Process/Update", process=process, pty=size).json() == {}
            keys = base64.b64encode(b"stty size; cat /root/drawn; cd /tmp; pwd\n").decode()
            assert client.call("process.Process/SendInput", process=process, input={"pty": keys}).json() == {}
            heard = b""
            while not heard.endswith(b"\r\n/tmp\r\n"):
                heard += base64.b64decode(next(told).get("data", {}).get("pty", ""))
            assert b"\r\n24 100\r\n" in heard
            drawn.add(heard.split()[-2])
            wrong = client.call("process.Process/SendInput", process=process, input={"stdin": keys})
            assert wrong.json()["code"] == "failed_precondition"
            assert client.call("process.Process/SendSignal", process=process, signal="SIGNAL_SIGKILL").json() == {}
            assert joined(told)[1]["end"]["status"] == "signal: killed"
    assert len(drawn) == 1
    assert [outcome for _, outcome in calls(proxy, "typed", client.sandbox)][:2] == ["hit", "bypass"]


def test_a_watched_directory_is_told_of_when_it_is_asked_for_and_as_it_happens(proxy: Proxy) -> None:
    for _ in range(2):
        client = Client(proxy, "watched")
        client.run("mkdir /root/w; echo $RANDOM$RANDOM >/root/w/drawn")
        drawn = client.run("cat /root/w/drawn")
        watcher = client.call("filesystem.Filesystem/CreateWatcher", path="w").json()
        body = connect.envelope({"path": "w", "recursive": True})
        with client.stream("filesystem.Filesystem/WatchDir", body) as told:
            assert next(told) == {"start": {}}
            client.run("mkdir /root/w/sub; echo $(cat /root/w/drawn) >/root/w/sub/seen")
            assert next(told) == {"filesystem": {"name": "sub", "type": "EVENT_TYPE_CREATE"}}
            assert next(told)["filesystem"]["name"] == "sub/seen"
        events = [client.call("filesystem.Filesystem/GetWatcherEvents", **watcher).json()["events"] for _ in range(2)]
        assert events == [[{"name": "sub", "type": "EVENT_TYPE_CREATE"}], []]
        assert client.run("cat /root/w/sub/seen") == drawn
        ends = [client.call("filesystem.Filesystem/RemoveWatcher", **watcher) for _ in range(2)]
        assert [end.json().get("code") for end in ends] == [None, "not_found"]
        assert client.call("filesystem.Filesystem/GetWatcherEvents", **watcher).json()["code"] == "not_found"
    assert [outcome for _, outcome in calls(proxy, "watched", client.sandbox)][:3] == ["hit", "hit", "bypass"]
    for path, code in (("none", "not_found"), ("w/drawn", "invalid_argument")):
        refused = client.call("filesystem.Filesystem/CreateWatcher", path=path).json()
        assert refused["code"] == code


def is_there(client: Client) -> bool:
    return client.http.get(f"{client.base}/files?path=/root/told", headers=client.headers).status_code == 200


def all_ended(client: Client) -> bool:
    return not client.call("process.Process/List").json()["processes"]


def polled(ask: Callable[[], bool]) -> int:
    """Return how often ask was asked until it was so."""
    return next(count for count in range(1, 1000) if ask())


def test_what_is_written_twice_arrives_twice_though_nobody_has_read_it_yet(proxy: Proxy) -> None:
    command = "read -r line </root/gate; read -r one; read -r two; echo $one-$two"
    body = connect.envelope({"process": {"cmd": "/bin/bash", "args": ["-c", command]}, "stdin": True})
    for _ in range(2):
        client = Client(proxy, "twice")
        client.run("mkfifo /root/gate")
        with client.stream(START, body) as told:
            pid = next(told)["start"]["pid"]
            for _ in range(2):
                assert send(client, pid, b"same\n").status_code == 200
            client.run("echo go >/root/gate")
            assert joined(told)[0] == "same-same\n"
    assert {outcome for _, outcome in calls(proxy, "twice", client.sandbox)} == {"hit"}


def test_who_polls_beside_a_process_that_goes_on_by_itself_is_told_of_its_doings(proxy: Proxy) -> None:
    command = "until [ -p /root/gate ]; do sleep 0.01; done; read -r line </root/gate; sleep 0.3; echo done >/root/told"
    polls = []
    for _ in range(2):
        client = Client(proxy, "polls")
        with client.start(command) as told:
            next(told)
        client.run("mkfifo /root/gate; echo go >/root/gate")
        polls.append((polled(partial(is_there, client)), polled(partial(all_ended, client))))
    # Who comes the same way is told the same, as often, with no sandbox.
    assert polls[0][0] > 1
    assert polls[0] == polls[1]
    assert {outcome for _, outcome in calls(proxy, "polls", client.sandbox)} == {"hit"}


def test_files_that_are_looked_at_end_nothing_that_is_just_starting(proxy: Proxy) -> None:
    client = Client(proxy, "starting")
    with client.start("for i in $(seq 60); do /bin/true || echo ended $i; done; echo all") as told:
        next(told)
        while client.call("process.Process/List").json()["processes"]:
            for _ in range(5):
                client.http.get(f"{client.base}/files?path=/root/none", headers=client.headers)
        assert joined(told)[0] == "all\n"


def test_two_rollouts_that_start_the_same_wait_for_one_execution_until_either_asks_for_more(proxy: Proxy) -> None:
    first, second = Client(proxy, "two"), Client(proxy, "two")
    with first.start("sleep 600 & echo $!; wait") as told, second.start("sleep 600 & echo $!; wait") as other:
        pid = next(told)["start"]["pid"]
        said = base64.b64decode(next(told)["data"]["stdout"])
        assert second.run("echo more") == "more\n"
        assert next(other)["start"]["pid"] == pid
        assert base64.b64decode(next(other)["data"]["stdout"]) == said
        assert first.run("echo more") == "more\n"
    assert [outcome for _, outcome in calls(proxy, "two", first.sandbox)][:2] == ["miss", "hit"]


def test_snapshots_forks_and_pauses_are_places_in_the_tree(proxy: Proxy) -> None:
    client = Client(proxy, "places", metadata={"of": "mine"}, envVars={"TEAM": "blue"})
    client.run("echo $RANDOM$RANDOM >/root/drawn; echo one >/root/log")
    snapshot = client.control("POST", f"/sandboxes/{client.sandbox}/snapshots", name="s").json()
    client.run("echo two >>/root/log")
    told = client.run("cat /root/log /root/drawn; echo $TEAM")
    forked = client.control("POST", f"/sandboxes/{client.sandbox}/fork", count=2).json()
    for fork in forked:
        other = Client(proxy, "places", sandbox=fork["sandbox"]["sandboxID"])
        assert other.run("cat /root/log /root/drawn; echo $TEAM") == told
    back = Client(proxy, "places", templateID=snapshot["snapshotID"])
    assert back.run("cat /root/log /root/drawn") == told.replace("two\n", "").replace("blue\n", "")
    assert client.control("GET", "/snapshots").json() == [snapshot]
    mine = client.control("GET", "/v2/sandboxes?metadata=of%3Dmine&state=running&limit=2")
    assert len(mine.json()) == 2
    rest = client.control("GET", f"/v2/sandboxes?metadata=of%3Dmine&limit=2&nextToken={mine.headers['x-next-token']}")
    assert {one["sandboxID"] for one in mine.json() + rest.json()} == {
        client.sandbox, *(fork["sandbox"]["sandboxID"] for fork in forked)
    }  # fmt: skip
    path = f"/sandboxes/{client.sandbox}"
    assert client.control("POST", f"{path}/pause").status_code == 204
    assert client.control("POST", f"{path}/pause").status_code == 409
    assert client.call("process.Process/List").json()["message"] == "The sandbox was not found"
    assert client.control("GET", path).json()["state"] == "paused"
    assert client.control("POST", f"/v2{path}/connect").status_code == 201
    assert client.run("cat /root/log /root/drawn; echo $TEAM") == told
    assert client.control("DELETE", f"/templates/{snapshot['snapshotID']}").status_code == 204
    assert client.control("GET", "/snapshots").json() == []
    assert client.control("DELETE", path).status_code == 204
    assert client.control("DELETE", path).status_code == 404


def test_sandboxes_and_what_was_said_of_them_outlive_a_restart(tmp_path: Path) -> None:
    require_sandboxes()
    kept = tmp_path / "data"
    kept.mkdir()
    with real_proxy(kept=kept) as before:
        client = Client(before, "lasts", envVars={"TEAM": "blue"}, metadata={"of": "mine"})
        client.run("echo $TEAM >/root/team")
        # What nobody listens to any more does not keep the proxy from its end: it is left running.
        with client.start("sleep 600") as told:
            next(told)
    with real_proxy(kept=kept) as after:
        again = Client(after, "lasts", sandbox=client.sandbox)
        assert again.control("GET", f"/sandboxes/{client.sandbox}").json()["metadata"] == {"of": "mine"}
        assert again.run("cat /root/team; echo $TEAM") == "blue\nblue\n"


def test_a_sandbox_whose_time_is_over_is_gone_for_its_client_and_the_tree_stays(proxy: Proxy) -> None:
    command = "echo begun; sleep 60"
    client = Client(proxy, "over", timeout=3600)
    path = f"/sandboxes/{client.sandbox}"
    with client.start(command) as told:
        next(told)
        assert base64.b64decode(next(told)["data"]["stdout"]) == b"begun\n"
        assert client.control("POST", f"{path}/timeout", timeout=7200).status_code == 204
        assert client.run("echo goes on") == "goes on\n"
        assert client.control("POST", f"{path}/timeout", timeout=0).status_code == 204
        assert client.call("process.Process/List").json()["message"] == "The sandbox was not found"
        assert list(told)[-1]["last"]["error"]["code"] == "unavailable"
    assert client.http.get(f"{client.base}/health", headers=client.headers).status_code == 502
    for method, of in (("GET", path), ("POST", f"{path}/timeout"), ("POST", f"/v2{path}/connect"), ("DELETE", path)):
        assert client.control(method, of).status_code == 404
    assert client.control("GET", "/v2/sandboxes").json() == []
    again = Client(proxy, "over")
    with again.start(command) as told:
        next(told)
        assert again.run("echo goes on") == "goes on\n"
    assert {outcome for _, outcome in calls(proxy, "over", again.sandbox)} == {"hit"}


def test_a_rollout_that_was_begun_in_another_way_has_no_end(proxy: Proxy) -> None:
    proxy.client.post("/t/other/r/seven/shell/exec", json={"command": "echo begun >/root/how"}).raise_for_status()
    client = Client(proxy, "other", sandbox="seven")
    assert client.control("POST", "/v2/sandboxes/seven/connect", timeout=0).status_code == 200
    assert client.run("cat /root/how") == "begun\n"


def test_one_that_is_to_pause_then_does_and_goes_on_when_it_is_asked_if_it_was_made_so(proxy: Proxy) -> None:
    for resumes in (False, True):
        client = Client(proxy, "pauses", timeout=3600, autoPause=True, autoResume={"enabled": resumes})
        path = f"/sandboxes/{client.sandbox}"
        client.run("echo kept >/root/kept")
        client.control("POST", f"{path}/timeout", timeout=0)
        assert client.control("GET", path).json()["state"] == "paused"
        if not resumes:
            assert client.call("process.Process/List").status_code == 502
            assert client.control("POST", f"/v2{path}/connect", timeout=60).status_code == 201
        assert client.run("cat /root/kept") == "kept\n"
        told = client.control("GET", path).json()
        assert told["state"] == "running"
        assert told["lifecycle"] == {"onTimeout": "pause", "autoResume": resumes}


def test_a_url_with_a_rollout_names_the_sandbox_and_a_second_one_is_another(proxy: Proxy) -> None:
    base = "/t/named/r/seven/e2b"
    first, second = (proxy.client.post(f"{base}/v2/sandboxes", json={}).json()["sandboxID"] for _ in range(2))
    assert first == "seven"
    assert second.startswith("seven-")
    Client(proxy, "named", sandbox=first).run("echo first >/root/name")
    answer = proxy.client.get(f"{base}/files?path=/root/name", headers={"e2b-sandbox-id": second})
    assert answer.status_code == 404
    assert proxy.client.get(f"{base}/files?path=name").text == "first\n"


def test_a_create_that_is_sent_again_gives_the_same_sandbox(proxy: Proxy) -> None:
    given = {"idempotency-key": "k1"}
    told = [proxy.client.post("/t/idem/e2b/v2/sandboxes", json={}, headers=given).json() for _ in range(2)]
    assert told[0] == told[1]
    assert Client(proxy, "idem").sandbox != told[0]["sandboxID"]


def test_what_is_wrong_is_told_and_not_recorded(proxy: Proxy) -> None:
    client = Client(proxy, "wrong")
    recorded = proxy.recorded
    gone = Client(proxy, "wrong", sandbox="i-never-was")
    assert gone.call("process.Process/List").status_code == 502
    assert gone.http.get(f"{gone.base}/health", headers=gone.headers).status_code == 502
    ported = {**client.headers, "e2b-sandbox-port": "3000"}
    assert client.http.get(f"{client.base}/", headers=ported).status_code == 404
    assert "port is not open" in client.http.get(f"{client.base}/health", headers=ported).json()["message"]
    assert client.http.post(f"{client.base}/process.Process/List", content=b"{").status_code == 400
    assert client.call("process.Process/Nothing").json()["code"] == "unimplemented"
    whole = connect.envelope({"process": {"cmd": "/bin/true"}})
    for body in (whole[:-1], b"", b"\1" + whole[1:], connect.envelope({"process": {"cmd": "x"}, "pty": {}})):
        with client.stream(START, body) as told:
            assert next(told)["last"]["error"]["code"] in {"invalid_argument", "unimplemented"}
    half = b'--b\r\nContent-Disposition: form-data; name="file"; filename="/root/half"\r\n\r\nabc'
    form = {**client.headers, "content-type": "multipart/form-data; boundary=b"}
    assert client.http.post(f"{client.base}/files", content=half, headers=form).status_code == 400
    assert client.http.get(f"{client.base}/files?path=/root/x&username=nobody-here", headers=client.headers).json() == {
        "code": 401, "message": "error looking up user 'nobody-here': user: unknown user nobody-here"
    }  # fmt: skip
    assert proxy.client.post("/t/wrong/e2b/v2/sandboxes", json={"templateID": "n999999"}).status_code == 404
    assert proxy.client.post("/t/wrong/e2b/v2/sandboxes", json={"templateID": "no-such-image"}).status_code == 404
    for given in ({"volumeMounts": [{"name": "v", "path": "/v"}]}, {"timeout": -1}, {"envVars": {"a=": ""}}):
        assert proxy.client.post("/t/wrong/e2b/v2/sandboxes", json=given).status_code in (400, 501)
    for verb in ("pause", "snapshots", "connect"):
        answer = client.control("POST", f"/sandboxes/{client.sandbox}/{verb}", memory=False)
        assert (answer.status_code, "not without" in answer.json()["message"]) == (400, True)
    assert proxy.client.post("/t/wrong/e2b/v3/templates", json={}).status_code == 501
    # The user that is not there was looked for in the sandbox, and that is an answer like any other.
    assert proxy.recorded == recorded + 1


def test_a_deadline_ends_the_command_and_is_told_as_one(proxy: Proxy) -> None:
    client = Client(proxy, "deadline")
    with client.start("sleep 0.2; echo soon; sleep 60; echo never", **{"connect-timeout-ms": "700"}) as told:
        printed, last = joined(told)
    assert (printed, last["last"]["error"]["code"]) == ("soon\n", "deadline_exceeded")
    assert client.run("ps ax | grep -c '[s]leep 60' || true") == "0\n"


def test_a_silent_stream_says_that_all_is_well(proxy: Proxy) -> None:
    client = Client(proxy, "alive")
    with client.start("sleep 1.5", **{"keepalive-ping-interval": "1"}) as told:
        kinds = [next(iter(event)) for event in told]
    assert kinds == ["start", "keepalive", "end", "last"]
