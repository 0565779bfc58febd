"""E2B's protocol by hand: cut streams, restarts, snapshots, concurrent rollouts, invalid requests."""

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
    """Sends what an SDK sends. Without a sandbox to continue with, one is created."""

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
        """Send a request on a connection of its own, which is closed at the end of the block."""
        all_headers = {**self.headers, "content-type": connect.STREAM, **headers}
        with httpx.Client(base_url=self.http.base_url, timeout=60, trust_env=False) as own:
            request = own.build_request("POST", f"{self.base}/{method}", content=body, headers=all_headers)
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
        """Run a command that succeeds; return its output."""
        with self.start(command, **headers) as stream:
            printed, last = joined(stream)
        assert last == ENDED, last
        return printed


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the messages of a stream, the last one under `last`."""
    rest = b""
    for chunk in response.iter_raw():
        rest += chunk
        while len(rest) >= 5 and len(rest) >= 5 + (size := int.from_bytes(rest[1:5], "big")):
            value = json.loads(rest[5 : 5 + size])
            yield {"last": value} if rest[0] & 2 else value.get("event", value)
            rest = rest[5 + size :]


def joined(stream: Iterator[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the output, and the last event that is not empty."""
    printed, last = b"", dict[str, Any]()
    for event in stream:
        printed += base64.b64decode(event.get("data", {}).get("stdout", ""))
        last = event if event != {"last": {}} else last
    return printed.decode(), last


def calls(proxy: Answering, task: str, rollout: str) -> list[tuple[str, str]]:
    """Return the tools that a rollout called, and the outcome of each call."""
    steps = proxy.client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}").json()["steps"]["items"]
    return [(step["call"]["tool"], step["outcome"]) for step in steps]


def test_retried_start_joins_the_first(proxy: Proxy) -> None:
    """A start whose stream was cut, sent again, runs nothing twice and gets the first run's output."""
    client = Client(proxy, "again")
    command = "echo ran >>/root/runs; sleep 0.7; wc -l </root/runs"
    for _ in range(2):
        with client.start(command) as stream:
            assert "start" in next(stream)
    assert client.run(command) == "1\n"
    assert calls(proxy, "again", client.sandbox) == [("run", "miss")]


def test_retry_after_the_end_is_answered(proxy: Proxy) -> None:
    """A process that ended while its client was gone answers the retry; the next equal start is a new call."""
    client = Client(proxy, "unheard")
    with client.start("echo ran >>/root/runs; wc -l </root/runs; sleep 0.2") as stream:
        next(stream)
    wait_until(lambda: bool(calls(proxy, "unheard", client.sandbox)), "it does not end")
    assert client.run("echo ran >>/root/runs; wc -l </root/runs; sleep 0.2") == "1\n"
    assert client.run("echo ran >>/root/runs; wc -l </root/runs; sleep 0.2") == "2\n"


def test_lost_client_detaches_its_process(proxy: Proxy) -> None:
    """A client that disconnects and then makes another call leaves its process in the background."""
    client = Client(proxy, "vanish")
    with client.start("mkfifo /root/gate; read -r line </root/gate; echo $line >/root/told; sleep 60") as stream:
        pid = next(stream)["start"]["pid"]
    assert client.run("until [ -p /root/gate ]; do sleep 0.01; done; echo go >/root/gate") == ""
    assert client.run("until [ -s /root/told ]; do sleep 0.01; done; cat /root/told") == "go\n"
    processes = client.call("process.Process/List").json()["processes"]
    assert [process["pid"] for process in processes] == [pid]
    assert client.call("process.Process/SendSignal", process={"pid": pid}, signal="SIGNAL_SIGKILL").json() == {}
    with client.stream("process.Process/Connect", connect.envelope({"process": {"pid": 1}})) as stream:
        assert next(stream)["last"]["error"]["code"] == "not_found"


def test_background_output_is_replayed_in_place(proxy: Proxy) -> None:
    """Output of a background process reaches a second rollout at the same calls, from the tree."""
    # The pipe is opened once: a second reader could read the end of a writer that has not closed it yet.
    command = "exec 3<>/root/gate; read -r line <&3; echo heard $line; read -r line <&3; echo and $line; exit 3"
    seen = []
    for _ in range(2):
        client = Client(proxy, "later")
        client.run("mkfifo /root/gate")
        with client.start(command) as stream:
            assert "start" in next(stream)
            client.run("echo one >/root/gate")
            early = [base64.b64decode(next(stream)["data"]["stdout"])]
            client.run("echo two >/root/gate")
            printed, last = joined(stream)
        seen.append((early, printed, last["end"]["exitCode"], client.run("echo after")))
        steps = calls(proxy, "later", client.sandbox)
    assert seen == [([b"heard one\n"], "and two\n", 3, "after\n")] * 2
    assert {outcome for _, outcome in steps} == {"hit"}
    assert [tool for tool, _ in steps].count("attend") >= 2


