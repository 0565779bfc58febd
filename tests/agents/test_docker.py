"""Docker's own clients, unmodified, before Forkpoint: the SDK, the command line, and what no client should send."""

import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
from docker.errors import APIError, ImageNotFound, NotFound

from tests.agents.serving import Proxy, real_proxy
from tests.machine import data_directory, require_sandboxes, served, wait_until

HIT, MISS = "hit", "miss"


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with real_proxy() as running:
        yield running


@pytest.fixture
def task(proxy: Proxy, request: pytest.FixtureRequest) -> str:
    """A task of its own for each test."""
    name = str(request.node.name.split("[")[0][-80:])
    proxy.put(name, workdir="/root")
    return name


@contextmanager
def sdk(proxy: Proxy, task: str, rollout: str = "") -> Iterator[docker.DockerClient]:
    """A client of docker-py at a task's endpoint."""
    with closing(docker.DockerClient(base_url=f"tcp://{place(proxy, task, rollout)}", timeout=30)) as client:
        yield client


def place(proxy: Proxy, task: str, rollout: str = "") -> str:
    inner = f"/r/{rollout}" if rollout else ""
    return f"{proxy.address[0]}:{proxy.address[1]}/t/{task}{inner}/docker"


def outcomes(proxy: Proxy, task: str, rollout: str) -> list[str]:
    found = proxy.client.get(f"/api/v1/tasks/{task}/rollouts/{rollout}").json()["steps"]
    return [step["outcome"] for step in found]


# -- the SDK ---------------------------------------------------------------------------------------------------------


def test_containers_of_one_task_are_rollouts_that_share_what_they_have_in_common(proxy: Proxy, task: str) -> None:
    with sdk(proxy, task) as client:
        boxes = [
            client.containers.run("any:1", "sleep infinity", detach=True, name=f"agent-{n}", environment={"X": "1"})
            for n in range(3)
        ]
        assert not proxy.engine.pool.roster.slots, "a container starts nothing before its first miss"
        for n, box in enumerate(boxes):
            told = box.exec_run(
                ["sh", "-c", "echo $X; echo err >&2; head -c 4 /dev/urandom | od -An -tx1 >drawn"], demux=True
            )
            assert [told.exit_code, *told.output] == [0, b"1\n", b"err\n"]
            assert box.exec_run("cat drawn").exit_code == 0
            box.exec_run(["sh", "-c", f"echo {n} > own"])
        for n, box in enumerate(boxes):
            assert box.exec_run("cat own").output == f"{n}\n".encode()
        assert [outcomes(proxy, task, str(box.id))[:2] for box in boxes[1:]] == [[HIT, HIT]] * 2
        assert sorted(str(box.name) for box in client.containers.list()) == ["agent-0", "agent-1", "agent-2"]
        boxes[0].remove(force=True)
        with pytest.raises(NotFound):
            client.containers.get("agent-0")


def test_other_create_bodies_are_other_trees(proxy: Proxy, task: str) -> None:
    with sdk(proxy, task) as client:
        for value in ("1", "2", "1"):
            box = client.containers.run(
                "any:1", "sleep infinity", detach=True, environment={"X": value}, working_dir="/tmp"
            )
            assert box.exec_run(["sh", "-c", "echo $X $PWD"]).output == f"{value} /tmp\n".encode()
    trees = {rollout.tree.id for (name, _), rollout in proxy.engine.tasks.rollouts.items() if name == task}
    assert len(trees) == 2


def test_archives_are_copied_in_and_out_and_count_by_their_contents(proxy: Proxy, task: str) -> None:
    seen = []
    for n, rollout in enumerate(("a", "b", "c")):
        with sdk(proxy, task, rollout) as client:
            box = client.containers.run("any:1", "sleep infinity", detach=True)
            content = b"same\n" if n < 2 else b"other\n"
            assert box.put_archive("/tmp", packed({"in/f": content}, mtime=1000 + n))
            told, facts = box.get_archive("/tmp/in")
            with tarfile.open(fileobj=io.BytesIO(b"".join(told))) as archive:
                file = archive.extractfile("in/f")
                assert file is not None
                assert file.read() == content
            assert facts is not None
            seen.append((facts["name"], bool(facts["mode"] & 1 << 31), outcomes(proxy, task, rollout)))
            with pytest.raises(NotFound, match="Could not find the file /no/such"):
                box.get_archive("/no/such")
    assert seen == [("in", True, [MISS, MISS]), ("in", True, [HIT, HIT]), ("in", True, [MISS, MISS])]


