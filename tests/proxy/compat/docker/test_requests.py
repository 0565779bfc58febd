"""What Docker's requests mean, without a connection: versions, containers, execs, archives."""

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

from proxy.compat.docker import archives as docker_archives
from proxy.compat.docker import requests as docker
from proxy.compat.docker import responses as docker_told
from proxy.refusals import RefusalError
from proxy.tree.keys import call_key
from sandboxes.calls import ToolCall
from sandboxes.process_output import END, Frames, Incoming, by_stream, ending, frame, frames, output

CONTENT = st.binary(max_size=40)


def test_the_version_in_a_path_is_optional_and_bounded() -> None:
    assert docker.asked("GET", "/containers/json", "all=1", b"").words == ("containers", "json")
    assert docker.asked("GET", "/v1.41/containers/json", "", b"").words == ("containers", "json")
    for path in ("/v1.99/info", "/v1.2/info"):
        with pytest.raises(RefusalError) as refused:
            docker.asked("GET", path, "", b"")
        assert refused.value.status == 400


def test_words_are_told_apart_before_they_are_decoded() -> None:
    assert docker.asked("GET", "/images/a%2Fb:1/json", "", b"").words == ("images", "a/b:1", "json")


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
def test_a_main_command_that_waits_needs_no_process(argv: tuple[str, ...], *, interactive: bool) -> None:
    assert docker.waits(argv, interactive=interactive)


@pytest.mark.parametrize(
    "argv",
    [
        ("echo", "hi"), ("sleep", "5"), ("sh", "-c", "sleep infinity; echo no"), ("bash",),
        ("sh", "-c", "make && sleep 9h"), ("tail", "-f", "/var/log/x"), ("python3", "-m", "http.server"),
    ],
)  # fmt: skip
def test_one_that_does_something_is_run(argv: tuple[str, ...]) -> None:
    assert not docker.waits(argv, interactive=False)


def test_the_image_says_what_a_create_request_leaves_out() -> None:
    config = {"Id": "sha256:abc", "Entrypoint": ["/entry"], "Cmd": ["serve"], "WorkingDir": "/srv"}
    plain = docker.created({"Image": "x"}, config)
    assert (plain.main, plain.image_id) == (("/entry", "serve"), "sha256:abc")
    assert docker.created({"Image": "x", "Cmd": ["other"]}, config).main == ("/entry", "other")
    assert docker.created({"Image": "x", "Entrypoint": ["/mine"]}, config).main == ("/mine",)
    assert docker.created({"Image": "x", "Entrypoint": [""], "Cmd": ["sleep", "1d"]}, config).main == ()
    wanted = docker.wanted({"Image": "x", "Env": ["A=1=2", "B"], "HostConfig": {"Memory": 64 << 20}}, config)
    assert (wanted.workdir, dict(wanted.env), wanted.memory_mb) == ("/srv", {"A": "1=2"}, 64)


def test_an_entrypoint_before_a_command_that_waits_is_started_and_stays() -> None:
    config = {"Entrypoint": ["/entry"], "Cmd": ["serve"]}
    told = docker.created({"Image": "x", "Cmd": ["sleep", "infinity"]}, config)
    assert (told.main, told.background) == (("/entry", "sleep", "infinity"), True)
    assert not docker.created({"Image": "x"}, config).background
    assert not docker.created({"Image": "x", "Cmd": ["sleep", "infinity"]}, {}).background


@pytest.mark.parametrize(
    "host", [{"Binds": ["/a:/b"]}, {"Mounts": [{}]}, {"PortBindings": {"80/tcp": []}}, {"NetworkMode": "container:x"}]
)
def test_what_forkpoint_has_not_is_refused_rather_than_left_out(host: dict[str, Any]) -> None:
    with pytest.raises(RefusalError) as refused:
        docker.created({"Image": "x", "HostConfig": host}, {})
    assert refused.value.status == 400


def execution(**more: Any) -> docker.ExecSpec:
    return docker.execution({"Cmd": ["ls", "-l"], "AttachStdout": True, "AttachStderr": True, **more}, "")


def test_an_execs_key_is_what_it_runs_and_nothing_else() -> None:
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
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uid = len(content), mtime, mode, uid
            made.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def key(body: bytes, path: str = "/tmp") -> bytes:
    return docker_archives.extract_key(ToolCall("archive", "extract", {"path": path}, body))