def test_deadline_ends_a_background_process(proxy: Proxy) -> None:
    """A deadline ends the stream and the process, also when the process was detached."""
    client = Client(proxy, "overdue")
    with client.start("sleep 30; echo late", **{"connect-timeout-ms": "600"}) as stream:
        next(stream)
        assert client.run("echo more") == "more\n"
        assert joined(stream)[1]["last"]["error"]["code"] == "deadline_exceeded"
    assert polled(partial(all_ended, client))


def send(client: Client, pid: int, data: bytes) -> httpx.Response:
    return client.call(
        "process.Process/SendInput", process={"pid": pid}, input={"stdin": base64.b64encode(data).decode()}
    )


def test_stream_of_input_is_one_write(proxy: Proxy) -> None:
    """The pieces of a stream of input reach the process as one write; its response is one empty message."""
    client = Client(proxy, "pieces")
    reader = {"process": {"cmd": "/bin/bash", "args": ["-c", "read -r line; echo $line"]}, "stdin": True}
    with client.stream(START, connect.envelope(reader)) as stream:
        process = {"process": {"pid": next(stream)["start"]["pid"]}}
        pieces = [{"input": {"stdin": base64.b64encode(piece).decode()}} for piece in (b"one ", b"two\n")]
        body = connect.envelope({"start": process}) + b"".join(connect.envelope({"data": piece}) for piece in pieces)
        with client.stream("process.Process/StreamInput", body) as response:
            assert list(response) == [{}, {"last": {}}]
        assert joined(stream) == ("one two\n", ENDED)
    unknown = connect.envelope({"start": {"process": {"pid": 1}}})
    with client.stream("process.Process/StreamInput", unknown) as response:
        assert next(response)["last"]["error"]["code"] == "not_found"


def test_terminal_is_private_to_its_rollout(proxy: Proxy) -> None:
    """Calls before a terminal are shared; the terminal and what follows belong to one rollout."""
    size = {"size": {"rows": 24, "cols": 80}}
    bash = {"cmd": "/bin/bash", "args": ["--norc", "-i"], "envs": {"TERM": "dumb", "PS1": ""}}
    drawn = set()
    for _ in range(2):
        client = Client(proxy, "typed")
        client.run("echo $RANDOM$RANDOM >/root/drawn")
        with client.stream(START, connect.envelope({"process": bash, "pty": size})) as stream:
            process = {"pid": next(stream)["start"]["pid"]}
            size["size"]["cols"] = 100
            assert client.call("process.Process/Update", process=process, pty=size).json() == {}
            keys = base64.b64encode(b"stty size; cat /root/drawn; cd /tmp; pwd\n").decode()
            assert client.call("process.Process/SendInput", process=process, input={"pty": keys}).json() == {}
            output = b""
            while not output.endswith(b"\r\n/tmp\r\n"):
                output += base64.b64decode(next(stream).get("data", {}).get("pty", ""))
            assert b"\r\n24 100\r\n" in output
            drawn.add(output.split()[-2])
            wrong = client.call("process.Process/SendInput", process=process, input={"stdin": keys})
            assert wrong.json()["code"] == "failed_precondition"
            assert client.call("process.Process/SendSignal", process=process, signal="SIGNAL_SIGKILL").json() == {}
            assert joined(stream)[1]["end"]["status"] == "signal: killed"
    assert len(drawn) == 1
    assert [outcome for _, outcome in calls(proxy, "typed", client.sandbox)][:2] == ["hit", "bypass"]


def test_watch_events_are_polled_and_streamed(proxy: Proxy) -> None:
    """Events of a watched directory reach polls and streams, each exactly once."""
    for _ in range(2):
        client = Client(proxy, "watched")
        client.run("mkdir /root/w; echo $RANDOM$RANDOM >/root/w/drawn")
        drawn = client.run("cat /root/w/drawn")
        watcher = client.call("filesystem.Filesystem/CreateWatcher", path="w").json()
        body = connect.envelope({"path": "w", "recursive": True})
        with client.stream("filesystem.Filesystem/WatchDir", body) as stream:
            assert next(stream) == {"start": {}}
            client.run("mkdir /root/w/sub; echo $(cat /root/w/drawn) >/root/w/sub/seen")
            assert next(stream) == {"filesystem": {"name": "sub", "type": "EVENT_TYPE_CREATE"}}
            assert next(stream)["filesystem"]["name"] == "sub/seen"
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


