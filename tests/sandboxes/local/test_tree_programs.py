"""Random programs of file operations: digests are equal if and only if the trees are, by whatever calls and layers.

FORKPOINT_THOROUGH=20 runs twenty times as many examples.
"""

import asyncio
import hashlib
import io
import os
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.driver import FrozenState, Sandbox
from sandboxes.effects import StateDigest
from sandboxes.errors import NotFreezableError
from sandboxes.local import sandbox_layers
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import opened, run

SPEC = EnvironmentSpec(files={"/root/w/old": "old\n", "/root/w/dir/f": "f\n"}, workdir="/root/w")
EXAMPLES = 5 * int(os.environ.get("FORKPOINT_THOROUGH", "1"))

NAMES = st.sampled_from(["a", "b", "old", "dir", "dir/f", "dir/g", "new", "new/h", "new/i"])
OPERATIONS = st.one_of(
    st.builds("echo {} > {}".format, st.sampled_from("xy"), NAMES),
    st.builds("echo z >> {}".format, NAMES),
    st.builds("truncate -s {} {}".format, st.sampled_from([0, 1, 3_000_000]), NAMES),
    st.builds("head -c 3000000 /dev/zero > {}".format, NAMES),
    st.builds("echo end | dd of={} bs=1 seek=2500000 conv=notrunc 2> /dev/null".format, NAMES),
    st.builds("mv -T {} {}".format, NAMES, NAMES),
    st.builds("ln -sfn {} {}".format, st.sampled_from(["f", "../old"]), NAMES),
    st.builds("ln -f {} {}".format, NAMES, NAMES),
    st.builds("chmod {} {}".format, st.sampled_from(["600", "644", "700", "1777"]), NAMES),
    st.builds("chown {} {}".format, st.sampled_from(["0:0", "7:8"]), NAMES),
    st.builds("touch -d {} {}".format, st.sampled_from(["2001-02-03", "2002-03-04T05:06:07.5"]), NAMES),
    st.builds("touch -r {} {}".format, NAMES, NAMES),
    st.builds("touch {}".format, NAMES),
    st.builds("chattr {}d {}".format, st.sampled_from("+-"), NAMES),
    st.builds(
        "python3 -c 'import os; os.setxattr(\"{}\", \"user.{}\", b\"{}\")'".format,
        NAMES, st.sampled_from(["k", "overlay.k", "overlay.opaque"]), st.sampled_from("yn"),
    ),
    st.builds("rm -rf {}".format, NAMES),
    st.builds("mkdir -p {}".format, NAMES),
    st.builds("mkfifo {}".format, NAMES),
    st.builds("cp -a {} {}".format, NAMES, NAMES),
    st.just("rm -rf dir; mkdir dir; echo only > dir/only"),
)  # fmt: skip
PROGRAMS = st.lists(OPERATIONS, min_size=1, max_size=7)

WALK = r"""
import array, fcntl, hashlib, json, os, stat, sys
def flags(path, mode):
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        return 0
    fd, value = os.open(path, os.O_RDONLY), array.array("L", [0])
    try:
        fcntl.ioctl(fd, 0x80086601, value)
    finally:
        os.close(fd)
    return value[0] & 0x40
paths = ["/root"] + [os.path.join(at, name) for at, *both in os.walk("/root") for names in both for name in names]
inodes, entries = {}, []
for path in sorted(paths):
    status = os.lstat(path)
    mode, content = status.st_mode, ""
    if stat.S_ISREG(mode):
        with open(path, "rb") as file:
            content = hashlib.sha256(file.read()).hexdigest()
    elif stat.S_ISLNK(mode):
        content = os.readlink(path)
    first = inodes.setdefault(status.st_ino, path) if stat.S_ISREG(mode) and status.st_nlink > 1 else ""
    names = sorted(os.listxattr(path, follow_symlinks=False))
    attributes = [(name, os.getxattr(path, name, follow_symlinks=False).hex()) for name in names]
    time = 0 if stat.S_ISDIR(mode) and mode & stat.S_ISVTX else status.st_mtime_ns
    entries.append([path, mode, status.st_uid, status.st_gid, content, first, attributes, flags(path, mode), time])
json.dump(entries, sys.stdout)
"""


