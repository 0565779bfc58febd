"""Hard links that calls make stay links in frozen states, as on a plain machine."""

import asyncio
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.driver import Driver
from sandboxes.errors import NotFreezableError
from sandboxes.local.driver import LocalDriver
from sandboxes.rights import held
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import driven, kept_driver, local_driver, opened, run

pytestmark = pytest.mark.skipif(not held.over_files(), reason="hard links over frozen layers need rights over files")

SPEC = EnvironmentSpec(setup=("mkdir w; chmod 700 w",), workdir="/root/w")
LOOK = (
    "find . -mindepth 1 -printf '%p %y %n %s %l\\n' | grep -v '^[^ ]* d' | sort; find . -type f -exec cksum {} + | sort"
)
"""Shows names, kinds, link counts and content; link counts of directories depend on the file system."""

FILES = st.sampled_from(["f1", "f2", "f3", "d/f1", "d/f2", "e/f1"])
FOLDERS = st.sampled_from(["d", "e"])
OPERATIONS = st.one_of(
    st.builds("ln -f {} {}".format, FILES, FILES),
    st.builds("ln -f {} {}".format, FILES, FILES),
    st.builds("echo {} >> {}".format, st.sampled_from("xy"), FILES),
    st.builds("echo {} > {}".format, st.sampled_from("xy"), FILES),
    st.builds("chmod {} {}".format, st.sampled_from(["600", "4755"]), FILES),
    st.builds("rm -f {}".format, FILES),
    st.builds("mv -T {} {}".format, FILES, FILES),
    st.builds("mkdir -p {}".format, FOLDERS),
    st.builds("rm -rf {}".format, FOLDERS),
    st.builds("rm -rf {0}; mkdir {0}".format, FOLDERS),
    st.builds("mv -T {} {}".format, FOLDERS, FOLDERS),
    # Not into itself: what that copies depends on the order of entries, which is no part of a state.
    st.sampled_from(["cp -al d e", "cp -al e d"]),
    st.builds("ln -sfn nowhere {}; ln -P {} {}".format, FILES, FILES, FILES),
    st.just("mkfifo p; ln p d/p; rm p"),
)
PROGRAMS = st.lists(OPERATIONS, min_size=3, max_size=10)


def plain(program: list[str]) -> list[str]:
    """Return what a plain bash shows after each command."""
    with tempfile.TemporaryDirectory() as folder:
        shown = []
        for command in program:
            text = f"{command}\n{LOOK}"
            ran = subprocess.run(["/bin/bash", "-c", text], cwd=folder, capture_output=True, text=True, check=False)
            shown.append(ran.stdout)
        return shown


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(PROGRAMS)
def test_links_are_as_on_a_plain_machine(data_dir: Path, program: list[str]) -> None:
    """In a sandbox that goes on, and in one that is restored after each call."""
    program = ["mkdir d e; echo 1 > f1; ln f1 d/f1; ln f1 e/f1", *program]
    truth = plain(program)

    async def go(driver: Driver) -> None:
        kept, restored = await driver.start(SPEC), await driver.start(SPEC)
        for command, shown in zip(program, truth, strict=True):
            answers = [await run(box, f"{command}\n{LOOK}") for box in (kept, restored)]
            assert [answer.out for answer in answers] == [shown, shown], (program, command)
            one, two = (answer.state for answer in answers)
            assert one is not None
            assert two is not None
            assert one.content == two.content
            try:
                frozen = await restored.freeze()
            except NotFreezableError:
                # The kernel keeps no index of these.
                look = await run(restored, "find . ! -type f ! -type d -links +1 | head -n 1")
                assert look.out, (program, command)
                continue
            await restored.close()
            restored = await driver.restore(SPEC, frozen)

    driven(kept_driver.offer("links", local_driver, data_dir), go)


