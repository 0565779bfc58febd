"""What a proxy does with the rights of a plain container: each driver works, or is refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agents.elsewhere import elsewhere
from tests.machine import PLAIN, Proxy, data_directory, needs_root, require_criu, serving
from tests.rights import BARE_POD, POD, Rights, capabilities_here, least_rights
from tests.sandboxes.postgres_cluster import cluster, require_postgres
from tests.sandboxes.videos import make

pytestmark = needs_root
plain_pods = pytest.mark.parametrize("rights", [POD, BARE_POD], ids=["docker", "none"])
SQL = "CREATE TABLE t (a int); INSERT INTO t VALUES (1);"
CHANGE = {"sql": "INSERT INTO t VALUES (2); SELECT 7"}
COUNT = {"sql": "SELECT count(*) FROM t"}


def proxy_with(rights: Rights, folder: Path, *drivers: str) -> Proxy:
    """Return a proxy with these rights; without names of drivers it has the default ones."""
    options = {"drivers": json.dumps(drivers)} if drivers else {}
    return Proxy(folder, options, rights.wrapper)


def put(proxy: Proxy, spec: dict[str, Any]) -> None:
    answer = httpx.put(f"{proxy.url}/api/v1/tasks/t", json=spec, timeout=60, verify=PLAIN)
    assert answer.is_success, answer.text


def call(proxy: Proxy, rollout: str, tool: str, arguments: dict[str, Any]) -> httpx.Response:
    answer = httpx.post(f"{proxy.url}/t/t/r/{rollout}/{tool}", json=arguments, timeout=60, verify=PLAIN)
    assert answer.is_success, answer.text
    return answer


def assert_databases_are_forked(proxy: Proxy) -> None:
    """One rollout changes its database, another one sees nothing of it."""
    assert call(proxy, "a", "sql/query", COUNT).json()["rows"] == [[1]]
    call(proxy, "a", "sql/script", CHANGE)
    assert [call(proxy, rollout, "sql/query", COUNT).json()["rows"] for rollout in "ab"] == [[[2]], [[1]]]


@plain_pods
def test_sqlite_needs_no_rights(rights: Rights) -> None:
    with data_directory() as folder, serving(proxy_with(rights, folder, "sqlite")) as proxy:
        (folder / "t.sql").write_text(SQL)
        put(proxy, {"driver": "sqlite", "databases": {"main": {"source": str(folder / "t.sql")}}})
        assert_databases_are_forked(proxy)


@plain_pods
def test_postgres_needs_no_rights(rights: Rights) -> None:
    require_postgres()
    with cluster() as server, data_directory() as folder, serving(proxy_with(rights, folder, "postgres")) as proxy:
        server.create("shop", SQL)
        put(proxy, {"driver": "postgres", "databases": {"shop": {"dsn": server.dsn, "source": "shop"}}})
        assert_databases_are_forked(proxy)


@plain_pods
def test_videos_need_no_rights(rights: Rights) -> None:
    with data_directory() as folder, serving(proxy_with(rights, folder, "video")) as proxy:
        put(proxy, {"driver": "video", "video": {"source": str(make(folder / "clip.mp4", ["red", "blue"]))}})
        call(proxy, "a", "video/load_video", {"name": "clip.mp4"})
        assert call(proxy, "a", "video/sample_frames", {"n": 2}).json()


@plain_pods
def test_servers_elsewhere_need_no_rights(rights: Rights) -> None:
    with elsewhere() as there, data_directory() as folder, serving(proxy_with(rights, folder, "http")) as proxy:
        put(proxy, {"driver": "http", "servers": {"api": {"upstream": f"{there.url}/api"}}})
        assert call(proxy, "a", "api/search", {"q": "x"}).json()["echo"] == {"q": "x"}


@plain_pods
def test_shells_without_rights_are_refused_in_one_sentence(rights: Rights) -> None:
    """The sentence says what is missing and what helps."""
    with data_directory() as folder:
        proxy = proxy_with(rights, folder, "sqlite", "local")
        proxy.launch()
        assert proxy.process is not None
        assert proxy.process.wait(60) == 1
        # Variables of the tests are no settings, and there is a line for each of these.
        (line,) = [line for line in proxy.log().splitlines() if "is not a setting" not in line]
        assert line.startswith("The driver local cannot run here: namespaces: root: unshare 0x20000: ")
        assert "the capability SYS_ADMIN is missing. In a container, give it the rights" in line


@plain_pods
def test_default_drivers_that_work_are_started(rights: Rights) -> None:
    """One line of the log says which does not and why, and the first call is one that can be answered."""
    with data_directory() as folder, serving(proxy_with(rights, folder)) as proxy:
        (line,) = [line for line in proxy.log().splitlines() if "[warning" in line]
        assert "The driver local cannot run here: " in line
        assert line.endswith("It is left out.")
        assert "shell/exec" not in proxy.log()
        assert '{"driver": "sqlite", ' in proxy.log()
        (folder / "t.sql").write_text(SQL)
        put(proxy, {"driver": "sqlite", "databases": {"main": {"source": str(folder / "t.sql")}}})
        assert call(proxy, "a", "sql/query", COUNT).json()["rows"] == [[1]]


@pytest.mark.parametrize("driver", ["sqlite", "postgres", "video"])
def test_proxy_whose_workers_cannot_run_is_never_ready(driver: str) -> None:
    """Without the filter of system calls the workers would be unprotected, so the proxy ends before it listens."""
    rights = Rights(refused=("prctl",))
    with data_directory() as folder:
        proxy = proxy_with(rights, folder, driver)
        done = subprocess.run(
            proxy.command, cwd=folder, capture_output=True, text=True, check=False, timeout=60,
            env={**proxy.settings, "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"The driver {driver} cannot run here: trial of {driver}: the zygote of workers does not start"
    )


LEAST = least_rights()


def test_shells_need_no_right_that_the_table_lacks() -> None:
    """A sandbox runs, has limits, and its live processes are saved."""
    with data_directory() as folder:
        shown = Rights(tuple(LEAST), masked=True).doctor(folder)
    unmet = [name for name, requirement in shown.items() if not requirement["ok"]]
    # Docker and CRIU may not be installed, and this machine may lack SYS_RESOURCE.
    others = set() if "SYS_RESOURCE" in capabilities_here() else {"processes of other users"}
    assert set(unmet) <= {"images", "checkpoints"} | others
    assert "SYS_TIME" not in shown["checkpoints"]["detail"]


@pytest.mark.parametrize("capability", [name for name, without in LEAST.items() if without == "no sandbox"])
def test_shells_need_each_right_of_the_table(capability: str) -> None:
    with data_directory() as folder:
        shown = Rights(tuple(name for name in LEAST if name != capability)).doctor(folder)
    names = {name for name, requirement in shown.items() if requirement["required"] and not requirement["ok"]}
    assert names in ({"namespaces"}, {"trial of local"})


def test_live_processes_are_not_saved_if_they_cannot_be_restored() -> None:
    """CRIU's own check does not need the right to set clocks, but each restore does."""
    with data_directory() as folder:
        shown = Rights(tuple(name for name in LEAST if name != "SYS_TIME")).doctor(folder)
    assert shown["trial of local"]["ok"]
    assert "need the capability SYS_TIME" in shown["checkpoints"]["detail"]


@pytest.mark.parametrize(
    "test",
    [
        "test_pids_of_replays.py::test_replays_get_the_recorded_pids",
        "test_checkpoints.py::test_kept_state_survives_a_killed_driver",
    ],
)
def test_processes_get_their_pids_where_settings_are_read_only(test: str) -> None:
    """A container has /proc/sys read-only, in which the kernel is told the next pid."""
    require_criu()
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", f"tests/sandboxes/local/{test}"]
    rights = Rights(tuple(LEAST), masked=True)
    done = subprocess.run([*rights.wrapper, *command], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
