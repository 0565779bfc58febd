"""Exported container states: what is imported is what was frozen, or the file is refused.

FORKPOINT_THOROUGH=20 runs twenty times as many random programs.
"""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandboxes.container.driver import ContainerDriver
from sandboxes.container.portable_copies import FORM
from sandboxes.driver import FrozenState
from sandboxes.errors import NotFreezableError, StateGoneError
from sandboxes.portability import NotPortableError
from sandboxes.spec import EnvironmentSpec
from tests.sandboxes.box import run
from tests.sandboxes.container.test_states import LISTING
from tests.sandboxes.docker import BASH_IMAGE, SH_IMAGE, driven
from tests.sandboxes.local.test_tree_programs import NAMES

SPEC = EnvironmentSpec(driver="container", image=BASH_IMAGE)
SET_UP = SPEC.model_copy(
    update={
        "files": {"/root/w/old": "old\n", "/root/w/dir/f": "f\n"},
        "setup": ("ln /root/w/old /root/w/twin; rm /etc/group; rm -r /mnt; mkdir /mnt; date +%N > /mnt/once",),
        "workdir": "/root/w",
    }
)
EXAMPLES = 2 * int(os.environ.get("FORKPOINT_THOROUGH", "1"))

OPERATIONS = st.one_of(
    st.builds("echo {} > {}".format, st.sampled_from("xy"), NAMES),
    st.builds("echo z >> {}".format, NAMES),
    st.builds("truncate -s {} {}".format, st.sampled_from([0, 1, 3_000_000]), NAMES),
    st.builds("mv -T {} {}".format, NAMES, NAMES),
    st.builds("ln -sfn {} {}".format, st.sampled_from(["f", "../old", "./d//"]), NAMES),
    st.builds("ln -f {} {}".format, NAMES, NAMES),
    st.builds("chmod {} {}".format, st.sampled_from(["600", "644", "700", "1777"]), NAMES),
    st.builds("chown {} {}".format, st.sampled_from(["0:0", "7:8"]), NAMES),
    st.builds("touch -d {} {}".format, st.sampled_from(["2001-02-03", "2002-03-04T05:06:07.5"]), NAMES),
    st.builds("python3 -c 'import os; os.setxattr(\"{}\", \"user.{}\", b\"v\")'".format, NAMES, st.sampled_from("kl")),
    st.builds("rm -rf {}".format, NAMES),
    st.builds("mkdir -p {}".format, NAMES),
    st.builds("mkfifo {}".format, NAMES),
    st.builds("cp -a {} {}".format, NAMES, NAMES),
    st.just("rm -rf dir; mkdir dir; echo only > dir/only"),
    st.just("export V=$((V+1)); cd dir"),
)  # fmt: skip
PROGRAMS = st.lists(OPERATIONS, min_size=1, max_size=6)


def packed(driver: ContainerDriver, frozen: FrozenState) -> dict[str, bytes]:
    parts = {part: b"".join(driver.porter.pack(part)) for part in frozen.parts}
    assert parts == {part: b"".join(driver.porter.pack(part)) for part in frozen.parts}, "the same bytes each time"
    return parts


def taken(driver: ContainerDriver, frozen: FrozenState, parts: dict[str, bytes]) -> FrozenState:
    with driver.porter.unpacking() as unpacking:
        for name, data in parts.items():
            unpacking.part(name, io.BytesIO(data), hashlib.sha256(data).hexdigest())
        return unpacking.state(frozen)