def packed(files: dict[str, bytes], *, mtime: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), mtime
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_a_main_command_is_the_first_call_and_its_log_is_kept(proxy: Proxy, task: str) -> None:
    for rollout in ("a", "b"):
        with sdk(proxy, task, rollout) as client:
            assert client.containers.run("any:1", ["sh", "-c", "echo out; echo err >&2"], remove=True) == b"out\n"
            box = client.containers.run("any:1", ["sh", "-c", "echo out; exit 4"], detach=True)
            assert box.wait()["StatusCode"] == 4
            assert box.logs() == b"out\n"
            box.reload()
            assert (box.status, box.attrs["State"]["ExitCode"]) == ("exited", 4)
            with pytest.raises(APIError, match="is not running"):
                box.exec_run("true")
            box.start()
            box.wait()
            box.remove()
    assert outcomes(proxy, task, "b")[:1] == [HIT]


def test_an_entrypoint_that_ends_in_waiting_is_shared_state(proxy: Proxy, task: str) -> None:
    entry = ["sh", "-c", 'echo set up > /tmp/ready; exec "$@"', "entry"]
    for rollout in ("a", "b"):
        with sdk(proxy, task, rollout) as client:
            box = client.containers.run("any:1", "sleep infinity", entrypoint=entry, detach=True)
            look = "until [ -s /tmp/ready ]; do sleep 0.01; done; cat /tmp/ready"
            assert box.exec_run(["sh", "-c", look]).output == b"set up\n"
            box.reload()
            assert box.status == "running"
    assert outcomes(proxy, task, "b") == [HIT, HIT]


def test_a_stopped_container_has_its_files_and_no_processes_when_it_starts_again(proxy: Proxy, task: str) -> None:
    with sdk(proxy, task, "a") as client:
        box = client.containers.run("any:1", "sleep infinity", detach=True)
        box.exec_run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo here > file"])
        box.stop()
        assert client.containers.list() == []
        box.start()
        look = "cat file; grep -cax 'sleep.1000.' /proc/[0-9]*/cmdline | grep -c :1"
        assert box.exec_run(["sh", "-c", look]).output == b"here\n0\n"


def test_an_image_that_nobody_gives_is_not_there(proxy: Proxy) -> None:
    with sdk(proxy, "never-put") as client, pytest.raises(ImageNotFound, match="No such image: any:1"):
        client.containers.create("any:1", "sleep infinity")


def test_names_are_taken_once_and_what_cannot_be_had_is_said(proxy: Proxy, task: str) -> None:
    with sdk(proxy, task) as client:
        box = client.containers.create("any:1", "sleep infinity", name="taken")
        with pytest.raises(APIError) as conflict:
            client.containers.create("any:1", "sleep infinity", name="taken")
        assert conflict.value.status_code == 409
        assert f'already in use by container "{box.id}"' in str(conflict.value)
        for more in ({"volumes": ["/etc:/mnt"]}, {"ports": {"80/tcp": 8080}}):
            with pytest.raises(APIError) as refused:
                client.containers.create("any:1", "sleep infinity", **more)
            assert refused.value.status_code == 400


def test_containers_live_over_a_kill_and_a_restart_of_the_proxy() -> None:
    require_sandboxes()
    with data_directory() as folder, served(folder) as running:
        httpx.put(f"{running.url}/api/v1/tasks/again", json={"workdir": "/root"}).raise_for_status()
        host = f"tcp://127.0.0.1:{running.port}/t/again/docker"
        with closing(docker.DockerClient(base_url=host)) as client:
            box = client.containers.run("any:1", "sleep infinity", detach=True, name="agent", environment={"X": "7"})
            box.exec_run(["sh", "-c", "echo $X > file"])
            lost = client.api.exec_create(box.id, ["true"])["Id"]
        running.kill()
        running.start()
        with closing(docker.DockerClient(base_url=host)) as client:
            box = client.containers.get("agent")
            assert (box.status, box.exec_run("cat file").output) == ("running", b"7\n")
            # As after a restart of Docker's daemon.
            with pytest.raises(NotFound, match="No such exec instance"):
                client.api.exec_start(lost)
            box.remove(force=True)


# -- the command line ------------------------------------------------------------------------------------------------


def cli(proxy: Proxy, task: str, rollout: str, *arguments: str, stdin: str = "", within_s: float = 30.0) -> Any:
    if shutil.which("docker") is None:
        assert not os.environ.get("FORKPOINT_NEEDS_DOCKER")
        pytest.skip("the docker command line is not installed")
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "DOCKER_HOST": f"tcp://{place(proxy, task, rollout)}"}
    return subprocess.run(
        ["docker", *arguments], env=own, input=stdin, capture_output=True, text=True, check=False, timeout=within_s
    )


