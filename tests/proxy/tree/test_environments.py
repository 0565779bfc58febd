"""In which environment a rollout begins whose create request names one."""

import asyncio
from pathlib import Path

import pytest

from proxy.engine import Engine
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest, spec_for
from proxy.tree.rollout import Outcome
from sandboxes.spec import EnvironmentSpec
from tests.proxy.rig import SPEC, ask, engine

DRIVERS = {"local", "container"}


def test_a_request_only_adds_to_a_task_spec() -> None:
    given = EnvironmentSpec(env={"A": "given", "B": "given"}, setup=("true",))
    wanted = EnvironmentRequest("debian:12", {"B": "wanted", "C": "wanted"}, "/tmp", memory_mb=512)
    found = spec_for(wanted, given, SPEC, DRIVERS, any_image=False)
    assert (found.driver, found.image, found.setup, found.workdir) == ("local", None, ("true",), "/tmp")
    assert found.env == {"A": "given", "B": "wanted", "C": "wanted"}
    assert (found.limits.memory_mb, found.limits.pids) == (512, given.limits.pids)
    assert spec_for(EnvironmentRequest("x"), given, SPEC, DRIVERS, any_image=False) == given


def test_without_a_task_spec_the_image_is_a_container() -> None:
    found = spec_for(EnvironmentRequest("debian:12", {"A": "1"}), None, SPEC, DRIVERS, any_image=True)
    assert (found.driver, found.image, found.workdir, found.env) == ("container", "debian:12", "/", {"A": "1"})


def test_without_containers_images_need_the_any_image_setting() -> None:
    with pytest.raises(RefusalError) as refused:
        spec_for(EnvironmentRequest("debian:12"), None, SPEC, {"local"}, any_image=False)
    assert (refused.value.status, str(refused.value)[:24]) == (404, "No such image: debian:12")
    assert spec_for(EnvironmentRequest("debian:12"), None, SPEC, {"local"}, any_image=True) == SPEC


def test_impossible_environments_are_refused() -> None:
    with pytest.raises(RefusalError) as refused:
        spec_for(EnvironmentRequest("x", {"A B": "1"}), SPEC, SPEC, DRIVERS, any_image=False)
    assert refused.value.status == 400


def test_each_environment_has_its_own_lasting_tree(tmp_path: Path) -> None:
    async def begun(running: Engine, name: str, **env: str) -> tuple[int, str]:
        rollout = await running.tasks.open_rollout("task", name, environment=EnvironmentRequest("any", env))
        told, outcome = await ask(running, rollout, "echo $X")
        return rollout.tree.id, f"{told['stdout'].strip()} {Outcome(outcome).name}"

    async def first() -> list[tuple[int, str]]:
        async with engine(tmp_path, any_image=True) as running:
            return [
                await begun(running, "a", X="1"),
                await begun(running, "b", X="2"),
                await begun(running, "c", X="1"),
            ]

    async def second() -> list[tuple[int, str]]:
        async with engine(tmp_path, any_image=True) as running:
            # Whatever is wanted now: it runs.
            return [await begun(running, "a", X="3"), await begun(running, "b"), await begun(running, "d", X="2")]

    (one, told_a), (two, told_b), (three, told_c) = asyncio.run(first())
    assert (one == three, one != two) == (True, True)
    assert [told_a, told_b, told_c] == ["1 MISS", "2 MISS", "1 HIT"]
    assert asyncio.run(second()) == [(one, "1 HIT"), (two, "2 HIT"), (two, "2 HIT")]
