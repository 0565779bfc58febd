"""Background tasks are held, reported and waited for."""

import asyncio

from structlog.testing import capture_logs

from sandboxes.task_owner import TaskOwner


async def _fail() -> None:
    raise ValueError("broken")


def test_failure_is_logged_with_its_task_name() -> None:
    async def main() -> None:
        owner = TaskOwner()
        owner.spawn("sweep", _fail())
        await owner.wait()

    with capture_logs() as lines:
        asyncio.run(main())
    assert [(line["task"], line["error"]) for line in lines] == [("sweep", "broken")]


def test_awaited_failure_is_left_to_its_caller() -> None:
    async def main() -> str:
        owner = TaskOwner()
        try:
            await owner.spawn("ask", _fail(), awaited=True)
        except ValueError as error:
            return str(error)
        return ""

    with capture_logs() as lines:
        assert asyncio.run(main()) == "broken"
    assert lines == []


def test_wait_includes_tasks_spawned_meanwhile() -> None:
    async def main() -> tuple[list[int], int]:
        owner, done = TaskOwner(), []

        async def work(left: int) -> None:
            await asyncio.sleep(0)
            done.append(left)
            if left:
                owner.spawn("next", work(left - 1))

        owner.spawn("first", work(2))
        await owner.wait()
        return done, len(owner)

    assert asyncio.run(main()) == ([2, 1, 0], 0)


def test_cancel_ends_all_tasks_silently() -> None:
    async def main() -> int:
        owner = TaskOwner()
        owner.spawn("forever", asyncio.Event().wait())
        owner.cancel()
        await owner.wait()
        return len(owner)

    with capture_logs() as lines:
        assert asyncio.run(main()) == 0
    assert lines == []


def test_end_includes_tasks_that_are_spawned_meanwhile() -> None:
    """A state was sent to a store that hangs, while the member stopped: it never did."""

    async def main() -> int:
        owner = TaskOwner()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                owner.spawn("next", asyncio.Event().wait())

        owner.spawn("first", work())
        await asyncio.sleep(0)
        await asyncio.wait_for(owner.end(), 10)
        return len(owner)

    assert asyncio.run(main()) == 0
