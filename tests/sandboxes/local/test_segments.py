"""System V shared memory in checkpoints: what comes back, what does not, and what stays forbidden beside it."""

import shutil
from pathlib import Path

import pytest

from sandboxes.calls import ToolCall
from sandboxes.errors import NotFreezableError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec
from tests.machine import require_criu
from tests.sandboxes.box import ran, run
from tests.sandboxes.local.test_checkpoints import driven
from tests.sandboxes.postgres_cluster import server_programs

C = """
import ctypes, mmap, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def answer(name, at, written=None):
    open(f"/tmp/ready-{name}", "w")
    while True:
        time.sleep(0.02)
        if os.path.exists(f"/tmp/ask-{name}"):
            with open(f"/tmp/new-{name}", "wb") as file:
                file.write(ctypes.string_at(at, 5))
            if written:
                ctypes.memmove(at, written, 5)
            os.unlink(f"/tmp/ask-{name}")
            os.rename(f"/tmp/new-{name}", f"/tmp/told-{name}")
"""
SEGMENT = f"""{C}
number = libc.shmget(4711, 3 * mmap.PAGESIZE, 0o1640)
at, seen = libc.shmat(number, None, 0), libc.shmat(number, None, 0o10000)
ctypes.memmove(at + mmap.PAGESIZE, b"first", 5)
if os.fork():
    answer("writer", at + mmap.PAGESIZE, b"again")
answer("reader", seen + mmap.PAGESIZE)
"""
"""Two processes share a segment: one answers by what it reads and then writes to it, the other only sees it."""
ANONYMOUS = f"""{C}
memory = mmap.mmap(-1, mmap.PAGESIZE)
memory[:5] = b"first"
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
if os.fork():
    answer("writer", at, b"again")
answer("reader", at)
"""
BEGIN = "python3 /tmp/program & until [ -e /tmp/ready-writer -a -e /tmp/ready-reader ]; do sleep .02; done"
ASK = """for name in reader writer; do
touch /tmp/ask-$name; until [ -e /tmp/told-$name ]; do sleep .02; done; cat /tmp/told-$name; rm /tmp/told-$name
done"""
REFUSED = {
    "semaphores": ("ipcmk -S 1; sleep 1000 &", "semaphores"),
    "message queues": ("ipcmk -Q; sleep 1000 &", "message queues"),
    "a removed segment": ("libc.shmctl(number, 0, None)", "removed"),
    "a locked segment": ("libc.shmctl(number, 11, None)", "locked"),
    "a part of a segment": ("libc.munmap(at, mmap.PAGESIZE)", "a part of"),
    "more segments than are shown": ("[libc.shmget(0, 1, 0o1600) for _ in range(30)]", "or more exist"),
}
SETTINGS = tuple(
    f"/proc/sys/{name}" for name in ("kernel/sem", "kernel/shmmax", "kernel/shm_next_id", "kernel/core_pattern")
)

pytestmark = pytest.mark.usefixtures("_criu")


@pytest.fixture(scope="module")
def _criu() -> None:
    require_criu()


def spec(program: str) -> EnvironmentSpec:
    return EnvironmentSpec(files={"/tmp/program": program})


@pytest.mark.parametrize("program", [SEGMENT, ANONYMOUS], ids=["System V", "anonymous"])
def test_shared_memory_comes_back_again_and_again(data_dir: Path, program: str) -> None:
    """Each restored sandbox has its own, which its processes share; and it can be frozen too."""

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec(program))
        await run(sandbox, BEGIN)
        frozen = await sandbox.freeze()
        for _ in range(2):
            back = await driver.restore(spec(program), frozen)
            assert (await run(back, ASK)).out == "firstfirst"
            again = await driver.restore(spec(program), await back.freeze())
            assert (await run(again, ASK)).out == "againagain"
        assert (await run(sandbox, ASK)).out == "firstfirst"

    driven(data_dir, test)


def test_segment_has_its_name_owner_and_rights(data_dir: Path) -> None:
    """Also one that no process is attached to."""
    make = "setpriv --reuid 1234 --regid 4321 --clear-groups python3 -c 'import ctypes; "
    make += "ctypes.CDLL(None).shmget(7, 5000, 0o1640)'; ipcmk -M 100; ipcmk -M 100; ipcrm -m 1; sleep 1000 &"
    look = "awk 'NR > 1 { print $1, $2, $3, $4, $7, $8, $9 }' /proc/sysvipc/shm"

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec())
        await run(sandbox, make)
        before = (await run(sandbox, look)).out
        assert before.startswith("7 0 640 5000 0 1234 4321\n")
        back = await driver.restore(EnvironmentSpec(), await sandbox.freeze())
        assert (await run(back, look)).out == before

    driven(data_dir, test)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_lost_is_refused(data_dir: Path, what: str) -> None:
    command, reason = REFUSED[what]
    if not command.startswith("ipcmk"):
        line = "ctypes.memmove(at + mmap.PAGESIZE"
        program, command = SEGMENT.replace(line, f"{command}\n{line}"), BEGIN
    else:
        program = SEGMENT

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec(program))
        await run(sandbox, command)
        with pytest.raises(NotFreezableError, match=reason):
            await sandbox.freeze()
        assert (await run(sandbox, "pgrep -c 'sleep|python3'")).out != "0\n"

    driven(data_dir, test)


