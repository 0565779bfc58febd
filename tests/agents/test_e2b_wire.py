"""E2B's protocol by hand: cut streams, concurrent rollouts, invalid requests."""

import base64
from collections.abc import Callable
from functools import partial

import httpx

from proxy.compat.e2b import connect_rpc as connect
from proxy.compat.e2b.sandbox_registry import SandboxRegistry
from tests.agents.e2b_requests import ENDED, START, Client, calls, joined
from tests.agents.serving import Proxy
from tests.machine import wait_until


def test_retried_start_joins_the_first(proxy: Proxy) -> None:
    """A start whose stream was cut, sent again, runs nothing twice and gets the first run's output."""
    client = Client(proxy, "again")
    command = "echo ran >>/root/runs; sleep 3; wc -l </root/runs"
    for _ in range(2):
        with client.start(command) as stream:
            assert "start" in next(stream)
    assert client.run(command) == "1\n"
    assert calls(proxy, "again", client.sandbox) == [("run", "miss")]


def test_retry_after_the_end_is_answered(proxy: Proxy) -> None:
    """A process that ended while its client was gone answers the retry; the next equal start is a new call."""
    client = Client(proxy, "unheard")
    with client.start("echo ran >>/root/runs; wc -l </root/runs; sleep 1") as stream:
        next(stream)
    wait_until(lambda: bool(calls(proxy, "unheard", client.sandbox)), "it does not end")
    assert client.run("echo ran >>/root/runs; wc -l </root/runs; sleep 1") == "1\n"
    assert client.run("echo ran >>/root/runs; wc -l </root/runs; sleep 1") == "2\n"


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
    command = "until [ -p /root/gate ]; do sleep 0.01; done; read -r line </root/gate; sleep 1; echo done >/root/told"
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
    with client.start("echo soon; sleep 60; echo never", **{"connect-timeout-ms": "2000"}) as stream:
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


def started(client: Client, command: str, **headers: str) -> httpx.Response:
    """Start a process as a client that reads the response as one."""
    body = connect.envelope({"process": {"cmd": "/bin/bash", "args": ["-c", command]}})
    sent = {**client.headers, "content-type": connect.STREAM, **headers}
    return client.http.post(f"{client.base}/{START}", content=body, headers=sent)


def test_known_starts_are_answered_whole(proxy: Proxy) -> None:
    """A known start is one response with the events of the first run; what decides the call decides the hit as well."""
    first, plain, other, own = (
        Client(proxy, "whole"), Client(proxy, "whole"), Client(proxy, "whole"),
        Client(proxy, "whole", envVars={"A": "own"}),
    )  # fmt: skip
    command = "echo ${A-none}; echo wrong >&2; echo ran >>/root/runs; exit 3"
    made = started(first, command)
    # Once another rollout has had the answer, a way to its state is known.
    started(Client(proxy, "whole"), command)
    known = started(plain, command)
    assert "content-length" not in made.headers
    assert known.headers["cache-status"] == "forkpoint; hit"
    assert known.content == made.content
    assert calls(proxy, "whole", plain.sandbox) == [("run", "hit")]
    # A sandbox with variables of its own runs another call, and so does one with a time limit.
    assert "cache-status" not in started(own, command).headers
    assert calls(proxy, "whole", own.sandbox) == [("run", "miss")]
    assert "cache-status" not in started(other, command, **{"connect-timeout-ms": "9000"}).headers
    # A header that names another sandbox than its URL is never that other sandbox's call.
    assert started(plain, command, **{"e2b-sandbox-id": "nobody"}).headers.get("cache-status") is None
    # At the next node the same call is another one.
    assert "cache-status" not in started(plain, "wc -l </root/runs").headers
    paused = Client(proxy, "whole")
    assert started(paused, command).headers["cache-status"] == "forkpoint; hit"
    paused.control("POST", f"/sandboxes/{paused.sandbox}/pause")
    assert started(paused, "wc -l </root/runs").status_code == 502


def test_known_starts_run_in_the_sandbox_that_their_host_names(proxy: Proxy) -> None:
    """Of several sandboxes below one URL, that is not the URL's rollout."""
    command = "echo ran >>/root/runs; wc -l </root/runs"
    before = Client(proxy, "hosts")
    first, second = (proxy.client.post("/t/hosts/r/a/e2b/sandboxes").json()["sandboxID"] for _ in range(2))
    client = Client(proxy, "hosts", second)
    client.base, client.headers = f"/t/hosts/r/{first}/e2b", {"host": f"49983-{second}.localhost"}
    for runs in ("1\n", "2\n"):
        assert before.run(command) == client.run(command) == runs
    assert calls(proxy, "hosts", first) == []
    assert calls(proxy, "hosts", second) == [("run", "hit")] * 2


def test_starts_behind_followed_processes_come_after_their_output(proxy: Proxy) -> None:
    """While a background process is followed, a known start waits for the polls before it."""
    seen = []
    for _ in range(2):
        client = Client(proxy, "behind")
        client.run("mkfifo /root/gate")
        with client.start("exec 3<>/root/gate; read -r line <&3; echo heard; read -r line <&3") as stream:
            next(stream)
            client.run("echo one >/root/gate")
            heard = base64.b64decode(next(stream)["data"]["stdout"])
            seen.append((heard, "cache-status" in started(client, "echo after").headers))
        steps = [tool for tool, _ in calls(proxy, "behind", client.sandbox)]
    assert seen == [(b"heard\n", False)] * 2
    assert steps.index("attend") < len(steps) - 1


def test_nothing_is_remembered_of_ended_sandboxes(proxy: Proxy) -> None:
    """A trainer ends rollouts by REST, not by the SDK: each left a note behind."""
    ends = [getattr(end, "__self__", None) for end in proxy.engine.tasks.rollouts.at_end]
    [registry] = [owner for owner in ends if isinstance(owner, SandboxRegistry)]
    sandbox = Client(proxy, "ends").sandbox
    number = proxy.engine.tasks.rollouts.running["ends", sandbox].id
    assert (number in registry._notes, number in registry._lifetimes._timers) == (True, True)
    assert proxy.client.delete(f"/api/v1/tasks/ends/rollouts/{sandbox}").status_code == 204
    assert (number in registry._notes, number in registry._lifetimes._timers) == (False, False)
