"""Docker's own clients, unmodified: the SDK and the command line."""

import io
import os
import shutil
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

from proxy.execution.errors import StateLostError
from tests.agents.serving import Proxy
from tests.machine import data_directory, require_sandboxes, served
from tests.sandboxes.box import needs_root

HIT, MISS = "hit", "miss"


@contextmanager
def sdk(proxy: Proxy, task: str, rollout: str = "") -> Iterator[docker.DockerClient]:
    """Open a client of Docker's SDK at a task's endpoint."""
    with closing(docker.DockerClient(base_url=f"tcp://{docker_host(proxy, task, rollout)}", timeout=30)) as client:
        yield client


def docker_host(proxy: Proxy, task: str, rollout: str = "") -> str:
    """Return the address that Docker's clients connect to."""
    inner = f"/r/{rollout}" if rollout else ""
    return f"{proxy.address[0]}:{proxy.address[1]}/t/{task}{inner}/docker"


# -- the SDK ---------------------------------------------------------------------------------------------------------


def test_containers_share_equal_calls(proxy: Proxy, task: str) -> None:
    """Three containers of a task run the same commands once, and then have files of their own."""
    with sdk(proxy, task) as client:
        containers = [
            client.containers.run("any:1", "sleep infinity", detach=True, name=f"agent-{n}", environment={"X": "1"})
            for n in range(3)
        ]
        assert not proxy.engine.pool.roster.slots, "a container starts nothing before its first miss"
        for n, container in enumerate(containers):
            result = container.exec_run(
                ["sh", "-c", "echo $X; echo err >&2; head -c 4 /dev/urandom | od -An -tx1 >drawn"], demux=True
            )
            assert [result.exit_code, *result.output] == [0, b"1\n", b"err\n"]
            assert container.exec_run("cat drawn").exit_code == 0
            container.exec_run(["sh", "-c", f"echo {n} > own"])
        for n, container in enumerate(containers):
            assert container.exec_run("cat own").output == f"{n}\n".encode()
        assert [proxy.outcomes(task, str(container.id))[:2] for container in containers[1:]] == [[HIT, HIT]] * 2
        assert sorted(str(container.name) for container in client.containers.list()) == [
            "agent-0",
            "agent-1",
            "agent-2",
        ]
        containers[0].remove(force=True)
        with pytest.raises(NotFound):
            client.containers.get("agent-0")


def test_create_body_selects_tree(proxy: Proxy, task: str) -> None:
    """Variables and directory of a create request are part of the environment, so they select the tree."""
    with sdk(proxy, task) as client:
        for value in ("1", "2", "1"):
            container = client.containers.run(
                "any:1", "sleep infinity", detach=True, environment={"X": value}, working_dir="/tmp"
            )
            assert container.exec_run(["sh", "-c", "echo $X $PWD"]).output == f"{value} /tmp\n".encode()
    trees = {rollout.tree.id for (name, _), rollout in proxy.engine.tasks.rollouts.running.items() if name == task}
    assert len(trees) == 2


def test_archives_are_shared_by_content(proxy: Proxy, task: str) -> None:
    """`docker cp` works both ways; equal contents with other times are the same call."""
    seen = []
    for n, rollout in enumerate(("a", "b", "c")):
        with sdk(proxy, task, rollout) as client:
            container = client.containers.run("any:1", "sleep infinity", detach=True)
            content = b"same\n" if n < 2 else b"other\n"
            assert container.put_archive("/tmp", packed({"in/f": content}, mtime=1000 + n))
            chunks, description = container.get_archive("/tmp/in")
            with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
                file = archive.extractfile("in/f")
                assert file is not None
                assert file.read() == content
            assert description is not None
            seen.append((description["name"], bool(description["mode"] & 1 << 31), proxy.outcomes(task, rollout)))
            with pytest.raises(NotFound, match="Could not find the file /no/such"):
                container.get_archive("/no/such")
    assert seen == [("in", True, [MISS, MISS]), ("in", True, [HIT, HIT]), ("in", True, [MISS, MISS])]


