"""Random sessions are frozen and come back equal; the suite of every driver that has a shell.

SESSION_EXAMPLES=1000 runs a thousand sessions of each kind. By default there are few, because each takes a sandbox.
"""

import asyncio
import contextlib
import os
from typing import ClassVar

from hypothesis import HealthCheck, given, settings

from sandboxes.driver import Driver, Sandbox
from sandboxes.errors import NotFreezableError
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, run
from tests.sandboxes.guest.bash import session_programs
from tests.sandboxes.guest.bash.shell_runs import PROBE

_PIDS = r"""
\builtin kill -0 $! 2>/dev/null; \builtin printf '<%s>' $? ${COPROC_PID+coproc} ${C_PID+C}
"""
SH_PROBE = r"""
set +e; trap; export -p; readonly -p; alias; umask; ulimit -a; printf '<%s>' "$#" "$@" "$-"; kill -0 $!; echo $?
PATH=/usr/bin:/bin
set | grep -avE '^(_|PPID|LINENO|RANDOM|PATH|P|BASH.*|EPOCH.*|SECONDS|FUNCNAME)='
pwd; command ls -a; ls /proc/self/fd | wc -l
"""
"""Shows all that a session of a POSIX shell has, in images without bash."""


class SessionContract:
    bash: ClassVar = True
    examples: ClassVar = 3

    def test_random_sessions_come_back_equal(self, driver: Driver) -> None:
        """A look at the whole session prints the same in the sandbox that made it and in a restored one.

        A state that cannot be frozen is reached by a replay, as the proxy does.
        """
        examples = int(os.environ.get("SESSION_EXAMPLES", self.examples))
        with asyncio.Runner() as runner:
            runner.run(driver.open())

            @settings(
                max_examples=examples, deadline=None, derandomize=examples < 100, database=None,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            @given(session_programs.held_calls(bash=self.bash))
            def compare(calls: list[str]) -> None:
                runner.run(self._compare(driver, calls))

            try:
                compare()
            finally:
                runner.run(driver.aclose())

    def test_a_session_goes_on_in_its_own_directory_of_proc(self, driver: Driver) -> None:
        """No fresh shell finds that directory, so the session has to stay in the shell that has it."""

        async def test() -> None:
            async with opened(driver):
                sandbox = await driver.start(EnvironmentSpec())
                where = (await run(sandbox, "cd /proc/$$; x=1; pwd")).out
                for _ in range(2):
                    assert (await run(sandbox, "pwd; [ -e status ] && echo $x")).out == f"{where}1\n"
                # With a checkpoint it can be frozen.
                with contextlib.suppress(NotFreezableError):
                    back = await driver.restore(EnvironmentSpec(), await sandbox.freeze())
                    assert (await run(back, "pwd; echo $x")).out == f"{where}1\n"
                assert (await run(sandbox, "cd /; x=2; pwd")).out == "/\n"
                back = await driver.restore(EnvironmentSpec(), await sandbox.freeze())
                assert (await run(back, "pwd; echo $x")).out == "/\n2\n"

        asyncio.run(test())

    async def _compare(self, driver: Driver, calls: list[str]) -> None:
        spec = EnvironmentSpec()
        sandbox = await driver.start(spec)
        for call in calls:
            await run(sandbox, call)
        try:
            back = await driver.restore(spec, await sandbox.freeze())
        except NotFreezableError:
            back = await driver.start(spec)
            for call in calls:
                await run(back, call)
        try:
            expected = await self._look(sandbox)
            assert await self._look(back) == expected
        finally:
            await back.close()
            await sandbox.close()

    async def _look(self, sandbox: Sandbox) -> list[str]:
        answers = [await run(sandbox, probe) for probe in ((PROBE, _PIDS) if self.bash else (SH_PROBE,))]
        return [line for answer in answers for line in (*answer.out.splitlines(), answer.err, str(answer.code))]
