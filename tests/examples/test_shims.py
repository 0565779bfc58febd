"""The shims for SkyRL and tinker-cookbook in examples/ work with a real proxy and stand-ins for their frameworks.

The stand-ins follow the interfaces in the wheels of skyrl-gym 0.4.0 (`tools/core.py`, `tools/sql.py`) and
tinker-cookbook 0.6.1 (`sandbox/sandbox_interface.py`, `recipes/harbor_rl/harbor_env.py`).
"""

import asyncio
import importlib.util
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.agents.serving import Proxy, real_proxy
from tests.machine import require_sandboxes

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    require_sandboxes()
    with real_proxy() as running:
        yield running


class SkyrlTool:
    """Stands in for `skyrl_gym.tools.core.tool`."""

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func, self.name = func, func.__name__

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else lambda *args, **kwargs: self.func(instance, *args, **kwargs)


class SkyrlGroup:
    """Stands in for `skyrl_gym.tools.sql.SQLCodeExecutorToolGroup`, and returns what the original would run."""

    def __init__(self, db_file_path: str) -> None:
        self.db_path = db_file_path
        self.tools = {
            raw.name: getattr(self, name)
            for name in dir(type(self))
            if isinstance(raw := getattr(type(self), name), SkyrlTool)
        }

    @SkyrlTool
    def sql(self, db_id: str, sql: str | None, turns_left: int, timeout: float = 5) -> str:
        return f"in process: {db_id} {sql} {turns_left} {timeout}"

    def execute_tool(self, name: str, *args: Any) -> Any:
        return self.tools[name](*args)


@dataclass
class SandboxResult:
    """Stands in for `tinker_cookbook.sandbox.sandbox_interface.SandboxResult`."""

    stdout: str
    stderr: str
    exit_code: int
    metrics: dict[str, Any] = field(default_factory=dict)


def example(name: str, monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> ModuleType:
    """Load an example with stand-ins for the modules of its framework."""
    for module, members in modules.items():
        stand_in = ModuleType(module.replace("__", "."))
        vars(stand_in).update(members)
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_skyrl_queries_run_once(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two environments share a query through the proxy. Statements that write stay in the trainer's process."""
    shim = example(
        "skyrl_sql", monkeypatch, skyrl_gym={}, skyrl_gym__tools={}, skyrl_gym__tools__core={"tool": SkyrlTool},
        skyrl_gym__tools__sql={"SQLCodeExecutorToolGroup": SkyrlGroup},
    )  # fmt: skip
    (tmp_path / "shop").mkdir()
    with sqlite3.connect(tmp_path / "shop" / "shop.sqlite") as database:
        database.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1), (2);")
    database.close()
    first, second = (shim.ForkpointSQL(str(tmp_path), proxy.url) for _ in range(2))
    observation = first.execute_tool("sql", "shop", "SELECT x FROM t", 3, 5)
    reminder = "<reminder>You have 3 turns left to complete the task.</reminder>"
    assert observation == f"\n\n<observation> x\n 1\n 2\n{reminder}</observation>\n\n"
    hits = proxy.client.get("/api/v1/stats").json()["hits"]
    assert second.execute_tool("sql", "shop", "SELECT x FROM t", 3, 5) == observation
    assert proxy.client.get("/api/v1/stats").json()["hits"] == hits + 1
    wrong = first.execute_tool("sql", "shop", "SELECT y FROM t", 2, 5)
    assert "Error executing SQL: no such column: y, db file: " in wrong
    for statement in ("INSERT INTO t VALUES (3)", None):
        assert first.execute_tool("sql", "shop", statement, 1, 5) == f"in process: shop {statement} 1 5"


def test_tinker_sandboxes_of_one_folder_share_calls(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sandboxes of a task's folder are two rollouts of one task; the second is answered from the tree."""
    shim = example(
        "tinker_sandbox", monkeypatch, tinker_cookbook={}, tinker_cookbook__sandbox={},
        tinker_cookbook__sandbox__sandbox_interface={"SandboxResult": SandboxResult},
    )  # fmt: skip

    async def go() -> None:
        make = shim.factory(proxy.url, lambda folder: {"files": {"/root/name": folder.name}})
        first, second = [await make(tmp_path / "task-1", 60) for _ in range(2)]
        assert first.sandbox_id != second.sandbox_id
        for sandbox in (first, second):
            assert (await sandbox.run_command("cat name; x=1; exit 3")).exit_code == 3
            assert (await sandbox.run_command("pwd; echo $x", workdir="/tmp")).stdout == "/tmp\n\n"
            assert (await sandbox.write_file("/root/run.sh", "#!/bin/sh\necho ran\n", executable=True)).exit_code == 0
            assert (await sandbox.run_command("./run.sh", max_output_bytes=2)).stdout == "ra"
            assert (await sandbox.read_file("/root/run.sh", max_bytes=9)).stdout == "#!/bin/sh"
            assert (await sandbox.read_file("/root/none")).exit_code == 1
            assert (await sandbox.run_command("sleep 60", timeout=1)).exit_code == 124
        await first.cleanup()
        await second.cleanup()

    hits = proxy.client.get("/api/v1/stats").json()["hits"]
    asyncio.run(go())
    assert proxy.client.get("/api/v1/stats").json()["hits"] >= hits + 6