def test_the_command_line_runs_execs_copies_and_ends_containers(proxy: Proxy, task: str, tmp_path: Any) -> None:
    (tmp_path / "f").write_text("from outside\n")
    told = {}
    for rollout in ("a", "b"):

        def said(*arguments: str, stdin: str = "", rollout: str = rollout) -> tuple[int, str, str]:
            done = cli(proxy, task, rollout, *arguments, stdin=stdin)
            return done.returncode, done.stdout, done.stderr

        name = f"agent-{rollout}-{os.getpid()}"
        assert said("run", "-d", "--rm", "--name", name, "-w", "/tmp", "any:1", "sleep", "2h")[0] == 0
        told[rollout] = [
            said("exec", name, "sh", "-c", "pwd; echo err >&2; exit 3"),
            said("exec", "-i", name, "tr", "a-z", "A-Z", stdin="input\n"),
            said("exec", "-t", name, "sh", "-c", "test -t 0 && echo a terminal"),
            said("exec", "-w", "/no/such", name, "true"),
            said("exec", "-d", name, "sh", "-c", "echo detached > /tmp/d; sleep 1000"),
            said("cp", str(tmp_path / "f"), f"{name}:/tmp/g"),
            said("exec", name, "sh", "-c", "cat /tmp/g; until [ -s /tmp/d ]; do sleep 0.05; done; cat /tmp/d"),
            said("run", "--rm", "any:1", "sh", "-c", "echo main; exit 6"),
            said("run", "--rm", "-i", "any:1", "cat", stdin="to main\n"),
            said("stop", name)[:1],
            said("exec", name, "true")[:1],
        ]
    chdir = 'chdir to cwd ("/no/such") set in config.json failed: no such file or directory: unknown'
    assert told["a"] == [
        (3, "/tmp\n", "err\n"),
        (0, "INPUT\n", ""),
        (0, "a terminal\n", ""),
        (126, f"OCI runtime exec failed: exec failed: unable to start container process: {chdir}\n", ""),
        (0, "", ""),
        (0, "", told["a"][5][2]),
        (0, "from outside\ndetached\n", ""),
        (6, "main\n", ""),
        (0, "to main\n", ""),
        (0,),
        (1,),
    ]
    assert told["b"] == told["a"]


def test_a_command_whose_client_is_killed_goes_on_and_is_recorded_for_nobody_else(proxy: Proxy, task: str) -> None:
    def begin(rollout: str) -> None:
        assert cli(proxy, task, rollout, "run", "-d", "--name", "box", "any:1", "sleep", "2h").returncode == 0

    command = ("exec", "box", "sh", "-c", "echo begun; sleep 3; echo done > /tmp/done; sleep 1000")
    begin("a")
    with pytest.raises(subprocess.TimeoutExpired):
        cli(proxy, task, "a", *command, within_s=1.0)
    look = ("exec", "box", "sh", "-c", "until [ -s /tmp/done ]; do sleep 0.05; done; cat /tmp/done")
    assert cli(proxy, task, "a", *look, within_s=20).stdout == "done\n"
    assert outcomes(proxy, task, "a")[0] == "bypass"
    begin("b")
    with pytest.raises(subprocess.TimeoutExpired):
        cli(proxy, task, "b", *command, within_s=1.0)
    assert cli(proxy, task, "b", "rm", "-f", "box").returncode == 0


# -- bad input -------------------------------------------------------------------------------------------------------


def sent(proxy: Proxy, data: bytes, *, half_close: bool = True) -> bytes:
    """Send bytes; return all that comes back until the connection ends."""
    with socket.create_connection(proxy.address, timeout=20) as connection:
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def started(proxy: Proxy, task: str, rollout: str, *argv: str, **more: Any) -> tuple[str, str]:
    """Begin a container and an exec in it, by plain requests; return their ids."""
    base = f"/t/{task}/r/{rollout}/docker"
    box = proxy.client.post(f"{base}/containers/create", json={"Image": "any:1", "Cmd": ["sleep", "2h"]}).json()["Id"]
    assert proxy.client.post(f"{base}/v1.41/containers/{box}/start").status_code == 204
    body = {"Cmd": list(argv), "AttachStdout": True, "AttachStderr": True, **more}
    return box, proxy.client.post(f"{base}/containers/{box}/exec", json=body).json()["Id"]