@settings(
    deadline=None, max_examples=EXAMPLES, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(program=PROGRAMS, further=PROGRAMS)
def test_imported_states_answer_as_the_frozen_ones(container_dir: Path, program: list[str], further: list[str]) -> None:
    """Whatever calls made a state, the imported one has its digest, and all further calls answer alike."""

    async def act(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SET_UP)
        for command in program:
            await run(sandbox, command)
        frozen = await sandbox.freeze()
        copy = await driver.restore(SET_UP, taken(driver, frozen, packed(driver, frozen)))
        # Afterwards without times: the clock is not the same in the two.
        look = LISTING.replace("%T@", "") + "; cat /mnt/once; [ /root/w/old -ef /root/w/twin ]; echo $? $V; pwd"
        for command in (LISTING, look, *further, look):
            before, after = await run(sandbox, command), await run(copy, command)
            assert before.outcome == after.outcome, command
            # Not `exact`: a tick of the clock may come between two writes in one of the two.
            assert (before.state and before.state.content) == (after.state and after.state.content), command
        # What was imported can be exported again.
        again = await copy.freeze()
        taken(driver, again, packed(driver, again))

    driven(ContainerDriver(container_dir, spares=0), act)


def test_hostile_parts_are_refused(container_dir: Path) -> None:
    """No part can lead a restore to files of the host, to another image, or to a state that was not frozen."""

    async def act(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(
            sandbox, "mkdir /root/d; echo a > /root/d/a; ln /root/d/a /root/d/b; ln -s /etc /root/l; mkfifo /root/p"
        )
        frozen = await sandbox.freeze()
        parts = packed(driver, frozen)
        copy, image = frozen.parts
        assert changed(parts[copy], lambda _: None) == parts[copy]
        before = driver.states.all()
        changes: dict[str, Callable[[tarfile.TarInfo], None]] = {
            "link out": lambda member: setattr(member, "linkname", "diff/root/l/passwd") if member.islnk() else None,
            "link up": lambda member: setattr(member, "linkname", "diff/../../meta.json") if member.islnk() else None,
            "into a link": lambda member: setattr(member, "name", member.name.replace("root/d/b", "root/l/b")),
            "into a mount": lambda member: setattr(member, "name", member.name.replace("root/d/b", "dev/b")),
            "up": lambda member: setattr(member, "name", member.name.replace("root/d/b", "root/d/..")),
            "device": lambda member: setattr(member, "type", tarfile.BLKTYPE) if member.isfifo() else None,
            "attribute": lambda member: setattr(
                member, "pax_headers", {**member.pax_headers, "FORKPOINT.xattr.trusted.x": "eA=="}
            ),
        }
        for name, change in changes.items():
            with pytest.raises(NotPortableError) as refused:
                taken(driver, frozen, {**parts, copy: changed(parts[copy], change)})
            assert "its digest is another" not in str(refused.value), name
            assert driver.states.all() == before, name
        for head in (b"{}", b"[]", b'{"digest":"x"}', b'{"base":"sha256:x","adds":true}', b'{"adds":1,"base":"x"}'):
            with pytest.raises(NotPortableError):
                taken(driver, frozen, {**parts, image: changed(parts[image], lambda _: None, head)})
        with pytest.raises(NotPortableError, match="not a copy and an image"):
            taken(driver, frozen, {copy: parts[image], image: parts[copy]})
        with pytest.raises(NotPortableError, match="was not imported"):
            taken(driver, frozen, {copy: parts[copy]})
        for payload in ({**frozen.payload, "images": "x"}, {**frozen.payload, "copy": "../x"}, {}):
            with pytest.raises(NotPortableError):
                taken(driver, replace(frozen, payload=payload), parts)
        # Another image of this machine is not the one that the spec names.
        other = driver.daemon.image(SH_IMAGE)
        swapped = json.dumps({"adds": False, "base": other}, separators=(",", ":")).encode()
        with pytest.raises(StateGoneError):
            await driver.restore(
                SPEC, taken(driver, frozen, {**parts, image: changed(parts[image], lambda _: None, swapped)})
            )
        # And what changes on the disk after an import is never served.
        came = taken(driver, frozen, parts)
        (driver.states.folder / came.parts[0] / "diff/root/d/a").write_text("b\n")
        with pytest.raises(StateGoneError):
            await driver.restore(SPEC, came)

    driven(ContainerDriver(container_dir, spares=0), act)


def changed(data: bytes, change: Callable[[tarfile.TarInfo], None], head: bytes | None = None) -> bytes:
    """Return a part with its members changed, and its head replaced if one is given."""
    output = bytearray()
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as old:
        for member in old:
            content = old.extractfile(member) if member.isreg() else None
            body = b"" if content is None else content.read()
            if member.name == FORM.head:
                body = body if head is None else head
                member.size = len(body)
            else:
                change(member)
            output += member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + body + bytes(-len(body) % 512)
    return bytes(output) + bytes(1024)


def test_states_with_a_socket_stay_at_home(container_dir: Path) -> None:
    async def act(driver: ContainerDriver) -> None:
        sandbox = await driver.start(SPEC)
        await run(sandbox, "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/root/s\")'")
        with pytest.raises(NotFreezableError, match="/root/s is a socket"):
            packed(driver, await sandbox.freeze())

    driven(ContainerDriver(container_dir, spares=0), act)
