"""Docker: requests are parsed, responses are built, and archives have keys."""

import base64
import gzip
import io
import json
import stat
import tarfile
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.compat.docker import archives, responses
from proxy.compat.docker import requests as docker
from proxy.compat.docker.containers import Container, ContainerState
from proxy.refusals import RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.process_output import END, Frames, Incoming, by_stream, ending, frame, frames, output

CONTENT = st.binary(max_size=40)


def test_api_version_is_optional_and_bounded() -> None:
    """The path may begin with a version of the API; versions out of range are refused."""
    assert docker.read("GET", "/containers/json", "all=1", b"").segments == ("containers", "json")
    assert docker.read("GET", "/v1.41/containers/json", "", b"").segments == ("containers", "json")
    for path in ("/v1.99/info", "/v1.2/info"):
        with pytest.raises(RefusalError) as refused:
            docker.read("GET", path, "", b"")
        assert refused.value.status == 400


def test_encoded_slash_does_not_separate_segments() -> None:
    """Image names contain slashes, which clients encode."""
    assert docker.read("GET", "/images/a%2Fb:1/json", "", b"").segments == ("images", "a/b:1", "json")


@pytest.mark.parametrize(
    ("argv", "interactive"),
    [
        ((), False),
        (("sleep", "infinity"), False),
        (("sleep", "2h"), False),
        (("/bin/sleep", "99999"), False),
        (("tail", "-f", "/dev/null"), False),
        (("sh", "-c", "sleep infinity"), False),
        (("/bin/bash", "-c", "trap : TERM INT; sleep infinity & wait"), False),
        (("sh", "-c", "while true; do sleep 30; done"), False),
        (("bash",), True),
        (("/bin/sh",), True),
    ],
)
def test_waiting_main_command_is_recognised(argv: tuple[str, ...], *, interactive: bool) -> None:
    """A main command that only keeps its container running is not executed."""
    assert docker.waits(argv, interactive=interactive)


@pytest.mark.parametrize(
    "argv",
    [
        ("echo", "hi"), ("sleep", "5"), ("sh", "-c", "sleep infinity; echo no"), ("bash",),
        ("sh", "-c", "make && sleep 9h"), ("tail", "-f", "/var/log/x"), ("python3", "-m", "http.server"),
    ],
)  # fmt: skip
def test_working_main_command_is_recognised(argv: tuple[str, ...]) -> None:
    """A main command that does anything else is executed."""
    assert not docker.waits(argv, interactive=False)


def test_image_defaults_complete_a_create_request() -> None:
    """Entrypoint, command and directory come from the image, by Docker's rules."""
    config = {"Id": "sha256:abc", "Entrypoint": ["/entry"], "Cmd": ["serve"], "WorkingDir": "/srv"}
    plain = docker.container_spec({"Image": "x"}, config)
    assert (plain.main, plain.image_id) == (("/entry", "serve"), "sha256:abc")
    assert docker.container_spec({"Image": "x", "Cmd": ["other"]}, config).main == ("/entry", "other")
    assert docker.container_spec({"Image": "x", "Entrypoint": ["/mine"]}, config).main == ("/mine",)
    assert docker.container_spec({"Image": "x", "Entrypoint": [""], "Cmd": ["sleep", "1d"]}, config).main == ()
    environment = docker.environment({"Image": "x", "Env": ["A=1=2", "B"], "HostConfig": {"Memory": 64 << 20}}, config)
    assert (environment.workdir, dict(environment.env), environment.memory_mb) == ("/srv", {"A": "1=2"}, 64)


def test_entrypoint_before_waiting_command_runs_in_background() -> None:
    """An entrypoint that ends in a command that only waits is started, and its end is not awaited."""
    config = {"Entrypoint": ["/entry"], "Cmd": ["serve"]}
    spec = docker.container_spec({"Image": "x", "Cmd": ["sleep", "infinity"]}, config)
    assert (spec.main, spec.background) == (("/entry", "sleep", "infinity"), True)
    assert not docker.container_spec({"Image": "x"}, config).background
    assert not docker.container_spec({"Image": "x", "Cmd": ["sleep", "infinity"]}, {}).background


@pytest.mark.parametrize(
    "host", [{"Binds": ["/a:/b"]}, {"Mounts": [{}]}, {"PortBindings": {"80/tcp": []}}, {"NetworkMode": "container:x"}]
)
def test_unsupported_host_config_is_refused(host: dict[str, Any]) -> None:
    """A request for a missing feature fails at once instead of behaving differently later."""
    with pytest.raises(RefusalError) as refused:
        docker.container_spec({"Image": "x", "HostConfig": host}, {})
    assert refused.value.status == 400


def execution(**more: Any) -> docker.ExecSpec:
    return docker.exec_spec({"Cmd": ["ls", "-l"], "AttachStdout": True, "AttachStderr": True, **more}, "")