def job_is_done(client: Client) -> bool:
    return client.http.get(f"{client.base}/files?path=/root/told", headers=client.headers).status_code == 200


def all_ended(client: Client) -> bool:
    return not client.call("process.Process/List").json()["processes"]


def polled(is_done: Callable[[], bool]) -> int:
    """Return how many polls it took until the condition was true."""
    return next(count for count in range(1, 1000) if is_done())


def test_equal_writes_arrive_twice(proxy: Proxy) -> None:
    """Two equal writes to stdin are two steps, even before the process has read the first."""
    command = "read -r line </root/gate; read -r one; read -r two; echo $one-$two"
    body = connect.envelope({"process": {"cmd": "/bin/bash", "args": ["-c", command]}, "stdin": True})
    for _ in range(2):
        client = Client(proxy, "twice")
        client.run("mkfifo /root/gate")
        with client.stream(START, body) as stream:
            pid = next(stream)["start"]["pid"]
            for _ in range(2):
                assert send(client, pid, b"same\n").status_code == 200
            client.run("echo go >/root/gate")
            assert joined(stream)[0] == "same-same\n"
    assert {outcome for _, outcome in calls(proxy, "twice", client.sandbox)} == {"hit"}


def test_polls_beside_a_process_make_progress(proxy: Proxy) -> None:
    """Repeated calls beside a background process see its effects, and a second rollout gets them from the tree."""
    command = "until [ -p /root/gate ]; do sleep 0.01; done; read -r line </root/gate; sleep 0.3; echo done >/root/told"
    polls = []
    for _ in range(2):
        client = Client(proxy, "polls")
        with client.start(command) as stream:
            next(stream)
        client.run("mkfifo /root/gate; echo go >/root/gate")
        polls.append((polled(partial(job_is_done, client)), polled(partial(all_ended, client))))
    # The second rollout needs the same number of polls and no sandbox.
    assert polls[0][0] > 1
    assert polls[0] == polls[1]
    assert {outcome for _, outcome in calls(proxy, "polls", client.sandbox)} == {"hit"}


def test_reading_files_spares_starting_processes(proxy: Proxy) -> None:
    """Requests for files do not disturb a process that is just starting others."""
    client = Client(proxy, "starting")
    with client.start("for i in $(seq 60); do /bin/true || echo ended $i; done; echo all") as stream:
        next(stream)
        while client.call("process.Process/List").json()["processes"]:
            for _ in range(5):
                client.http.get(f"{client.base}/files?path=/root/none", headers=client.headers)
        assert joined(stream)[0] == "all\n"


def test_equal_starts_share_one_execution(proxy: Proxy) -> None:
    """Two rollouts wait for one execution, until either makes its next call: then the process is detached."""
    first, second = Client(proxy, "two"), Client(proxy, "two")
    with first.start("sleep 600 & echo $!; wait") as stream, second.start("sleep 600 & echo $!; wait") as other_stream:
        pid = next(stream)["start"]["pid"]
        output = base64.b64decode(next(stream)["data"]["stdout"])
        assert second.run("echo more") == "more\n"
        assert next(other_stream)["start"]["pid"] == pid
        assert base64.b64decode(next(other_stream)["data"]["stdout"]) == output
        assert first.run("echo more") == "more\n"
    assert [outcome for _, outcome in calls(proxy, "two", first.sandbox)][:2] == ["miss", "hit"]