def test_restored_sandbox_has_one_ipc_namespace(data_dir: Path) -> None:
    """Calls of all kinds see the segments and the message queues of the restored processes."""
    queue = 'python3 -c \'import ctypes; assert ctypes.CDLL("librt.so.1").mq_open(b"/q", 0o102, 0o600, None) >= 0\''

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec(SEGMENT))
        await run(sandbox, BEGIN)
        back = await driver.restore(spec(SEGMENT), await sandbox.freeze())
        count = "grep -c 4711 /proc/sysvipc/shm"
        assert (await run(back, count)).out == "1\n"
        assert (await run(back, count, session="other")).out == "1\n"
        assert (await ran(back, "bash", "-c", count, cwd="/")).out == b"1\n"
        answer = await run(back, f"{queue}; ls /dev/mqueue")
        assert answer.out == "q\n"
        with pytest.raises(NotFreezableError, match="queues"):
            await back.freeze()
        listed = await back.execute(ToolCall("shell", "get", {"path": "/dev/mqueue"}))
        assert b'"q"' in listed.result.body

    driven(data_dir, test)


def test_settings_of_the_kernel_stay_read_only(data_dir: Path) -> None:
    """A restored process finds none that it can write to, although CRIU has made a namespace that has some."""
    tries = f"for file in {' '.join(SETTINGS)}; do echo 1 2>/dev/null > $file && echo $file; done; true"
    mounts = "awk '{ print $5, $6 }' /proc/self/mountinfo | sort"
    # A process that runs on at once, and tries all the time.
    attempts = f"""import threading
def attempt():
    while True:
        for path in {SETTINGS!r}:
            try:
                open(path, "w")
            except OSError:
                continue
            open("/tmp/opened", "a").write(path)
threading.Thread(target=attempt, daemon=True).start()
"""
    program = SEGMENT.replace('answer("reader"', f'{attempts}answer("reader"')

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec(program))
        await run(sandbox, BEGIN)
        frozen = await sandbox.freeze()
        before = (await run(sandbox, mounts)).out
        for _ in range(3):
            back = await driver.restore(spec(program), frozen)
            assert (await run(back, f"{ASK} >/dev/null; {tries}; cat /tmp/opened; {mounts}")).out == before

    driven(data_dir, test)


def test_postgresql_goes_on(data_dir: Path) -> None:
    """A server that a command has started is restored twice, takes writes, and can be frozen again."""
    programs = server_programs()
    if shutil.which("cc") is None:
        pytest.skip("lets the server run as root, which needs a C compiler")
    # The server refuses root. CRIU needs a right of its own for processes of other users, which machines may lack, so
    # the server is root and is told something else.
    start = f"""cd /tmp; echo 'int geteuid(void) {{ return 1234; }} int getuid(void) {{ return 1234; }}' > user.c
cc -shared -fPIC -o user.so user.c; echo pg:x:1234:1234::/tmp:/bin/sh >> /etc/passwd; export LD_PRELOAD=/tmp/user.so
mkdir -m 700 data; chown 1234 data; {programs}/initdb -D data -A trust -N -U pg >log 2>&1; chown -R 1234 data
{programs}/pg_ctl -D data -o '-k /tmp -h ""' -l log -w start >/dev/null; unset LD_PRELOAD"""
    sql = f"{programs}/psql -h /tmp -U pg -d postgres -qAtc"

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(EnvironmentSpec())
        begun = await run(sandbox, f"{start}; {sql} 'CREATE TABLE t (a int); INSERT INTO t VALUES (1)'", timeout_s=120)
        assert begun.code == 0, begun.err + (await run(sandbox, "cat /tmp/log")).out
        assert (await run(sandbox, "tail -n +2 /proc/sysvipc/shm | wc -l")).out == "1\n"
        frozen = await sandbox.freeze()
        for number in (2, 3):
            back = await driver.restore(EnvironmentSpec(), frozen)
            inserted = await run(back, f"{sql} 'INSERT INTO t VALUES ({number}); SELECT * FROM t'")
            assert (inserted.out, inserted.err) == (f"1\n{number}\n", "")
            again = await driver.restore(EnvironmentSpec(), await back.freeze())
            assert (await run(again, f"{sql} 'SELECT * FROM t'")).out == f"1\n{number}\n"
            stopped = await run(
                again, f"LD_PRELOAD=/tmp/user.so {programs}/pg_ctl -D /tmp/data -m fast stop", timeout_s=60
            )
            assert stopped.code == 0, stopped.err
            # It has removed its segment, as it found it.
            assert (await run(again, "tail -n +2 /proc/sysvipc/shm")).out == ""
        assert (await run(sandbox, f"{sql} 'SELECT * FROM t'")).out == "1\n"

    driven(data_dir, test)
