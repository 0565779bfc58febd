"""What a create request mounts: volumes, empty directories in place of the client's, and what is refused."""

from typing import Any

import pytest

from proxy.compat.docker import requests
from proxy.compat.docker.mounts import mounts_of, notes_of
from proxy.refusals import RefusalError
from sandboxes.local.service_commands import making


@pytest.mark.parametrize(
    ("host", "volumes", "folders"),
    [
        ({"Binds": ["data:/data:rw", "more:/more"]}, [("data", "/data"), ("more", "/more")], []),
        ({"Mounts": [{"Type": "tmpfs", "Target": "/tmp"}, {"Type": "volume", "Target": "/anonymous"}]}, [], []),
        ({"Binds": ["/home/me/task/logs:/logs", "/srv/agent-logs:/agent logs/:rw,z"]}, [], ["/agent logs", "/logs"]),
        ({"Mounts": [{"Type": "bind", "Source": "/work/x", "Target": "/x/../y"}]}, [], ["/y"]),
        ({"Binds": ["/a:/l", "/b:/l", "v:/v"]}, [("v", "/v")], ["/l"]),
    ],
)
def test_mounts(host: dict[str, Any], volumes: list[tuple[str, str]], folders: list[str]) -> None:
    found = mounts_of(host)
    assert (list(found.volumes), list(found.folders)) == (volumes, folders)


@pytest.mark.parametrize(
    "bind",
    [
        "/etc:/x", "/etc/nginx.conf:/x", "./x:/x", "..:/x", "a/../../etc:/x", "/:/x", "/a/../etc:/x", "/home/x:/x:ro",
        "/var/run/docker.sock:/var/run/docker.sock", "//etc:/x", "/home/x:relative", "/home/x:",
    ],
)  # fmt: skip
def test_what_an_empty_directory_cannot_stand_for_is_refused(bind: str) -> None:
    with pytest.raises(RefusalError):
        mounts_of({"Binds": [bind]})


def test_directories_are_made_whatever_their_names() -> None:
    assert making(()) == ()
    assert making(["/.services/db/logs", "/.services/db/-x; rm y"]) == (
        "mkdir -p -- '/.services/db/-x; rm y' /.services/db/logs",
    )


def test_a_client_is_told_what_was_not_taken_word_for_word() -> None:
    assert notes_of({}) == []
    notes = notes_of({"Binds": ["/home/me/logs:/logs"], "PortBindings": {"80/tcp": [{"HostPort": "8080"}]}})
    assert ["/logs is an empty directory" in notes[0], "No port is published" in notes[1]] == [True, True]


@pytest.mark.parametrize(
    ("host", "note"),
    [
        ({"Privileged": True}, "no rights over the machine"), ({"CapAdd": ["SYS_PTRACE"]}, "capabilities"),
        ({"Ulimits": [{"Name": "nofile"}]}, "limits"), ({"ExtraHosts": ["a:10.0.0.1"]}, "no way to other hosts"),
        ({"NetworkMode": "host"}, "without a way out"),
        ({"PidMode": "host"}, "nothing of the machine"),
        ({"ReadonlyRootfs": True}, "writable"), ({"IpcMode": "host"}, "nothing of the machine"),
        ({"Binds": ["v:/v:ro"]}, "/v is writable"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_noted(host: dict[str, Any], note: str) -> None:
    assert [note in text for text in notes_of(host)] == [True]


def test_memory_file_systems_are_directories_for_all_users() -> None:
    host = {"Tmpfs": {"/run/x": "size=1m"}, "Mounts": [{"Type": "tmpfs", "Target": "/scratch"}], "Binds": ["/h:/logs"]}
    assert mounts_of(host).setup("/.services/db") == (
        "mkdir -p -- /.services/db/logs", "mkdir -p -m 1777 -- /.services/db/run/x /.services/db/scratch",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("host", "cpus"),
    [
        ({}, None), ({"NanoCpus": 1_500_000_000}, 1.5), ({"NanoCpus": 0}, None), ({"CpuQuota": 50_000}, 0.5),
        ({"CpuQuota": 50_000, "CpuPeriod": 25_000}, 2.0), ({"CpuQuota": -1}, None),
    ],
)  # fmt: skip
def test_limits_of_cpus(host: dict[str, Any], cpus: float | None) -> None:
    environment = requests.environment({"Image": "i", "HostConfig": {**host, "Binds": ["/h/l:/logs"]}}, {})
    assert (environment.cpus, environment.setup) == (cpus, ("mkdir -p -- /logs",))