@given(st.dictionaries(st.text("abc", min_size=1, max_size=4), CONTENT, min_size=1, max_size=4))
def test_archives_count_by_what_they_hold(files: dict[str, bytes]) -> None:
    same = key(archive(files))
    assert key(archive(dict(reversed(files.items())), mtime=99)) == same
    assert key(gzip.compress(archive(files))) == same
    assert key(archive(files, mode=0o755)) != same
    assert key(archive(files, uid=5)) != same
    assert key(archive({name: content + b"!" for name, content in files.items()})) != same
    assert key(archive(files), "/other") != same
    # Half of one is no shorter one.
    assert key(archive({"first": b"1", **files})[: 512 * 2 + 100]) != key(archive({"first": b"1"}))


def test_modes_and_times_of_a_path_are_told_as_go_has_them() -> None:
    told = {"name": "d", "size": 5, "mode": stat.S_IFDIR | 0o1777, "mtime_ns": 1_500_000_000_250_000_000, "link": ""}
    assert json.loads(base64.b64decode(docker_archives.path_stat(told))) == {
        "name": "d", "size": 5, "mode": (1 << 31) | (1 << 20) | 0o777, "mtime": "2017-07-14T02:40:00.25Z",
        "linkTarget": "",
    }  # fmt: skip


PIECES = st.lists(st.tuples(st.sampled_from([1, 2]), CONTENT.filter(bool)), max_size=8)


@given(PIECES, st.integers(1, 7))
def test_frames_come_back_as_they_went_in_whatever_pieces_they_come_in(
    pieces: list[tuple[int, bytes]], size: int
) -> None:
    kept = Frames()
    for kind, data in pieces:
        kept.add(kind, data)
    body = kept.end(3)
    for kind in (1, 2):
        assert output(body, kind) == b"".join(data for found, data in pieces if found == kind)
    kinds = [kind for kind, _ in frames(body)]
    assert all(one != other for one, other in pairwise(kinds)), "neighbours are one frame"
    assert (kinds[-1], ending(body).exit_code, ending(body).truncated) == (END, 3, False)
    sent = b"".join(frame(kind, data) for kind, data in pieces)
    incoming = Incoming()
    found = [one for at in range(0, len(sent), size) for one in incoming.feed(sent[at : at + size])]
    assert found == pieces


@given(PIECES)
def test_in_which_order_two_streams_came_is_no_difference(pieces: list[tuple[int, bytes]]) -> None:
    one, other = Frames(), Frames()
    for kind, data in pieces:
        one.add(kind, data)
    for kind, data in sorted(pieces, key=lambda piece: piece[0]):
        other.add(kind, data)
    assert by_stream(one.end(0)) == by_stream(other.end(0))


def test_more_output_than_is_kept_is_said() -> None:
    kept = Frames(most=4)
    kept.add(1, b"abc")
    kept.add(2, b"def")
    body = kept.end(0)
    assert (output(body, 1), output(body, 2), ending(body).truncated, kept.whole) == (b"abc", b"d", True, False)


def test_a_tail_is_the_last_lines_in_their_order() -> None:
    kept = Frames()
    for kind, data in ((1, b"a\nb\n"), (2, b"c\n"), (1, b"d")):
        kept.add(kind, data)
    body = kept.end(0)
    assert output(docker_told.tail(body, "2"), 1) + output(docker_told.tail(body, "2"), 2) == b"dc\n"
    assert docker_told.tail(body, "all") == docker_told.tail(body, "9") == body


@pytest.mark.parametrize(
    ("filters", "fits"),
    [({}, True), ({"name": ["age"]}, True), ({"name": ["other"]}, False), ({"label": ["a=1", "b"]}, True),
     ({"label": ["a=2"]}, False), ({"status": ["running", "exited"]}, True), ({"ancestor": ["x"]}, True)],
)  # fmt: skip
def test_lists_are_filtered(filters: dict[str, list[str]], *, fits: bool) -> None:
    made = docker.created({"Image": "x:1", "Labels": {"a": "1", "b": ""}}, {})
    container = docker_told.Container("id", "agent", "task", "", "id", made, 0.0, state="running")
    assert docker_told.fits(container, filters) is fits