def packed(files: dict[str, bytes], *, mtime: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), mtime
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_main_command_is_first_call(proxy: Proxy, task: str) -> None:
    """The main command is a call of the rollout; its exit code and its log outlive it."""
    for rollout in ("a", "b"):
        with sdk(proxy, task, rollout) as client:
            assert client.containers.run("any:1", ["sh", "-c", "echo out; echo err >&2"], remove=True) == b"out\n"
            container = client.containers.run("any:1", ["sh", "-c", "echo out; exit 4"], detach=True)
            assert container.wait()["StatusCode"] == 4
            assert container.logs() == b"out\n"
            container.reload()
            assert (container.status, container.attrs["State"]["ExitCode"]) == ("exited", 4)
            with pytest.raises(APIError, match="is not running"):
                container.exec_run("true")
            container.start()
            container.wait()
            container.remove()
    assert proxy.outcomes(task, "b")[:1] == [HIT]


def test_background_entrypoint_is_shared(proxy: Proxy, task: str) -> None:
    """An entrypoint before a waiting command runs once; the second rollout restores the state that it made."""
    entrypoint = ["sh", "-c", 'echo set up > /tmp/ready; exec "$@"', "entry"]
    for rollout in ("a", "b"):
        with sdk(proxy, task, rollout) as client:
            container = client.containers.run("any:1", "sleep infinity", entrypoint=entrypoint, detach=True)
            wait_for_ready = "until [ -s /tmp/ready ]; do sleep 0.01; done; cat /tmp/ready"
            assert container.exec_run(["sh", "-c", wait_for_ready]).output == b"set up\n"
            container.reload()
            assert container.status == "running"
    assert proxy.outcomes(task, "b") == [HIT, HIT]


@pytest.mark.parametrize("user", ["root", pytest.param("nobody", marks=needs_root)])
def test_restart_keeps_files_and_ends_processes(proxy: Proxy, task: str, user: str) -> None:
    """A stopped container that is started again has its files and none of its processes, of whichever user."""
    with sdk(proxy, task, "a") as client:
        container = client.containers.run("any:1", "sleep infinity", detach=True, user=user)
        container.exec_run(["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo here > file; chmod a+rx ."], user="root")
        container.stop()
        assert client.containers.list() == []
        container.start()
        inspect = "cat file; grep -cax 'sleep.1000.' /proc/[0-9]*/cmdline | grep -c :1"
        assert container.exec_run(["sh", "-c", inspect]).output == b"here\n0\n"
        container.remove(force=True)


def test_processes_of_a_stopped_container_write_nothing_more(proxy: Proxy, task: str) -> None:
    """Its files can be copied, and are those of the moment at which it stopped."""
    with sdk(proxy, task, "a") as client:
        container = client.containers.run("any:1", "sleep infinity", detach=True)
        container.exec_run(["sh", "-c", "while sleep .01; do echo x >> file; done >/dev/null 2>&1 &"])
        container.stop()
        copies = []
        for _ in range(2):
            copies.append(b"".join(container.get_archive("/root/file")[0]))
            time.sleep(0.3)
        assert copies[0] == copies[1]
        assert b"x" in copies[0]
        container.remove()


def test_unknown_image_is_not_found(proxy: Proxy) -> None:
    """Without an environment and without the container driver there is no image."""
    with sdk(proxy, "never-put") as client, pytest.raises(ImageNotFound, match="No such image: any:1"):
        client.containers.create("any:1", "sleep infinity")


def test_name_conflicts_and_missing_features_are_refused(proxy: Proxy, task: str) -> None:
    """A name that is in use, mounts of files and devices are refused with Docker's status codes."""
    with sdk(proxy, task) as client:
        container = client.containers.create("any:1", "sleep infinity", name="taken")
        with pytest.raises(APIError) as conflict:
            client.containers.create("any:1", "sleep infinity", name="taken")
        assert conflict.value.status_code == 409
        assert f'already in use by container "{container.id}"' in str(conflict.value)
        refusals: list[dict[str, Any]] = [
            {"volumes": ["/etc:/mnt"]}, {"volumes": ["data:/data"]}, {"devices": ["/dev/kvm:/dev/kvm"]},
        ]  # fmt: skip
        for more in refusals:
            with pytest.raises(APIError) as refused:
                client.containers.create("any:1", "sleep infinity", **more)
            assert refused.value.status_code == 400