def test_snapshots_forks_and_pauses_work(proxy: Proxy) -> None:
    """Snapshots and forks begin at nodes of the tree, and a paused sandbox resumes where it was."""
    client = Client(proxy, "places", metadata={"of": "mine"}, envVars={"TEAM": "blue"})
    client.run("echo $RANDOM$RANDOM >/root/drawn; echo one >/root/log")
    snapshot = client.control("POST", f"/sandboxes/{client.sandbox}/snapshots", name="s").json()
    client.run("echo two >>/root/log")
    output = client.run("cat /root/log /root/drawn; echo $TEAM")
    forked = client.control("POST", f"/sandboxes/{client.sandbox}/fork", count=2).json()
    for fork in forked:
        other = Client(proxy, "places", sandbox=fork["sandbox"]["sandboxID"])
        assert other.run("cat /root/log /root/drawn; echo $TEAM") == output
    back = Client(proxy, "places", templateID=snapshot["snapshotID"])
    assert back.run("cat /root/log /root/drawn") == output.replace("two\n", "").replace("blue\n", "")
    assert client.control("GET", "/snapshots").json() == [snapshot]
    first_page = client.control("GET", "/v2/sandboxes?metadata=of%3Dmine&state=running&limit=2")
    assert len(first_page.json()) == 2
    last_page = client.control(
        "GET", f"/v2/sandboxes?metadata=of%3Dmine&limit=2&nextToken={first_page.headers['x-next-token']}"
    )
    assert {sandbox["sandboxID"] for sandbox in first_page.json() + last_page.json()} == {
        client.sandbox, *(fork["sandbox"]["sandboxID"] for fork in forked)
    }  # fmt: skip
    path = f"/sandboxes/{client.sandbox}"
    assert client.control("POST", f"{path}/pause").status_code == 204
    assert client.control("POST", f"{path}/pause").status_code == 409
    assert client.call("process.Process/List").json()["message"] == "The sandbox was not found"
    assert client.control("GET", path).json()["state"] == "paused"
    assert client.control("POST", f"/v2{path}/connect").status_code == 201
    assert client.run("cat /root/log /root/drawn; echo $TEAM") == output
    assert client.control("DELETE", f"/templates/{snapshot['snapshotID']}").status_code == 204
    assert client.control("GET", "/snapshots").json() == []
    assert client.control("DELETE", path).status_code == 204
    assert client.control("DELETE", path).status_code == 404


def test_sandboxes_outlive_a_restart(tmp_path: Path) -> None:
    """Sandboxes, their metadata and their variables are there after a restart."""
    require_sandboxes()
    kept = tmp_path / "data"
    kept.mkdir()
    with real_proxy(kept=kept) as before:
        client = Client(before, "lasts", envVars={"TEAM": "blue"}, metadata={"of": "mine"})
        client.run("echo $TEAM >/root/team")
        # A process without a client does not delay the shutdown.
        with client.start("sleep 600") as stream:
            next(stream)
    with real_proxy(kept=kept) as after:
        client_after = Client(after, "lasts", sandbox=client.sandbox)
        assert client_after.control("GET", f"/sandboxes/{client.sandbox}").json()["metadata"] == {"of": "mine"}
        assert client_after.run("cat /root/team; echo $TEAM") == "blue\nblue\n"


def test_expired_sandbox_is_gone(proxy: Proxy) -> None:
    """A sandbox whose timeout has passed is gone for its client; the tree answers the next sandbox."""
    command = "echo begun; sleep 60"
    client = Client(proxy, "over", timeout=3600)
    path = f"/sandboxes/{client.sandbox}"
    with client.start(command) as stream:
        next(stream)
        assert base64.b64decode(next(stream)["data"]["stdout"]) == b"begun\n"
        assert client.control("POST", f"{path}/timeout", timeout=7200).status_code == 204
        assert client.run("echo goes on") == "goes on\n"
        assert client.control("POST", f"{path}/timeout", timeout=0).status_code == 204
        assert client.call("process.Process/List").json()["message"] == "The sandbox was not found"
        assert list(stream)[-1]["last"]["error"]["code"] == "unavailable"
    assert client.http.get(f"{client.base}/health", headers=client.headers).status_code == 502
    for method, target in (
        ("GET", path),
        ("POST", f"{path}/timeout"),
        ("POST", f"/v2{path}/connect"),
        ("DELETE", path),
    ):
        assert client.control(method, target).status_code == 404
    assert client.control("GET", "/v2/sandboxes").json() == []
    again = Client(proxy, "over")
    with again.start(command) as stream:
        next(stream)
        assert again.run("echo goes on") == "goes on\n"
    assert {outcome for _, outcome in calls(proxy, "over", again.sandbox)} == {"hit"}


def test_other_rollouts_have_no_timeout(proxy: Proxy) -> None:
    """A rollout that was started through another protocol is a sandbox without a timeout."""
    proxy.client.post("/t/other/r/seven/shell/exec", json={"command": "echo begun >/root/how"}).raise_for_status()
    client = Client(proxy, "other", sandbox="seven")
    assert client.control("POST", "/v2/sandboxes/seven/connect", timeout=0).status_code == 200
    assert client.run("cat /root/how") == "begun\n"