def start_request(task: str, rollout: str, one: str, *, headers: str = "", body: bytes = b'{"Tty":false}') -> bytes:
    head = f"POST /t/{task}/r/{rollout}/docker/v1.41/exec/{one}/start HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


UPGRADE = "Connection: Upgrade\r\nUpgrade: tcp\r\n"


@pytest.mark.parametrize(("headers", "first"), [(UPGRADE, b"HTTP/1.1 101 UPGRADED"), ("", b"HTTP/1.1 200 OK")])
def test_new_and_old_clients_take_their_connections_over(proxy: Proxy, task: str, headers: str, first: bytes) -> None:
    for rollout in (f"a{len(headers)}", f"b{len(headers)}"):
        _, one = started(proxy, task, rollout, "sh", "-c", "cat; echo err >&2; exit 2", AttachStdin=True)
        request = start_request(task, rollout, one, headers=headers)
        # With the request, and after it: input is input.
        extra = b"with it, " if headers else b""
        with socket.create_connection(proxy.address, timeout=20) as connection:
            connection.sendall(request + extra)
            head = connection.recv(65536)
            connection.sendall(b"after it\n" if headers else b"with it, after it\n")
            connection.shutdown(socket.SHUT_WR)
            data = head.partition(b"\r\n\r\n")[2]
            while chunk := connection.recv(65536):
                data += chunk
        assert head.startswith(first)
        assert frames(data) == {1: b"with it, after it\n", 2: b"err\n"}
        told = proxy.client.get(f"/t/{task}/r/{rollout}/docker/exec/{one}/json").json()
        assert (told["ExitCode"], told["Running"]) == (2, False)
        # An instance runs once.
        assert sent(proxy, request).startswith(b"HTTP/1.1 409 ")


