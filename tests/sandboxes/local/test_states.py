"""States of the local driver: what a digest sees, what freezing keeps, what is left behind."""

import asyncio
import errno
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.driver import FrozenState, Sandbox
from sandboxes.effects import Effect
from sandboxes.errors import NotFreezableError, NotFreezableNowError, SandboxError, SpecError, StateGoneError
from sandboxes.linux.files import remove_tree
from sandboxes.local.driver import LocalDriver
from sandboxes.local.host_base import in_sight
from sandboxes.local.layers import drop
from sandboxes.rights import held
from sandboxes.spec import Archive, EnvironmentSpec
from tests.machine import wait_until
from tests.sandboxes.box import Answer, file, local_driver, needs_root, opened, run

SPEC = EnvironmentSpec()

CHANGES = {
    "mode": "chmod 600 /root/d/f",
    "owner": "chown 1 /root/d/f",
    "content": "echo other > /root/d/f",
    "touch": "touch /root/d/f",
    "link": "ln -s f /root/d/l",
    "hard link": "ln /root/d/f /root/d/g",
    "rename": "mv /root/d/f /root/d/g",
    "directory": "mkdir /root/d/e",
    "directory's mode": "chmod 700 /root/d",
    "a directory's time": "touch /root/d",
    "an entry come and gone": "echo x > /root/x; rm /root/x",
    "attribute of overlayfs' own kind": 'python3 -c \'import os; os.setxattr("/root/d/f", "user.overlay.k", b"v")\'',
    "flag": "chattr +d /root/d/f",
    "flag of a directory": "chattr +d /root/d",
    "list of access": "setfacl -m u:1:r /root/d/f",
    "capability": "setcap cap_chown+ep /root/d/f",
    "mode of the root": "chmod 700 /",
    "hole": "truncate -s 300M /root/d/f",
    "removal": "rm /root/d/f",
    "removal of a directory": "rm -r /root/d",
    "file to directory": "rm /root/d/f; mkdir /root/d/f",
    "fifo": "mkfifo /root/d/p",
    "attribute": 'python3 -c \'import os; os.setxattr("/root/d/f", "user.k", b"v")\'',
    "of the base": "rm /etc/passwd",
    "of a layer, a tree": "rm -r /root/d; mkdir /root/d",
    "of the base, a tree": "rm -r /etc/alternatives; mkdir /etc/alternatives",
    "shared memory": "echo x > /dev/shm/x",
    "an old time": "touch -d 2001-01-01 /root/d/f",
    "another old time": "touch -d 2002-01-01 /root/d/f",
    "a time that 64 bits of nanoseconds do not hold": "touch -d 2300-01-01 /root/d/f",
    "another such time": "touch -d 2400-01-01 /root/d/f",
}
NO_CHANGES = {
    "read": "cat /root/d/f; ls -lR /root; find / -xdev -name passwd; grep -r x /etc/hosts",
    "created and removed": "echo x > /tmp/x; mkdir /tmp/y; rm -r /tmp/x /tmp/y",
    "mode there and back": "chmod 600 /root/d/f; chmod 644 /root/d/f",
    "opened for writing": ": >> /root/d/f; : >> /etc/passwd",
    "python": "python3 -c 'import json'",
}


async def _prepared(driver: LocalDriver) -> Sandbox:
    sandbox = await driver.start(SPEC)
    await run(sandbox, "mkdir d; echo text > d/f; sleep 0.02; echo last > d/last")
    return sandbox