def test_expired_sandbox_may_pause_and_resume(proxy: Proxy) -> None:
    """A sandbox created with autoPause pauses on timeout; with autoResume the next request resumes it."""
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
        details = client.control("GET", path).json()
        assert details["state"] == "running"
        assert details["lifecycle"] == {"onTimeout": "pause", "autoResume": resumes}


def test_url_rollout_names_the_first_sandbox(proxy: Proxy) -> None:
    """The first sandbox below a URL with a rollout is that rollout; a second one has a name of its own."""
    base = "/t/named/r/seven/e2b"
    first, second = (proxy.client.post(f"{base}/v2/sandboxes", json={}).json()["sandboxID"] for _ in range(2))
    assert first == "seven"
    assert second.startswith("seven-")
    Client(proxy, "named", sandbox=first).run("echo first >/root/name")
    answer = proxy.client.get(f"{base}/files?path=/root/name", headers={"e2b-sandbox-id": second})
    assert answer.status_code == 404
    assert proxy.client.get(f"{base}/files?path=name").text == "first\n"


def test_create_is_idempotent(proxy: Proxy) -> None:
    """A create with the same idempotency key returns the same sandbox."""
    headers = {"idempotency-key": "k1"}
    created = [proxy.client.post("/t/idem/e2b/v2/sandboxes", json={}, headers=headers).json() for _ in range(2)]
    assert created[0] == created[1]
    assert Client(proxy, "idem").sandbox != created[0]["sandboxID"]


def test_invalid_requests_are_not_recorded(proxy: Proxy) -> None:
    """Invalid requests get an error in the form of their protocol, and nothing is recorded."""
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
        with client.stream(START, body) as stream:
            assert next(stream)["last"]["error"]["code"] in {"invalid_argument", "unimplemented"}
    half = b'--b\r\nContent-Disposition: form-data; name="file"; filename="/root/half"\r\n\r\nabc'
    form = {**client.headers, "content-type": "multipart/form-data; boundary=b"}
    assert client.http.post(f"{client.base}/files", content=half, headers=form).status_code == 400
    assert client.http.get(f"{client.base}/files?path=/root/x&username=nobody-here", headers=client.headers).json() == {
        "code": 401, "message": "error looking up user 'nobody-here': user: unknown user nobody-here"
    }  # fmt: skip
    assert proxy.client.post("/t/wrong/e2b/v2/sandboxes", json={"templateID": "n999999"}).status_code == 404
    assert proxy.client.post("/t/wrong/e2b/v2/sandboxes", json={"templateID": "no-such-image"}).status_code == 404
    for creation in ({"volumeMounts": [{"name": "v", "path": "/v"}]}, {"timeout": -1}, {"envVars": {"a=": ""}}):
        assert proxy.client.post("/t/wrong/e2b/v2/sandboxes", json=creation).status_code in (400, 501)
    for verb in ("pause", "snapshots", "connect"):
        answer = client.control("POST", f"/sandboxes/{client.sandbox}/{verb}", memory=False)
        assert (answer.status_code, "not without" in answer.json()["message"]) == (400, True)
    assert proxy.client.post("/t/wrong/e2b/v3/templates", json={}).status_code == 501
    # The unknown user was looked up in the sandbox, so this one answer is recorded.
    assert proxy.recorded == recorded + 1


def test_deadline_ends_the_command(proxy: Proxy) -> None:
    """The output before the deadline arrives, then the error; the process is killed."""
    client = Client(proxy, "deadline")
    with client.start("sleep 0.2; echo soon; sleep 60; echo never", **{"connect-timeout-ms": "700"}) as stream:
        printed, last = joined(stream)
    assert (printed, last["last"]["error"]["code"]) == ("soon\n", "deadline_exceeded")
    assert client.run("ps ax | grep -c '[s]leep 60' || true") == "0\n"


def test_silent_stream_sends_keepalives(proxy: Proxy) -> None:
    """A stream sends keepalives while its process is silent."""
    client = Client(proxy, "alive")
    with client.start("sleep 2.5", **{"keepalive-ping-interval": "1"}) as stream:
        first, *between, end, last = [next(iter(event)) for event in stream]
    assert (first, end, last) == ("start", "end", "last")
    assert set(between) == {"keepalive"}