def test_exec_key_consists_of_what_runs() -> None:
    """The client's own settings are not in the key of an exec. Everything that changes what runs is."""
    same = call_key(execution().call())
    for more in ({"DetachKeys": "ctrl-p"}, {"ConsoleSize": [1, 2]}, {"AttachStdin": True}, {"Privileged": True}):
        assert call_key(execution(**more).call()) == same
    others = [
        execution(Cmd=["ls"]).call(), execution(Env=["A=1"]).call(), execution(WorkingDir="/tmp").call(),
        execution(User="daemon").call(), execution(Tty=True).call(), execution().call(b"stdin"),
        execution().call(detach=True),
    ]  # fmt: skip
    assert len({same, *map(call_key, others)}) == 1 + len(others)


def archive(files: dict[str, bytes], *, mtime: int = 0, mode: int = 0o644, uid: int = 0) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as writer:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uid = len(content), mtime, mode, uid
            writer.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def key(body: bytes, path: str = "/tmp") -> bytes:
    return archives.extract_key(ToolCall("archive", "extract", {"path": path}, body))


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), CONTENT, min_size=1, max_size=4))
def test_archive_key_consists_of_members(files: dict[str, bytes]) -> None:
    """Order, times and compression of an archive are not in its key; names, modes, owners and contents are."""
    same = key(archive(files))
    assert key(archive(dict(reversed(files.items())), mtime=99)) == same
    assert key(gzip.compress(archive(files))) == same
    assert key(archive(files, mode=0o755)) != same
    assert key(archive(files, uid=5)) != same
    assert key(archive({name: content + b"!" for name, content in files.items()})) != same
    assert key(archive(files), "/other") != same
    # A truncated archive does not have the key of a shorter one.
    assert key(archive({"first": b"1", **files})[: 512 * 2 + 100]) != key(archive({"first": b"1"}))


def test_path_description_has_gos_forms() -> None:
    """Modes and times of a path are sent as Go writes them."""
    fields = {"name": "d", "size": 5, "mode": stat.S_IFDIR | 0o1777, "mtime_ns": 1_500_000_000_250_000_000, "link": ""}
    assert json.loads(base64.b64decode(archives.path_stat(fields))) == {
        "name": "d", "size": 5, "mode": (1 << 31) | (1 << 20) | 0o777, "mtime": "2017-07-14T02:40:00.25Z",
        "linkTarget": "",
    }  # fmt: skip


PIECES = st.lists(st.tuples(st.sampled_from([1, 2]), CONTENT.filter(bool)), max_size=8)


@given(PIECES, st.integers(1, 7))
def test_frames_round_trip_in_any_pieces(pieces: list[tuple[int, bytes]], size: int) -> None:
    """Output is read back from frames, whole or in pieces of any size; neighbours of one stream are one frame."""
    kept = Frames()
    for kind, data in pieces:
        kept.add(kind, data)
    body = kept.end(3)
    for kind in (1, 2):
        assert output(body, kind) == b"".join(data for piece_kind, data in pieces if piece_kind == kind)
    kinds = [kind for kind, _ in frames(body)]
    assert all(first != second for first, second in pairwise(kinds))
    assert (kinds[-1], ending(body).exit_code, ending(body).truncated) == (END, 3, False)
    sent = b"".join(frame(kind, data) for kind, data in pieces)
    incoming = Incoming()
    received = [piece for start in range(0, len(sent), size) for piece in incoming.feed(sent[start : start + size])]
    assert received == pieces


@given(PIECES)
def test_order_between_streams_is_ignored(pieces: list[tuple[int, bytes]]) -> None:
    """How stdout and stderr are interleaved depends on timing, so results are compared by stream."""
    mixed, ordered = Frames(), Frames()
    for kind, data in pieces:
        mixed.add(kind, data)
    for kind, data in sorted(pieces, key=lambda piece: piece[0]):
        ordered.add(kind, data)
    assert by_stream(mixed.end(0)) == by_stream(ordered.end(0))


def test_truncated_output_is_marked() -> None:
    """Output beyond the limit is dropped, and the result says so."""
    kept = Frames(most=4)
    kept.add(1, b"abc")
    kept.add(2, b"def")
    body = kept.end(0)
    assert (output(body, 1), output(body, 2), ending(body).truncated, kept.whole) == (b"abc", b"d", True, False)


def test_tail_keeps_last_lines_in_order() -> None:
    """`docker logs --tail` counts the lines of both streams together."""
    kept = Frames()
    for kind, data in ((1, b"a\nb\n"), (2, b"c\n"), (1, b"d")):
        kept.add(kind, data)
    body = kept.end(0)
    assert output(responses.tail(body, "2"), 1) + output(responses.tail(body, "2"), 2) == b"dc\n"
    assert responses.tail(body, "all") == responses.tail(body, "9") == body


@pytest.mark.parametrize(
    ("filters", "expected"),
    [({}, True), ({"name": ["age"]}, True), ({"name": ["other"]}, False), ({"label": ["a=1", "b"]}, True),
     ({"label": ["a=2"]}, False), ({"status": ["running", "exited"]}, True), ({"ancestor": ["x"]}, True)],
)  # fmt: skip
def test_lists_are_filtered(filters: dict[str, list[str]], *, expected: bool) -> None:
    """Filters of one name are alternatives, except labels, which must all match."""
    spec = docker.container_spec({"Image": "x:1", "Labels": {"a": "1", "b": ""}}, {})
    container = Container("id", "agent", "task", "", "id", spec, 0.0, state=ContainerState.RUNNING)
    assert responses.matches(container, filters) is expected