def frames(data: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while data:
        kind, length = struct.unpack(">BxxxI", data[:8])
        if length:
            found[kind] = found.get(kind, b"") + data[8 : 8 + length]
        data = data[8 + length :]
    return found


def test_a_request_in_pieces_is_one_request(proxy: Proxy, task: str) -> None:
    for headers in (UPGRADE, ""):
        rollout = f"r{len(headers)}"
        _, one = started(proxy, task, rollout, "echo", "hi")
        with socket.create_connection(proxy.address, timeout=20) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = start_request(task, rollout, one, headers=headers)
            for at in range(0, len(request), 40):
                connection.sendall(request[at : at + 40])
            answer = b""
            while chunk := connection.recv(65536):
                answer += chunk
        assert frames(answer.partition(b"\r\n\r\n")[2]) == {1: b"hi\n"}


BAD: dict[str, tuple[str, str, Any, int, str]] = {
    "no page": ("GET", "/no/such", None, 404, "page not found"),
    "no page below a container": ("GET", "/containers/{box}/export", None, 404, "page not found"),
    "wrong method": ("DELETE", "/version", None, 404, "page not found"),
    "too new": ("GET", "/v1.99/version", None, 400, "client version 1.99 is too new"),
    "too old": ("GET", "/v1.10/version", None, 400, "client version 1.10 is too old"),
    "no container": ("GET", "/containers/nosuch/json", None, 404, "No such container: nosuch"),
    "a slash in a name": ("GET", "/containers/a%2Fb/json", None, 404, "No such container: a/b"),
    "out of the endpoint": ("GET", "/containers/..%2F..%2Fjson/json", None, 404, "No such container"),
    "no exec": ("GET", "/exec/nosuch/json", None, 404, "No such exec instance: nosuch"),
    "no command": ("POST", "/containers/{box}/exec", {"Cmd": []}, 400, "No exec command specified"),
    "words that are none": ("POST", "/containers/{box}/exec", {"Cmd": [1]}, 400, "must be a list of strings"),
    "no JSON": ("POST", "/containers/{box}/exec", b"{", 400, "invalid JSON"),
    "no image": ("POST", "/containers/create", {"Cmd": ["a"]}, 400, "name an Image"),
    "bad name": ("POST", "/containers/create?name=a%20b", {"Image": "x"}, 400, "Invalid container name"),
    "half an archive": ("PUT", "/containers/{box}/archive?path=/tmp", b"half", 400, "no whole tar archive"),
    "nowhere": ("PUT", "/containers/{box}/archive?path=/no/such", b"", 404, "Could not find the file /no/such"),
    "no stream": ("POST", "/exec/{one}/start", b'{"Detach": tru', 400, "invalid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_what_is_wrong_is_said_in_dockers_own_form_and_nothing_is_recorded(proxy: Proxy, task: str, bad: str) -> None:
    method, path, body, status, words = BAD[bad]
    rollout = bad.replace(" ", "-")
    box, one = started(proxy, task, rollout, "true")
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    recorded = proxy.recorded
    answer = proxy.client.request(
        method, f"/t/{task}/r/{rollout}/docker{path.format(box=box, one=one)}", content=content
    )
    assert (answer.status_code, list(answer.json())) == (status, ["message"])
    assert words in answer.json()["message"]
    if bad not in {"half an archive", "nowhere"}:
        assert proxy.recorded == recorded


def test_half_a_request_and_two_framings_are_nobodys_call(proxy: Proxy, task: str) -> None:
    _, one = started(proxy, task, "a", "sh", "-c", "echo ran > /tmp/ran")
    request = start_request(task, "a", one, headers=UPGRADE)
    assert sent(proxy, request[:-4]) == b""
    smuggled = start_request(task, "a", one, headers=f"{UPGRADE}Transfer-Encoding: chunked\r\n")
    assert b"101" not in sent(proxy, smuggled)[:20]
    assert outcomes(proxy, task, "a") == []
    # It is still there to be started.
    assert sent(proxy, request).startswith(b"HTTP/1.1 101")


def test_one_rollouts_containers_and_execs_are_not_anothers(proxy: Proxy, task: str) -> None:
    box, one = started(proxy, task, "a", "true")
    for path in (f"/containers/{box}/json", f"/exec/{one}/json"):
        assert proxy.client.get(f"/t/{task}/r/a/docker{path}").status_code == 200
        assert proxy.client.get(f"/t/{task}/r/b/docker{path}").status_code == 404
        assert proxy.client.get(f"/t/{task}/docker{path}").status_code == 404
    assert sent(proxy, start_request(task, "b", one, headers=UPGRADE)).startswith(b"HTTP/1.1 404 ")


def test_health_is_answered_at_once_for_a_task_that_nobody_knows(proxy: Proxy) -> None:
    begun = time.monotonic()
    answer = proxy.client.get("/t/unheard-of/r/x/docker/_ping")
    assert (answer.text, answer.headers["api-version"]) == ("OK", "1.44")
    assert time.monotonic() - begun < 0.15
    assert proxy.client.get("/api/v1/tasks/unheard-of").status_code == 404


def test_two_clients_of_one_rollout_are_answered_one_after_the_other(proxy: Proxy, task: str) -> None:
    box, first = started(proxy, task, "a", "sh", "-c", "sleep 0.3; echo first >> /tmp/order")
    body = {"Cmd": ["sh", "-c", "echo second >> /tmp/order; cat /tmp/order"], "AttachStdout": True}
    second = proxy.client.post(f"/t/{task}/r/a/docker/containers/{box}/exec", json=body).json()["Id"]
    with socket.create_connection(proxy.address, timeout=20) as connection:
        connection.sendall(start_request(task, "a", first, headers=UPGRADE))
        wait_until(lambda: proxy.engine.tasks.rollouts[task, "a"].waiting > 0, "it does not begin")
        answer = sent(proxy, start_request(task, "a", second, headers=UPGRADE))
        while connection.recv(65536):
            pass
    assert frames(answer.partition(b"\r\n\r\n")[2]) == {1: b"first\nsecond\n"}


def test_a_log_is_followed_while_it_comes_and_its_container_lets_others_in(proxy: Proxy, task: str) -> None:
    with sdk(proxy, task, "a") as client:
        box = client.containers.run(
            "any:1",
            ["sh", "-c", "echo one; until [ -e /tmp/go ]; do sleep 0.05; done; echo two; sleep 1000"],
            detach=True,
        )
        told = box.logs(stream=True, follow=True)
        assert next(told) == b"one\n"
        # An exec while it runs: from now on it goes on by itself.
        assert box.exec_run(["sh", "-c", "touch /tmp/go; echo in"]).output == b"in\n"
        assert outcomes(proxy, task, "a")[0] == "bypass"
        box.remove(force=True)
        with pytest.raises(StopIteration):
            next(told)


def test_the_example_runs_as_it_is(proxy: Proxy) -> None:
    example = Path(__file__).parents[2] / "examples" / "docker_sdk" / "group.py"
    host = f"tcp://{proxy.address[0]}:{proxy.address[1]}"
    done = subprocess.run([sys.executable, str(example), host], capture_output=True, text=True, check=True, timeout=60)
    assert [line.split(" shared")[0] for line in done.stdout.splitlines()] == [
        f"{n} b'7\\n' b'7\\n{n}\\n'" for n in range(4)
    ]
