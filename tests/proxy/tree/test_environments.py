"""Environments that create requests name, and the specs that they mean."""

import asyncio
from pathlib import Path

import pytest

from proxy.engine import Engine
from proxy.refusals import RefusalError
from proxy.tree.environments import EnvironmentRequest, spec_for
from proxy.tree.rollout import Outcome
from sandboxes.spec import EnvironmentSpec
from tests.proxy.rig import SPEC, ask, engine


def test_a_request_only_adds_to_a_task_spec() -> None:
    task_spec = EnvironmentSpec(env={"A": "task", "B": "task"}, setup=("true",))
    request = EnvironmentRequest("debian:12", {"B": "request", "C": "request"}, "/tmp", memory_mb=512)
    spec = spec_for(request, task_spec, SPEC, runs_images=True, any_image=False)
    assert (spec.driver, spec.image, spec.setup, spec.workdir) == ("local", None, ("true",), "/tmp")
    assert spec.env == {"A": "task", "B": "request", "C": "request"}
    assert (spec.limits.memory_mb, spec.limits.pids) == (512, task_spec.limits.pids)
    assert spec_for(EnvironmentRequest("x"), task_spec, SPEC, runs_images=True, any_image=False) == task_spec


def test_image_without_task_spec_is_the_environment() -> None:
    spec = spec_for(EnvironmentRequest("debian:12", {"A": "1"}), None, SPEC, runs_images=True, any_image=True)
    assert (spec.driver, spec.image, spec.workdir, spec.env) == ("local", "debian:12", "/", {"A": "1"})


def test_clients_name_no_file_of_the_machine() -> None:
    """The person who describes a task may name an archive. A client's image could be any file that the proxy reads."""
    with pytest.raises(RefusalError) as refused:
        spec_for(EnvironmentRequest("/root/image.tar"), None, SPEC, runs_images=True, any_image=False)
    assert refused.value.status == 404


def test_images_that_are_not_run_need_the_any_image_setting() -> None:
    with pytest.raises(RefusalError) as refused:
        spec_for(EnvironmentRequest("debian:12"), None, SPEC, runs_images=False, any_image=False)
    assert (refused.value.status, str(refused.value)[:24]) == (404, "No such image: debian:12")
    assert spec_for(EnvironmentRequest("debian:12"), None, SPEC, runs_images=False, any_image=True) == SPEC


def test_impossible_environments_are_refused() -> None:
    with pytest.raises(RefusalError) as refused:
        spec_for(EnvironmentRequest("x", {"A B": "1"}), SPEC, SPEC, runs_images=True, any_image=False)
    assert refused.value.status == 400


def test_each_environment_has_its_own_lasting_tree(tmp_path: Path) -> None:
    async def begun(running: Engine, name: str, **env: str) -> tuple[int, str]:
        rollout = await running.tasks.open_rollout("task", name, environment=EnvironmentRequest("any", env))
        answer, outcome = await ask(running, rollout, "echo $X")
        return rollout.tree.id, f"{answer['stdout'].strip()} {Outcome(outcome).name}"

    async def first() -> list[tuple[int, str]]:
        async with engine(tmp_path, any_image=True) as running:
            return [
                await begun(running, "a", X="1"),
                await begun(running, "b", X="2"),
                await begun(running, "c", X="1"),
            ]

    async def second() -> list[tuple[int, str]]:
        async with engine(tmp_path, any_image=True) as running:
            # The rollout runs already, so the requested environment does not matter.
            return [await begun(running, "a", X="3"), await begun(running, "b"), await begun(running, "d", X="2")]

    (first_tree, answer_a), (second_tree, answer_b), (third_tree, answer_c) = asyncio.run(first())
    assert (first_tree == third_tree, first_tree != second_tree) == (True, True)
    assert [answer_a, answer_b, answer_c] == ["1 MISS", "2 MISS", "1 HIT"]
    assert asyncio.run(second()) == [(first_tree, "1 HIT"), (second_tree, "2 HIT"), (second_tree, "2 HIT")]
