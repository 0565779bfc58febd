"""What every driver promises, in the few shell words that the in-memory one knows too.

A driver's test module subclasses the contract that promises most of what the driver keeps, and gives it a `driver`
fixture.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sandboxes.driver import Driver, FrozenState, Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, SpecError
from sandboxes.inspection import InspectableSandbox
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import driven, file, ran, run

Test = Callable[[Driver], Awaitable[None]]
SPEC = EnvironmentSpec()


async def after(driver: Driver, *commands: str, spec: EnvironmentSpec = SPEC) -> Sandbox:
    sandbox = await driver.start(spec)
    for command in commands:
        await run(sandbox, command)
    return sandbox


class DriverContract:
    """The suite. Each test gets a driver that nobody has opened, and runs with `driven`.

    checkpoints: whether it freezes live processes.
    """

    checkpoints = False

    def test_command_returns_output_and_exit_code(self, driver: Driver) -> None:
        """A command returns its output and its exit code."""

        async def test(driver: Driver) -> None:
            sandbox = await driver.start(SPEC)
            answer = await run(sandbox, "echo hi; false")
            assert (answer.out, answer.code, answer.timed_out, answer.truncated) == ("hi\n", 1, False, False)
            assert (await run(sandbox, "no-such-command")).code == 127
            assert (await run(sandbox, "exit 7")).code == 7

        driven(driver, test)

    def test_only_what_changes_something_has_an_effect(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "echo a > kept")
            effects = [
                (await run(sandbox, command)).effect
                for command in (
                    "cat kept",
                    "echo b > kept",
                    "x=1",
                    "cd /tmp",
                    "true",
                    "echo t > /tmp/t; rm /tmp/t",
                    "exit 3",
                )
            ]
            none, files, session = Effect.NONE, Effect.FILES, Effect.SESSION
            assert effects == [none, files, session, session, none, none, none]

        driven(driver, test)

    def test_a_session_keeps_its_directory_and_variables(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "cd /tmp", "x=5", "export y=6")
            assert (await run(sandbox, "pwd; echo $x $y")).out == "/tmp\n5 6\n"

        driven(driver, test)

    def test_sessions_share_files_and_nothing_else(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "x=5; cd /tmp; echo shared > /tmp/f")
            answer = await run(sandbox, "pwd; echo $x; cat /tmp/f", session="other")
            assert answer.out == "/root\n\nshared\n"
            assert answer.effect is Effect.NONE

        driven(driver, test)

    def test_exit_ends_the_call_but_keeps_the_session(self, driver: Driver) -> None:
        """`exit` ends the call, and the session stays as it was."""

        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "x=1", "x=2; echo made > made; exit 4")
            assert (await run(sandbox, "echo $x; cat made")).out == "1\nmade\n"

        driven(driver, test)

    def test_restored_state_gives_equal_results(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "echo a > a; mkdir d; cd d; x=1")
            frozen = await sandbox.freeze()
            await sandbox.close()
            restored = await driver.restore(SPEC, frozen)
            assert (await run(restored, "pwd; echo $x; cat /root/a")).out == "/root/d\n1\na\n"

        driven(driver, test)

    def test_frozen_sandbox_continues(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "echo a > a")
            first = await sandbox.freeze()
            await run(sandbox, "echo b >> a; x=2")
            second = await sandbox.freeze()
            one, two = await driver.restore(SPEC, first), await driver.restore(SPEC, second)
            await run(one, "echo c >> a")
            assert (await run(one, "cat a; echo $x")).out == "a\nc\n\n"
            assert (await run(two, "cat a; echo $x")).out == "a\nb\n2\n"
            assert (await run(sandbox, "cat a")).out == "a\nb\n"

        driven(driver, test)

    def test_frozen_state_has_the_last_calls_digest(self, driver: Driver) -> None:
        """A frozen state has the digest of the call before it."""

        async def test(driver: Driver) -> None:
            sandbox = await driver.start(SPEC)
            answer = await run(sandbox, "echo a > a; x=1")
            frozen = await sandbox.freeze()
            restored = await driver.restore(SPEC, frozen)
            assert answer.state is not None
            assert [frozen.state, (await run(restored, "true")).state] == [answer.state] * 2

        driven(driver, test)

    def test_equal_states_have_equal_digests(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            start = (await run(await driver.start(SPEC), "true")).state
            there_and_back = await run(await after(driver, "echo a > /tmp/a"), "rm /tmp/a")
            direct = await run(await driver.start(SPEC), "echo b > /tmp/b")
            detour = await run(
                await after(driver, "echo c > /tmp/c", "rm /tmp/c", "echo a > /tmp/b"), "echo b > /tmp/b"
            )
            other = await run(await driver.start(SPEC), "echo B > /tmp/b")
            assert there_and_back.state == start
            assert direct.state == detour.state
            assert other.state not in {direct.state, None}

        driven(driver, test)

    def test_write_order_changes_only_the_exact_digest(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            one = (await run(await after(driver, "echo a > a"), "echo b > b")).state
            two = (await run(await after(driver, "echo b > b"), "echo a > a")).state
            assert one is not None
            assert two is not None
            assert one.content == two.content
            assert one.exact != two.exact

        driven(driver, test)

    def test_files_are_put_got_and_deleted(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await driver.start(SPEC)
            assert (await file(sandbox, "put", "/tmp/f", b"one\n"))[0] == 201
            assert (await file(sandbox, "put", "/tmp/f", b"two\n"))[0] == 204
            assert (await run(sandbox, "cat /tmp/f")).out == "two\n"
            assert await file(sandbox, "get", "/tmp/f") == (200, b"two\n")
            assert (await file(sandbox, "delete", "/tmp/f"))[0] == 204
            assert (await file(sandbox, "get", "/tmp/f"))[0] == 404
            assert (await file(sandbox, "delete", "/tmp/f"))[0] == 404

        driven(driver, test)

    def test_spec_files_and_environment_exist_at_start(self, driver: Driver) -> None:
        """The files and variables of a spec exist from the start."""

        async def test(driver: Driver) -> None:
            spec = EnvironmentSpec(
                files={"/tmp/given": "text\n"}, setup=("echo made > /tmp/made", "x=lost"), env={"E": "e"}
            )
            sandbox = await driver.start(spec)
            answer = await run(sandbox, "cat /tmp/given; cat /tmp/made; echo $E $x")
            assert answer.out.split() == ["text", "made", "e"]
            assert answer.effect is Effect.NONE

        driven(driver, test)

    def test_failing_setup_is_a_spec_error(self, driver: Driver) -> None:
        """A set-up command that fails is an error of the spec."""

        async def test(driver: Driver) -> None:
            with pytest.raises(SpecError):
                await driver.start(EnvironmentSpec(setup=("false",)))

        driven(driver, test)

    def test_equal_specs_have_one_identity(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            assert await driver.identity(SPEC) == await driver.identity(EnvironmentSpec())

        driven(driver, test)

    def test_collecting_spares_what_is_kept(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            states: list[FrozenState] = []
            for name in ("kept", "dropped"):
                sandbox = await after(driver, f"echo {name} > f")
                states.append(await sandbox.freeze())
                await sandbox.close()
            await driver.collect(states[0].parts)
            assert (await run(await driver.restore(SPEC, states[0]), "cat f")).out == "kept\n"

        driven(driver, test)

    def test_collecting_spares_what_is_being_frozen(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            left = "sleep 1000 &" if self.checkpoints else "true"
            for _ in range(3):
                sandbox = await after(driver, "echo a > kept", left, "echo b > later")
                freezing = asyncio.ensure_future(sandbox.freeze())
                while not freezing.done():
                    await driver.collect(())
                    await asyncio.sleep(0)
                restored = await driver.restore(SPEC, await freezing)
                assert (await run(restored, "cat kept; cat later")).out == "a\nb\n"

        driven(driver, test)

    def test_closing_twice_is_closing_once(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await driver.start(SPEC)
            assert sandbox.alive
            await sandbox.close()
            await sandbox.close()
            assert not sandbox.alive

        driven(driver, test)

    def test_sandboxes_have_separate_sessions(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            one, two = await asyncio.gather(driver.start(SPEC), driver.start(SPEC))
            await asyncio.gather(run(one, "echo one > /tmp/f"), run(two, "echo two > /tmp/f"))
            answers = await asyncio.gather(run(one, "cat /tmp/f"), run(two, "cat /tmp/f"))
            assert [answer.out for answer in answers] == ["one\n", "two\n"]

        driven(driver, test)

    def test_separate_process_shares_files_but_no_session(self, driver: Driver) -> None:
        """A process beside the shell shares its files and has no part in its session."""

        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "x=5; cd /tmp")
            result = await ran(sandbox, "/bin/sh", "-c", "pwd; echo $x$y > made; exit 3", env={"y": "6"})
            assert (result.out, result.err, result.ending.exit_code) == (b"/root\n", b"", 3)
            assert result.effect is Effect.FILES
            assert (await run(sandbox, "cat /root/made; pwd; echo $x")).out == "6\n/tmp\n5\n"
            result = await ran(sandbox, "cat", "made", cwd="/root")
            assert (result.out, result.effect) == (b"6\n", Effect.NONE)
            assert (await ran(sandbox, "no-such-program")).ending.exit_code in {126, 127}

        driven(driver, test)


class LocalContract(DriverContract):
    """What sandboxes of this machine promise beside that: people look into them, and processes may stay."""

    def test_inspection_shows_differences_from_the_root(self, driver: Driver) -> None:
        """An inspection shows what differs from the root state."""

        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "echo one > /tmp/f", "mkdir /tmp/d", "cd /tmp; x=5")
            assert isinstance(sandbox, InspectableSandbox)
            twin = await driver.restore(SPEC, await sandbox.freeze())
            assert isinstance(twin, InspectableSandbox)
            answer, again = await sandbox.inspect(), await twin.inspect()
            assert answer.files is not None
            assert {"/tmp/f", "/tmp/d"} <= answer.files.keys()
            assert (answer.sessions["main"].cwd, "x" in answer.sessions["main"].variables) == ("/tmp", True)
            assert (again.files, again.sessions) == (answer.files, answer.sessions)
            result = await twin.entries(["/tmp/f", "/tmp/d", "/tmp/none"], content_bytes=100)
            assert [result[path].kind for path in result] == ["file", "directory", "gone"]
            assert result["/tmp/f"].content == b"one\n"
            assert (await twin.entries(["/tmp/f"], content_bytes=1))["/tmp/f"].content is None
            assert (await run(sandbox, "pwd; cat f")).out == "/tmp\none\n", "looking changes nothing"

        driven(driver, test)

    def test_what_still_runs_is_an_effect_without_digest(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await driver.start(SPEC)
            answer = await run(sandbox, "sleep 1000 &")
            assert answer.effect is Effect.PROCESSES
            assert answer.state is None
            if not self.checkpoints:
                with pytest.raises(NotFreezableError):
                    await sandbox.freeze()
            assert (await run(sandbox, "echo on")).out == "on\n"

        driven(driver, test)

    def test_what_a_process_leaves_running_is_state(self, driver: Driver) -> None:
        async def test(driver: Driver) -> None:
            sandbox = await driver.start(SPEC)
            result = await ran(sandbox, "/bin/sh", "-c", "sleep 1000 >/dev/null 2>&1 &")
            assert (result.ending.exit_code, result.effect, result.state) == (0, Effect.PROCESSES, None)
            if not self.checkpoints:
                with pytest.raises(NotFreezableError):
                    await sandbox.freeze()
                return
            restored = await driver.restore(SPEC, await sandbox.freeze())
            count = "grep -scax 'sleep.1000.' /proc/[0-9]*/cmdline | grep -c :1"
            result = await ran(restored, "/bin/sh", "-c", count)
            assert (result.out, result.err) == (b"1\n", b"")

        driven(driver, test)


class MachineContract(LocalContract):
    """What holds where time passes."""

    def test_the_file_system_has_one_number(self, driver: Driver) -> None:
        """An overlay has a random number by default. It would be another one after each call, and after a restore."""

        async def test(driver: Driver) -> None:
            look = "stat -f -c %i / /root /usr"
            sandbox = await after(driver, "echo 1 > a")
            first = (await run(sandbox, look)).out
            await run(sandbox, "echo 2 > a")
            assert (await run(sandbox, look)).out == first
            restored = await driver.restore(SPEC, await sandbox.freeze())
            assert (await run(restored, look)).out == (await run(await driver.start(SPEC), look)).out == first

        driven(driver, test)


class CheckpointContract(MachineContract):
    """What holds where live processes are frozen."""

    checkpoints = True

    def test_running_processes_return_with_files_and_session(self, driver: Driver) -> None:
        """Processes that still run are restored together with their files and session."""

        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "echo a > kept", "x=1", "sleep 1000 &", "echo b > later")
            frozen = await sandbox.freeze()
            assert (frozen.kind, frozen.state) == ("processes", None)
            look = "cat kept later; echo $x; kill -0 %1; echo $?; jobs"
            answer = (await run(sandbox, look)).printed
            assert answer[0].startswith("a\nb\n1\n0\n[1]+  Running")
            others = [await driver.restore(SPEC, frozen) for _ in range(2)]
            for other in others:
                assert (await run(other, look)).printed == answer
            # What happens in one is nothing to the others.
            assert (await run(others[0], "kill %1; wait %1; echo $?; echo c > kept")).out == "143\n"
            assert (await run(sandbox, look)).printed == answer
            assert (await run(others[1], look)).printed == answer
            again = await driver.restore(SPEC, await others[1].freeze())
            assert (await run(again, look)).printed == answer
            # The shell knows the job's exit code, which no file holds.
            assert (await others[0].freeze()).kind == "processes"

        driven(driver, test)

    def test_running_processes_outlive_their_sandbox(self, driver: Driver) -> None:
        """Processes that still run are restored after their sandbox was closed."""

        async def test(driver: Driver) -> None:
            sandbox = await after(driver, "echo a > kept", "sleep 1000 &", "echo b > later")
            frozen = await sandbox.freeze()
            await sandbox.close()
            back = await driver.restore(SPEC, frozen)
            assert (await run(back, "cat kept later; kill -0 %1; echo $?")).out == "a\nb\n0\n"

        driven(driver, test)