def test_sandboxes_of_earlier_states_are_in_nobody_s_way(data_dir: Path) -> None:
    """The kernel refuses layers that are some mount's upper directory, also while others link over them."""

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            others = []
            sandbox = await driver.start(SPEC)
            for number in range(4):
                await run(sandbox, f"echo {number} > f{number}")
                others.append(sandbox)
                sandbox = await driver.restore(SPEC, await sandbox.freeze())
            # The kernel ends a mount some milliseconds after its last user.
            closing = asyncio.ensure_future(others.pop(0).close())
            for box in (sandbox, *others):
                assert (await run(box, "ln f0 g; echo more >> g; tail -n 1 f0")).out == "more\n"
                assert (await run(box, "echo last >> f0; tail -n 1 g; stat -c %h g")).out == "last\n2\n"
            await closing

    asyncio.run(go())


def test_links_of_the_base_stay_links_where_calls_have_linked(data_dir: Path) -> None:
    """So that they do is part of the state: it is another one than that of a rollout that never linked."""
    find = "find /usr/bin -xdev -type f -links 2 -printf '%i %p\\n' | sort | uniq -w 12 -D | head -n 2 | cut -d' ' -f2"

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            apart, sandbox = await driver.start(SPEC), await driver.start(SPEC)
            names = (await run(sandbox, find)).out.split()
            if not names:
                pytest.skip("no program of this machine has two names")
            state = (await run(sandbox, "true")).state
            await run(sandbox, "echo x > f; ln f g")
            again = (await run(sandbox, "rm f g")).state
            assert state is not None
            assert again is not None
            assert again.content != state.content
            write = f"echo 22 >> {names[0]}; tail -c 3 {names[1]} | grep -c 22"
            assert [(await run(box, write)).out for box in (sandbox, apart)] == ["1\n", "0\n"]
            back = await driver.restore(SPEC, await sandbox.freeze())
            assert (await run(back, f"echo 33 >> {names[1]}; tail -c 6 {names[0]}")).out == "22\n33\n"

    asyncio.run(go())


def test_links_of_set_up_stay_links(data_dir: Path) -> None:
    spec = EnvironmentSpec(setup=("echo 1 > a; ln a b",), workdir="/root")

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(spec)
            assert (await run(sandbox, "echo 2 >> a; cat b; stat -c %h b")).out == "1\n2\n2\n"
            back = await driver.restore(spec, await sandbox.freeze())
            assert (await run(back, "echo 3 >> b; cat a; rm a; stat -c %h b")).out == "1\n2\n3\n1\n"

    asyncio.run(go())


def test_links_beside_a_live_process_are_in_its_checkpoint(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            if not await driver.machine.checkpointer.is_available():
                pytest.skip(f"no CRIU: {driver.machine.checkpointer.unavailable_reason}")
            sandbox = await driver.start(SPEC)
            await run(sandbox, "echo 1 > a; ln a b")
            await run(
                sandbox, "(exec 9>>a; while read -r line; do echo $line >&9; done < <(tail -f /dev/null)) & ln a c"
            )
            for box in (await driver.restore(SPEC, await sandbox.freeze()), sandbox):
                assert (await run(box, "echo 2 >> b; cat a c; stat -c %h c; pgrep -c tail")).out == "1\n2\n1\n2\n3\n1\n"
                again = await driver.restore(SPEC, await box.freeze())
                assert (await run(again, "rm a b; stat -c %h c; cat c")).out == "1\n1\n2\n"

    asyncio.run(go())


def test_without_an_index_a_state_with_links_is_not_kept(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)

            async def no_links(_: object) -> bool:
                return False

            monkeypatch.setattr(driver.machine, "keeps_links", no_links)
            sandbox = await driver.start(SPEC)
            await run(sandbox, "echo 1 > a; ln a b")
            with pytest.raises(NotFreezableError, match="hard links would not stay one file: root/w/a, root/w/b"):
                await sandbox.freeze()
            assert (await run(sandbox, "echo 2 >> a; cat b")).out == "1\n2\n"

    asyncio.run(go())