def test_every_change_of_files_is_told_apart(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            frozen = await (await _prepared(driver)).freeze()
            seen = {frozen.state}
            for name, change in CHANGES.items():
                sandbox = await driver.restore(SPEC, frozen)
                answer = await run(sandbox, change)
                if answer.code == 127 or (name == "owner" and not held.over_files()):
                    continue
                assert (answer.effect, answer.code) == (Effect.FILES, 0), change
                assert answer.state not in seen, change
                seen.add(answer.state)
                if name == "hard link" and not held.over_files():
                    with pytest.raises(NotFreezableError, match="hard links"):
                        await sandbox.freeze()
                    continue
                again = await driver.restore(SPEC, await sandbox.freeze())
                assert (await run(again, "true")).state == answer.state, change
                await sandbox.close()
                await again.close()

    asyncio.run(go())


def test_a_clock_that_was_set_back_leaves_equal_states_equal(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root state is of the next hour. A replay reaches what a sandbox has reached that runs on or is restored."""
    now_ns = time.time_ns

    async def test() -> None:
        async with opened(local_driver(data_dir)) as driver:
            with monkeypatch.context() as patch:
                patch.setattr(time, "time_ns", lambda: now_ns() + 3600 * 10**9)
                sandboxes: list[Sandbox] = [await driver.start(SPEC)]
            sandboxes.append(await driver.start(SPEC))
            first = [(await run(sandbox, "echo a > f; sleep .01; mkdir d")).state for sandbox in sandboxes]
            sandboxes.append(await driver.restore(SPEC, await sandboxes[-1].freeze()))
            then = [(await run(sandbox, "mv f d/g; chmod 600 d/g")).state for sandbox in sandboxes]
            for states in (first, then):
                assert len({state.content for state in states if state is not None}) == 1

    asyncio.run(test())


@pytest.mark.parametrize("frozen", [True, False])
def test_command_without_difference_has_no_effect(data_dir: Path, frozen: bool) -> None:
    """A command that leaves every file as it was has no effect, frozen before or not."""

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await _prepared(driver)
            if frozen:
                await sandbox.freeze()
            state = (await run(sandbox, "true")).state
            for name, command in NO_CHANGES.items():
                answer = await run(sandbox, command)
                assert (answer.effect, answer.state) == (Effect.NONE, state), name

    asyncio.run(go())


@pytest.mark.parametrize("large", ["mkdir many; cd many; seq 6000 | xargs touch; cd ..", "head -c 70M /dev/zero > f"])
def test_large_state_has_a_digest(data_dir: Path, large: str) -> None:
    """A state of many files, or of a large one, is recognized, restored and merged as any other."""

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            seen = []
            for last in ("echo a > /tmp/x", "echo b > /tmp/x", "echo a > /tmp/x"):
                sandbox = await driver.start(SPEC)
                assert (await run(sandbox, large)).state is not None
                assert (await run(sandbox, "ls | wc -l")).effect is Effect.NONE
                state = (await run(sandbox, last)).state
                assert state is not None
                seen.append(state)
                restored = await driver.restore(SPEC, await sandbox.freeze())
                assert (await run(restored, "true")).state == state
                # Not `exact`: a tick of the clock may come between two of the files in one of the sandboxes.
                states = [(await run(box, "rm /tmp/x; touch many/7 f")).state for box in (restored, sandbox)]
                assert len({state and state.content for state in states}) == 1
            assert seen[0].content == seen[2].content != seen[1].content

    asyncio.run(go())


def test_deep_stacks_are_merged_and_mean_the_same(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await driver.start(SPEC)
            for number in range(40):
                await run(
                    sandbox,
                    f"mkdir -p d{number % 3}; echo {number} > d{number % 3}/f{number}; cp d0/f0 copy{number}",
                )
                await run(sandbox, f"rm -f d0/f{number - 4}; test {number} = 20 && rm -r d1 && mkdir d1; true")
                frozen = await sandbox.freeze()
                await driver.machine.background.wait()
            assert len(frozen.parts) < 30
            look = "find . -exec stat -c '%n %F %h %s %a' {} + | sort; cat d*/f*"
            one, two = await run(sandbox, look), await run(await driver.restore(SPEC, frozen), look)
            assert one.outcome == two.outcome
            assert one.state == two.state
            assert one.state is not None

    asyncio.run(go())


def test_witness_excludes_files_that_processes_write(
    data_dir: Path,
) -> None:
    noise = "(while :; do date +%N; sleep .01; done) > log 2>&1 & sleep .1"

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            answers = []
            for command in ("echo one > f", "echo one > f", "echo two > f"):
                sandbox = await driver.start(SPEC)
                assert (await run(sandbox, noise)).state is None
                answer = await run(sandbox, command)
                assert answer.state is None
                assert answer.witness is not None
                answers.append(answer.witness)
                await sandbox.close()
            assert answers[0] == answers[1] != answers[2]

    asyncio.run(go())


async def run_often(sandbox: Sandbox, command: str) -> None:
    """Run a command until it fails: one may be done before the kernel has ended pid 1 with its parent."""
    for _ in range(1000):
        await run(sandbox, command)


def test_dead_launcher_is_replaced(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await driver.start(SPEC)
            await run(sandbox, "echo 1 > f")
            frozen = await sandbox.freeze()
            assert driver.machine.launcher.pid is not None
            os.kill(driver.machine.launcher.pid, signal.SIGKILL)
            with pytest.raises(SandboxError):
                await run_often(sandbox, "cat f")
            assert not sandbox.alive
            restored = await driver.restore(SPEC, frozen)
            assert (await run(restored, "cat f")).out == "1\n"

    asyncio.run(go())


def test_collect_frees_what_nobody_needs(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            sandbox = await driver.start(SPEC)
            root_bytes = await driver.collect([])
            roots = driver.machine.layers.all()
            await run(sandbox, "head -c 1M /dev/urandom > f")
            one = await sandbox.freeze()
            await run(sandbox, "head -c 1M /dev/urandom > g")
            two = await sandbox.freeze()
            assert await driver.collect(two.parts) >= 2 << 20
            await sandbox.close()
            assert 1 << 20 <= await driver.collect(one.parts) < 2 << 20
            with pytest.raises(SandboxError, match="gone"):
                await driver.restore(SPEC, two)
            assert await driver.collect([]) == root_bytes < 1 << 20, "what a task starts from stays"
            assert driver.machine.layers.all() == roots

    asyncio.run(go())


def test_rebuilt_root_state_must_be_equal(data_dir: Path) -> None:
    spec = SPEC.model_copy(update={"setup": ("head -c 8 /dev/urandom > random",)})

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            first = await driver.start(spec)
            result = (await run(first, "md5sum random")).outcome
            await first.close()
            await driver.collect([])
            second = await driver.start(spec)
            assert (await run(second, "md5sum random")).outcome == result, "built once for all"
            await second.close()
            drop(driver.machine.layers, driver.machine.layers.all())
            with pytest.raises(SpecError, match="gave another one than its tree was"):
                await driver.start(spec)

    asyncio.run(go())


@needs_root
def test_state_of_a_changed_base_is_gone(data_dir: Path, tmp_path: Path) -> None:
    """A state whose base has changed since cannot be restored."""
    base = small_base(tmp_path / "base")
    spec = SPEC.model_copy(update={"base": str(base)})

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            before = await driver.identity(spec)
            sandbox = await driver.start(spec)
            await run(sandbox, "echo 1 > f")
            frozen = await sandbox.freeze()
            await sandbox.close()
            await (await driver.restore(spec, frozen)).close()
            (base / "new").write_text("changed")
            assert await driver.identity(spec) != before
            with pytest.raises(StateGoneError, match="has changed since"):
                await driver.restore(spec, frozen)

    asyncio.run(go())


@needs_root
def test_state_of_a_former_tarball_comes_back(data_dir: Path, tmp_path: Path) -> None:
    """A tarball that was replaced is unpacked beside the old one, on which rollouts that run go on."""
    base, packed = small_base(tmp_path / "base"), tmp_path / "base.tar"
    spec = SPEC.model_copy(update={"base": str(packed)})

    def pack(text: str) -> None:
        (base / "version").write_text(text)
        with tarfile.open(packed, "w") as archive:
            archive.add(base, ".")

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            pack("old\n")
            before = await driver.identity(spec)
            assert driver.unchanged(spec) is not None
            sandbox = await driver.start(spec)
            await run(sandbox, "X=1")
            frozen = await sandbox.freeze()
            await sandbox.close()
            pack("new\n")
            assert driver.unchanged(spec) is None
            assert await driver.identity(spec) != before
            restored = await driver.restore(spec, frozen)
            assert (await run(restored, "cat /version; echo $X")).out == "old\n1\n"
            fresh = await driver.start(spec)
            assert (await run(fresh, "cat /version")).out == "new\n"
            # A name that never meant this tarball does not lead there: an imported state may name any.
            with pytest.raises(StateGoneError, match="has changed since"):
                await driver.restore(SPEC.model_copy(update={"base": str(base)}), frozen)

    asyncio.run(go())


@needs_root
def test_state_of_a_changed_host_comes_back(data_dir: Path) -> None:
    """The host goes on changing below sandboxes that run, so a state of it is restored on the host as it is."""

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(SPEC)
            await run(sandbox, "X=1")
            frozen = await sandbox.freeze()
            await sandbox.close()
            former = replace(frozen, payload={**frozen.payload, "base": "host:another"})
            restored = await driver.restore(SPEC, former)
            assert (await run(restored, "echo $X")).out == "1\n"

    asyncio.run(go())


def test_archives_files_and_setup_make_the_root(data_dir: Path, tmp_path: Path) -> None:
    """The archives, files and set-up commands of a spec make its root state."""
    source = tmp_path / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "f").write_text("from a directory\n")
    packed = tmp_path / "a.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        member = tarfile.TarInfo("t/f")
        member.size, member.mode = 5, 0o640
        archive.addfile(member, io.BytesIO(b"tar!\n"))
    spec = EnvironmentSpec(
        archives=(Archive(source=str(packed)), Archive(source=str(source), target="/srv/tree")),
        files={"/work/given": "given\n"},
        setup=("cat given /t/f > made", "cd /; lost=1"),
        workdir="/work",
    )

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            one = await driver.start(spec)
            answer = await run(one, "pwd; cat made /srv/tree/sub/f; stat -c %a /t/f; echo $lost")
            assert answer.out == "/work\ngiven\ntar!\nfrom a directory\n640\n\n"
            two = await driver.start(spec)
            assert (await run(two, "true")).state == answer.state
            identity = await driver.identity(spec)
            (source / "sub" / "g").write_text("more")
            assert await driver.identity(spec) != identity

    asyncio.run(go())


@pytest.mark.parametrize("place", ["/usr/x", "/opt/forkpoint", "/etc/x/y", "/var/lib/dpkg/x"])
def test_visible_data_directory_is_hidden(place: str) -> None:
    assert in_sight(Path(place))


@pytest.mark.parametrize("place", ["/var/tmp/x", "/var/lib/forkpoint", "/root/x", "/home/me/x", "/work", "/"])
def test_data_elsewhere_is_not_to_be_seen(place: str) -> None:
    assert not in_sight(Path(place))


def test_host_base_is_independent_of_the_data_directory(data_dir: Path) -> None:
    """The host as a base has one identity, wherever the data directory is."""

    async def go() -> None:
        async with opened(local_driver(data_dir / "a")) as one, opened(local_driver(data_dir / "b")) as two:
            assert await one.identity(EnvironmentSpec()) == await two.identity(EnvironmentSpec())

    asyncio.run(go())


@pytest.mark.parametrize(
    "spec",
    [
        EnvironmentSpec(base="/nonexistent"),
        EnvironmentSpec(base="/etc/passwd"),
        EnvironmentSpec(archives=(Archive(source="/nonexistent"),)),
        EnvironmentSpec(archives=(Archive(source="/etc/passwd"),)),
        EnvironmentSpec(setup=("echo why >&2; exit 3",)),
        EnvironmentSpec(setup=("sleep 1000 &",)),
        EnvironmentSpec(files={"/dev/null/x": ""}),
    ],
)
def test_a_spec_that_cannot_be_built_says_why(data_dir: Path, spec: EnvironmentSpec) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            with pytest.raises(SpecError):
                await driver.start(spec)
            assert list(driver.sandboxes) == []

    asyncio.run(go())


def test_a_base_without_bash_needs_forks(data_dir: Path, shells: str) -> None:
    """Nothing in it has to run for a session."""

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            spec = EnvironmentSpec(base="/usr/share/doc", workdir="/")
            if shells == "executed":
                with pytest.raises(SpecError, match="bash"):
                    await driver.start(spec)
                return
            assert (await run(await driver.start(spec), "echo on $PWD; type -P sh")).printed == ("on /\n", "", 1)

    asyncio.run(go())


def small_base(root: Path) -> Path:
    """Make a root file system with bash, cat and ls."""
    for name in ("/bin/bash", "/bin/cat", "/bin/ls"):
        libraries = subprocess.run(["ldd", name], capture_output=True, text=True, check=True).stdout.split()
        for path in [name, *(word for word in libraries if word.startswith("/"))]:
            (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
            (root / path[1:]).write_bytes(Path(path).read_bytes())
            (root / path[1:]).chmod(0o755)
    return root


@needs_root
def test_a_directory_and_a_tarball_are_bases(data_dir: Path, tmp_path: Path) -> None:
    root = small_base(tmp_path / "root")
    packed = tmp_path / "root.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(root, ".")

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            for base in (root, packed):
                spec = EnvironmentSpec(base=str(base))
                sandbox = await driver.start(spec)
                assert (await run(sandbox, "echo hi > /tmp/f; cat /tmp/f; ls /etc")).out == "hi\n"
                restored = await driver.restore(spec, await sandbox.freeze())
                assert (await run(restored, "cat /tmp/f")).out == "hi\n"
            assert not (root / "tmp").exists()

    asyncio.run(go())


def _leftovers(data_dir: Path) -> list[str]:
    """What a driver on data_dir must not leave: mounts, groups, uppers, and processes of its groups."""
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(data_dir) in line]
    groups = orjson.loads((data_dir / "instance.json").read_bytes())["cgroups"]
    left += [group for group in groups if Path(group).exists()]
    left += [str(path) for path in (data_dir / "uppers").iterdir()]
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - a count or names
        try:
            own = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            continue
        if any(Path(group).name in own for group in groups):
            left.append(f"process {pid}")
    return left


@needs_root
def test_nothing_is_left_after_the_end(data_dir: Path) -> None:
    own = data_dir.parent / f"{data_dir.name}-own"

    async def go() -> None:
        async with opened(local_driver(own)) as driver:
            boxes = await asyncio.gather(*(driver.start(SPEC) for _ in range(8)))
            await asyncio.gather(*(run(box, "echo x > f; (sleep 100 &)") for box in boxes))
            await boxes[0].close()

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count or names
    try:
        asyncio.run(go())
        assert _leftovers(own) == []
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - a count or names
    finally:
        remove_tree(own)


@needs_root
def test_next_start_removes_what_a_killed_driver_left(data_dir: Path) -> None:
    own = data_dir.parent / f"{data_dir.name}-killed"
    program = textwrap.dedent(f"""
        import asyncio
        from pathlib import Path
        from sandboxes.local.driver import LocalDriver
        from tests.sandboxes.box import run, SPEC_FOR_KILL as SPEC
        async def go():
            driver = LocalDriver(Path({str(own)!r}))
            await driver.open()
            boxes = [await driver.start(SPEC) for _ in range(3)]
            await asyncio.gather(*(run(box, "echo x > f; (setsid sleep 1000 &)") for box in boxes))
            await run(boxes[0], "true")
            print("ready", flush=True)
            await asyncio.gather(*(run(box, "sleep 1000", timeout_s=1000) for box in boxes))
        asyncio.run(go())
    """).replace(
        "from tests.sandboxes.box import run, SPEC_FOR_KILL as SPEC",
        "from tests.sandboxes.box import run\nfrom sandboxes.spec import EnvironmentSpec\nSPEC = EnvironmentSpec()",
    )
    try:
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            with pytest.raises(SandboxError, match="in use"):
                asyncio.run(local_driver(own).open())
            process.send_signal(signal.SIGKILL)
        gone = "processes of a killed driver run on"
        wait_until(lambda: not any(line.startswith("process") for line in _leftovers(own)), gone)

        left = {*os.listdir(own / "uppers")}  # noqa: PTH208 - a count or names
        assert len(left) > 3

        async def reopen() -> None:
            async with opened(local_driver(own)) as driver:
                # The new spares have uppers too.
                assert not left & {*os.listdir(own / "uppers")}  # noqa: PTH208 - a count or names
                assert (await run(await driver.start(SPEC), "echo on")).out == "on\n"

        asyncio.run(reopen())
        assert _leftovers(own) == []
    finally:
        remove_tree(own)


def test_a_cancelled_call_leaves_a_dead_sandbox(data_dir: Path) -> None:
    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(SPEC)
            call = asyncio.create_task(run(sandbox, "sleep 100", timeout_s=100))
            # Another sandbox has started and answered: by then this call is on its way.
            assert (await file(await driver.start(SPEC), "get", "/etc/hostname"))[0] == 200
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not sandbox.alive
            with pytest.raises(SandboxError):
                await run(sandbox, "true")

    asyncio.run(go())


names = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/c"])
values = st.sampled_from(["x", "y", "two words", "$q"])
commands = st.one_of(
    st.builds("echo '{}' > {}".format, values, names),
    st.builds("echo '{}' >> {} && cat {}".format, values, names, names),
    st.builds("rm -rf {}".format, names),
    st.builds("mkdir -p {}".format, st.sampled_from(["d", "d/e", "a"])),
    st.builds("mv {} {}".format, names, names),
    st.builds("ln -f {} {}; ls -i | wc -l; stat -c %h {}".format, names, names, names),
    st.builds("chmod {} {}".format, st.sampled_from(["600", "755"]), names),
    st.builds("cd {}; pwd".format, st.sampled_from(["d", "..", "/root", "d/e", "-"])),
    st.builds("{}='{}'; export {}".format, st.sampled_from(["v", "w"]), values, st.sampled_from(["v", "w"])),
    st.builds("arr+=('{}'); declare -p arr".format, values),
    st.sampled_from(
        [
            "echo $v $w ${arr[@]}; env | grep -E '^(v|w)='",
            "f() { echo f $v $1; }",
            "f 1",
            "alias l='ls -A'",
            "l /root",
            "set -e",
            "set +e; shopt -s nullglob; echo d/*",
            "false; echo $?",
            "exit 3",
            "find /root -exec stat -c '%n %F %s %a %h' {} + | sort; cat /root/* 2>/dev/null",
            "umask 027; umask",
            "pushd /tmp; dirs",
            "unset v arr",
            "if",
            "rm -rf /root/d; mkdir /root/d; ls -A /root/d",
        ]
    ),
)


def _told(answers: list[Answer]) -> list[tuple[str, str, int, Effect]]:
    return [answer.outcome for answer in answers]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(commands, min_size=2, max_size=12))
def test_freezing_between_commands_changes_no_answer(data_dir: Path, program: list[str]) -> None:
    """A run that is frozen and restored between commands gives the same answers as an uninterrupted one."""

    async def straight(driver: LocalDriver) -> list[Answer]:
        sandbox = await driver.start(SPEC)
        answers = [await run(sandbox, command) for command in program]
        await sandbox.close()
        return answers

    async def over_frozen(driver: LocalDriver) -> list[Answer]:
        sandbox: Sandbox = await driver.start(SPEC)
        answers: list[Answer] = []
        for command in program:
            answers.append(await run(sandbox, command))
            try:
                frozen: FrozenState = await sandbox.freeze()
            except NotFreezableError:
                # Hard links need rights over files.
                assert not held.over_files()
                continue
            assert frozen.state == answers[-1].state
            await sandbox.close()
            sandbox = await driver.restore(SPEC, frozen)
        await sandbox.close()
        return answers

    async def go() -> None:
        async with opened(local_driver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            one, two = await asyncio.gather(straight(driver), over_frozen(driver))
        assert _told(one) == _told(two), program
        for a, b in zip(one, two, strict=True):
            assert (a.state and a.state.content) == (b.state and b.state.content), program

    asyncio.run(go())


def test_remove_tree_leaves_the_parent_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal of a directory tree does not change the directory that contains it."""
    tmp_path.chmod(0o755)
    tree, real = tmp_path / "tree", shutil.rmtree
    tree.mkdir()

    def fails_first(path: Path, onerror: Callable[..., None]) -> None:
        monkeypatch.setattr(shutil, "rmtree", real)
        onerror(os.rmdir, str(path), None)

    monkeypatch.setattr(shutil, "rmtree", fails_first)
    remove_tree(tree)
    assert not tree.exists()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_layer_without_room_harms_nothing(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails while a call's files become a layer. The sandbox goes on with them, and is frozen later."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def test() -> None:
        async with opened(local_driver(data_dir)) as driver:
            sandbox = await driver.start(SPEC)
            with monkeypatch.context() as patch:
                patch.setattr("sandboxes.local.layers.Layers.place", full)
                assert (await run(sandbox, "x=1; echo 1 > f; date +%N > g; cat f g")).code == 0
                with pytest.raises(NotFreezableNowError, match="No space left"):
                    await sandbox.freeze()
                answer = await run(sandbox, "echo $x >> f; mv g h; cat f h")
                assert answer.out.startswith("1\n1\n")
            look = "echo $x; cat f h; ls"
            [frozen, answer] = [await sandbox.freeze(), await run(sandbox, look)]
            assert answer.effect is Effect.NONE
            for restored in (await driver.restore(SPEC, frozen), sandbox):
                assert (await run(restored, look)).out == answer.out
                assert (await run(restored, "echo 2 > k; ls")).out == "f\nh\nk\n"

    asyncio.run(test())