async def walked(sandbox: Sandbox, born_ns: int) -> tuple[Any, Any]:
    """Return what a plain walk sees: everything but the order of the clock's times, and that order."""
    answer = await run(sandbox, f"PYTHONDONTWRITEBYTECODE=1 python3 - <<'WALK'\n{WALK}\nWALK")
    assert answer.code == 0, answer.err
    entries = orjson.loads(answer.out)
    clocked = {entry[0]: entry[-1] for entry in entries if entry[-1] >= born_ns and entry[-1] % 10**9}
    times = sorted(set(clocked.values()))
    order = {path: times.index(mtime) for path, mtime in clocked.items()}
    return [[*entry[:-1], "clock" if entry[0] in clocked else entry[-1]] for entry in entries], order


async def state_of(sandbox: Sandbox) -> StateDigest:
    state = (await run(sandbox, "true")).state
    assert state is not None
    return state


async def ran(driver: LocalDriver, calls: list[str]) -> Sandbox:
    sandbox = await driver.start(SPEC)
    for call in calls:
        await run(sandbox, call)
    return sandbox


def travelled(driver: LocalDriver, frozen: FrozenState) -> FrozenState:
    """Return a state as it comes back from a file."""
    with driver.porter.unpacking() as unpacking:
        for part in frozen.parts:
            data = b"".join(driver.porter.pack(part))
            unpacking.part(part, io.BytesIO(data), hashlib.sha256(data).hexdigest())
        return unpacking.state(frozen)


async def check_copies(driver: LocalDriver, sandbox: Sandbox, born_ns: int) -> None:
    """Check that a state is the same where it was restored, and where it was imported."""
    state, tree = await state_of(sandbox), await walked(sandbox, born_ns)
    try:
        frozen = await sandbox.freeze()
    except NotFreezableError:
        # Hard links need root.
        assert os.geteuid() != 0
        return
    copies = [frozen]
    try:
        copies.append(travelled(driver, frozen))
    except NotFreezableError as refusal:
        # Flags do not travel, nor do those that a later layer hides.
        if "flags of chattr" not in str(refusal):
            raise
    for copy in copies:
        restored = await driver.restore(SPEC, copy)
        assert (await state_of(restored), await walked(restored, born_ns)) == (state, tree)
        await restored.close()


@settings(
    deadline=None, max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(program=PROGRAMS, other=PROGRAMS, depth=st.sampled_from([1, 24]))
def test_digests_are_equal_exactly_for_equal_trees(
    data_dir: Path, program: list[str], other: list[str], depth: int
) -> None:
    """One call or many, few layers or merged ones, restored or imported: a digest says what a plain walk sees."""

    async def go() -> None:
        async with opened(LocalDriver(data_dir)) as driver:
            assert isinstance(driver, LocalDriver)
            born_ns = time.time_ns() if not driver.roots.used() else driver.roots.used()[0].born_ns
            seen: list[tuple[StateDigest, tuple[Any, Any]]] = []
            for calls in (program, ["\n".join(program)], other, [*other, *program]):
                sandbox = await ran(driver, calls)
                if not seen:
                    born_ns = driver.roots.used()[0].born_ns
                seen.append((await state_of(sandbox), await walked(sandbox, born_ns)))
                await check_copies(driver, sandbox, born_ns)
                await sandbox.close()
            for one, (tree, order) in seen:
                for another, (other_tree, other_order) in seen:
                    assert (one.content == another.content) == (tree == other_tree)
                    assert (one.exact == another.exact) == ((tree, order) == (other_tree, other_order))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox_layers, "MAX_DEPTH", depth)
        asyncio.run(go())