def test_containers_outlive_a_killed_proxy() -> None:
    """After a kill and a restart a container goes on; its exec instances are gone, as after a daemon's restart."""
    require_sandboxes()
    with data_directory() as folder, served(folder) as running:
        httpx.put(f"{running.url}/api/v1/tasks/again", json={"workdir": "/root"}).raise_for_status()
        host = f"tcp://127.0.0.1:{running.port}/t/again/docker"
        with closing(docker.DockerClient(base_url=host)) as client:
            container = client.containers.run(
                "any:1", "sleep infinity", detach=True, name="agent", environment={"X": "7"}
            )
            container.exec_run(["sh", "-c", "echo $X > file"])
            lost_exec = client.api.exec_create(container.id, ["true"])["Id"]
        running.kill()
        running.start()
        with closing(docker.DockerClient(base_url=host)) as client:
            container = client.containers.get("agent")
            assert (container.status, container.exec_run("cat file").output) == ("running", b"7\n")
            # Exec instances are kept in memory, as by Docker's daemon.
            with pytest.raises(NotFound, match="No such exec instance"):
                client.api.exec_start(lost_exec)
            container.remove(force=True)


# -- the command line ------------------------------------------------------------------------------------------------


def cli(proxy: Proxy, task: str, rollout: str, *arguments: str, stdin: str = "") -> Any:
    if shutil.which("docker") is None:
        assert not os.environ.get("FORKPOINT_NEEDS_DOCKER")
        pytest.skip("the docker command line is not installed")
    return subprocess.run(
        ["docker", *arguments], env=environment(proxy, task, rollout), input=stdin, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


def environment(proxy: Proxy, task: str, rollout: str) -> dict[str, str]:
    """Return the environment of a command line whose daemon is a rollout."""
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    return own | {"DOCKER_HOST": f"tcp://{docker_host(proxy, task, rollout)}"}


def test_command_line_works(proxy: Proxy, task: str, tmp_path: Any) -> None:
    """Docker's command line runs, execs, copies and stops; the second rollout gets the same from the tree."""
    (tmp_path / "f").write_text("from outside\n")
    results = {}
    for rollout in ("a", "b"):

        def docker_cli(*arguments: str, stdin: str = "", rollout: str = rollout) -> tuple[int, str, str]:
            done = cli(proxy, task, rollout, *arguments, stdin=stdin)
            return done.returncode, done.stdout, done.stderr

        name = f"agent-{rollout}-{os.getpid()}"
        assert docker_cli("run", "-d", "--rm", "--name", name, "-w", "/tmp", "any:1", "sleep", "2h")[0] == 0
        results[rollout] = [
            docker_cli("exec", name, "sh", "-c", "pwd; echo err >&2; exit 3"),
            docker_cli("exec", "-i", name, "tr", "a-z", "A-Z", stdin="input\n"),
            docker_cli("exec", "-t", name, "sh", "-c", "test -t 0 && echo a terminal"),
            docker_cli("exec", "-w", "/no/such", name, "true"),
            docker_cli("exec", "-d", name, "sh", "-c", "echo detached > /tmp/d; sleep 1000"),
            docker_cli("cp", str(tmp_path / "f"), f"{name}:/tmp/g"),
            docker_cli("exec", name, "sh", "-c", "cat /tmp/g; until [ -s /tmp/d ]; do sleep 0.05; done; cat /tmp/d"),
            docker_cli("run", "--rm", "any:1", "sh", "-c", "echo main; exit 6"),
            docker_cli("run", "--rm", "-i", "any:1", "cat", stdin="to main\n"),
            docker_cli("stop", name)[:1],
            docker_cli("exec", name, "true")[:1],
        ]
    chdir = 'chdir to cwd ("/no/such") set in config.json failed: no such file or directory: unknown'
    assert results["a"] == [
        (3, "/tmp\n", "err\n"),
        (0, "INPUT\n", ""),
        (0, "a terminal\n", ""),
        (126, f"OCI runtime exec failed: exec failed: unable to start container process: {chdir}\n", ""),
        (0, "", ""),
        (0, "", results["a"][5][2]),
        (0, "from outside\ndetached\n", ""),
        (6, "main\n", ""),
        (0, "to main\n", ""),
        (0,),
        (1,),
    ]
    assert results["b"] == results["a"]


def test_command_line_shows_why_a_state_is_lost(proxy: Proxy, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the death of a container: the first command says why, and no later one runs."""
    assert cli(proxy, task, "a", "run", "-d", "--name", "agent", "any:1", "sleep", "2h").returncode == 0

    async def lose(*_: Any) -> None:
        raise StateLostError("the replay reaches another state")

    with monkeypatch.context() as patched:
        patched.setattr(proxy.engine.step, "run", lose)
        lost = cli(proxy, task, "a", "exec", "agent", "true")
    assert (lost.returncode, lost.stderr) == (125, "forkpoint: the replay reaches another state\n")
    again = cli(proxy, task, "a", "exec", "agent", "true")
    assert (again.returncode, "is not running: the replay reaches" in again.stderr) == (1, True)
    shown = cli(
        proxy, task, "a", "inspect", "--format", "{{.State.Running}} {{.State.ExitCode}} {{.State.Error}}", "agent"
    )
    assert shown.stdout == "false 137 the replay reaches another state\n"
    assert cli(proxy, task, "a", "rm", "agent").returncode == 0


def test_killed_client_detaches_its_command(proxy: Proxy, task: str) -> None:
    """A command whose client is killed continues in the background, and its record is private to the rollout."""

    def run_container(rollout: str) -> None:
        assert cli(proxy, task, rollout, "run", "-d", "--name", "box", "any:1", "sleep", "2h").returncode == 0

    def kill_client(rollout: str) -> None:
        """Kill a client once its command has begun."""
        command = ["docker", "exec", "box", "sh", "-c", "echo begun; sleep 2; echo done > /tmp/done; sleep 1000"]
        with subprocess.Popen(command, env=environment(proxy, task, rollout), stdout=subprocess.PIPE) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == b"begun\n"
            client.kill()

    run_container("a")
    kill_client("a")
    wait_for_file = ("exec", "box", "sh", "-c", "until [ -s /tmp/done ]; do sleep 0.05; done; cat /tmp/done")
    assert cli(proxy, task, "a", *wait_for_file).stdout == "done\n"
    assert proxy.outcomes(task, "a")[0] == "bypass"
    run_container("b")
    kill_client("b")
    assert cli(proxy, task, "b", "rm", "-f", "box").returncode == 0


def test_followed_log_does_not_block_execs(proxy: Proxy, task: str) -> None:
    """A log can be followed while its main command runs, and an exec detaches that command."""
    with sdk(proxy, task, "a") as client:
        container = client.containers.run(
            "any:1",
            ["sh", "-c", "echo one; until [ -e /tmp/go ]; do sleep 0.05; done; echo two; sleep 1000"],
            detach=True,
        )
        log = container.logs(stream=True, follow=True)
        assert next(log) == b"one\n"
        # The exec detaches the main command.
        assert container.exec_run(["sh", "-c", "touch /tmp/go; echo in"]).output == b"in\n"
        assert proxy.outcomes(task, "a")[0] == "bypass"
        container.remove(force=True)
        with pytest.raises(StopIteration):
            next(log)


def test_example_runs(proxy: Proxy) -> None:
    """The example in the repository runs unchanged."""
    example = Path(__file__).parents[2] / "examples" / "docker_sdk" / "group.py"
    host = f"tcp://{proxy.address[0]}:{proxy.address[1]}"
    done = subprocess.run([sys.executable, str(example), host], capture_output=True, text=True, check=True, timeout=60)
    assert [line.split(" shared")[0] for line in done.stdout.splitlines()] == [
        f"{n} b'7\\n' b'7\\n{n}\\n'" for n in range(4)
    ]


def test_images_are_listed_as_they_can_be_used(proxy: Proxy, task: str) -> None:
    """Harnesses list images first and build those that are missing. A task's environment stands for every name."""
    with sdk(proxy, task) as client:
        assert [image.tags for image in client.images.list(name="swebench/x:v1")] == [["swebench/x:v1"]]
        assert len(client.images.list()) == 1
        assert client.images.get("swebench/x:v1").tags == ["swebench/x:v1"]
