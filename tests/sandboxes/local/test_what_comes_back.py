"""What processes have set is the same after a restore, or they are not dumped: a checkpoint never changes them."""

import ast
import shlex
import shutil
from pathlib import Path

import pytest

from sandboxes.errors import NotFreezableError
from sandboxes.local.driver import LocalDriver
from sandboxes.spec import EnvironmentSpec, Limits
from tests.machine import require_criu
from tests.sandboxes.box import run, with_local
from tests.sandboxes.local import settings_probe

PROBE = Path(settings_probe.__file__).read_text()
SPEC = EnvironmentSpec(files={"/root/probe.py": PROBE})
REASONS = {
    "multicast_groups": "a socket has joined a multicast group",
    "urgent_bytes": "has not read urgent data",
    "semaphore": "semaphore",
    "file_that_is_watched_twice": "watches one file twice",
    "connection_that_nobody_accepted": "nobody has accepted it yet",
    "connection_without_its_other_end": "the other end of a connection",
    "connection_that_has_ended": "a connection that has ended",
    "error_that_waits": "an error waits in a socket",
    "bytes_that_wait_to_be_sent": "more than the other end of a connection can take",
    "unix_connection_without_its_listener": "has connected to is closed",
    "unix_connection_of_a_client_with_a_name": "it has two names",
    "unix_datagrams_to_nobody": "has connected to is closed",
    "program_without_a_file": "a program that has no file",
    "code_above_127": "has ended with code 137",
    "watch_with_options": "a watch with options",
    "signalled_changes": "whose changes are signalled",
    "terminal_without_its_other_end": "a terminal whose other end is closed",
    "stopped_output": "is stopped or full",
    "terminal_of_its_holders": "is for its holders only",
    "echoed_input": "input waits at the terminal",
    "much_input": "more input waits",
    "much_output": "more output waits",
    "cpus_of_a_thread": "CPUs",
    "personality": "personality",
    "file_without_a_name": "may still get a name",
    "events_that_wait": "unread events",
    "line_that_is_being_typed": "input waits at the terminal",
    "line_that_was_not_read": "input waits at the terminal",
}
READ = {
    "line_that_is_being_typed": b"half line\n", "line_that_was_not_read": (b"whole\n", b"half line\n"),
    "connection_without_its_other_end": "127.0.0.1", "error_that_waits": 104, "bytes_that_wait_to_be_sent": True,
    "unix_connection_without_its_listener": "server", "code_above_127": 137,
    "signalled_changes": True, "terminal_without_its_other_end": 5,
    "echoed_input": [b"typed", b"typed"], "much_input": 4095, "much_output": 4095,
}  # fmt: skip
"""What the process reads in the end, though it was not dumped."""

pytestmark = pytest.mark.usefixtures("_criu")


@pytest.fixture(scope="module")
def _criu() -> None:
    require_criu()


def begun(names: list[str]) -> str:
    ready = " ".join(f"{name}/ready" for name in names)
    starts = "".join(f"python3 probe.py {name} > {name}.log 2>&1 & " for name in names)
    return f"{starts} for i in {{1..200}}; do ls {ready} >/dev/null 2>&1 && break; sleep .05; done; cat *.log"


def asked(names: list[str]) -> str:
    answers = " ".join(f"{name}/answer" for name in names)
    asks = f"rm -f {answers}; touch " + " ".join(f"{name}/ask" for name in names)
    wait = f"for i in {{1..200}}; do ls {answers} >/dev/null 2>&1 && break; sleep .05; done; cat *.log"
    return f"{asks}; {wait}; for n in {' '.join(names)}; do echo $n $(cat $n/answer); done"


def test_what_was_set_comes_back(data_dir: Path) -> None:
    """Each process is asked by itself, in a twin of the same checkpoint, and after a checkpoint of that twin."""
    names = list(settings_probe.PROBES)

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        assert (await run(sandbox, begun(names))).out == ""
        frozen = await sandbox.freeze()
        assert frozen.kind == "processes"
        live = (await run(sandbox, asked(names), timeout_s=60)).out.splitlines()
        assert [line.split()[0] for line in live] == names
        twin = await driver.restore(SPEC, frozen)
        again = await driver.restore(SPEC, await twin.freeze())
        for box in (twin, again):
            said = (await run(box, asked(names), timeout_s=60)).out.splitlines()
            assert [pair for pair in zip(live, said, strict=True) if pair[0] != pair[1]] == []

    with_local(data_dir, test)


def test_the_cpus_that_a_sandbox_was_given_are_no_change(data_dir: Path) -> None:
    """Which ones these are is chance, so a restored sandbox may have others."""
    spec = EnvironmentSpec(limits=Limits(cpus=1))

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        await run(sandbox, "sleep 1000 &")
        back = await driver.restore(spec, await sandbox.freeze())
        given = await run(back, "taskset -pc $$ | cut -d: -f2; taskset -pc $! | cut -d: -f2")
        assert len(set(given.out.split())) == 1

    with_local(data_dir, test)


def test_what_would_be_lost_is_not_dumped(data_dir: Path) -> None:
    """The process goes on as if nobody had looked."""
    assert REASONS.keys() == settings_probe.LOST.keys()

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(SPEC)
        for name, reason in REASONS.items():
            assert (await run(sandbox, begun([name]))).out == ""
            with pytest.raises(NotFreezableError, match=reason):
                pytest.fail(f"{name} was dumped: {await sandbox.freeze()}")
            said = (await run(sandbox, asked([name]))).out.split(None, 1)[1]
            if name in READ:
                assert ast.literal_eval(said) == READ[name]
            await run(sandbox, "kill %1; wait; rm -rf *.log")
        await sandbox.freeze()

    with_local(data_dir, test)


WORK = {
    "node": """
const fs = require('fs'), cp = require('child_process'), http = require('http')
const { Worker } = require('worker_threads')
const server = http.createServer((q, r) => r.end(q.url)).listen(0, '127.0.0.1')
function compiled(k) {
  const head = [0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 127, 3, 2, 1, 0, 7, 5, 1, 1, 102, 0, 0]
  const code = Uint8Array.from([...head, 10, 6, 1, 4, 0, 65, k, 11])
  return new WebAssembly.Instance(new WebAssembly.Module(code)).exports.f()
}
async function work(n) {
  const page = await (await fetch(`http://127.0.0.1:${server.address().port}/${n}`)).text()
  const child = cp.execFileSync('echo', ['child', n]).toString().trim()
  const text = `require('worker_threads').parentPort.postMessage(${n} * 3)`
  const thread = await new Promise((y, x) => new Worker(text, { eval: true }).on('message', y).on('error', x))
  await new Promise((y) => setTimeout(y, 20))
  return [page, child, thread, new Function('a', `return a * ${n}`)(2), compiled(n)].join(' ')
}
let n = 1
setInterval(async () => {
  if (!fs.existsSync('ask.' + n)) return
  const k = n++
  fs.writeFileSync('said.' + k, await work(k).catch((e) => e.stack) + '\\n')
  fs.renameSync('said.' + k, 'answer.' + k)
}, 10)
""",
    "java": """
import java.io.*; import java.net.*; import java.nio.file.*; import java.util.concurrent.*; import java.util.function.*;
public class Main {
  static String work(int n) throws Exception {
    try (ServerSocket server = new ServerSocket(0, 5, InetAddress.getLoopbackAddress())) {
      Future<String> page = CompletableFuture.supplyAsync(() -> {
        try (Socket c = server.accept(); Reader in = new InputStreamReader(c.getInputStream())) {
          return new BufferedReader(in).readLine(); }
        catch (IOException e) { throw new UncheckedIOException(e); } });
      try (Socket c = new Socket(server.getInetAddress(), server.getLocalPort())) {
        c.getOutputStream().write(("/" + n + "\\n").getBytes()); }
      Process child = new ProcessBuilder("echo", "child", "" + n).start();
      String said = new String(child.getInputStream().readAllBytes()).trim();
      Object made = java.lang.reflect.Proxy.newProxyInstance(
        Main.class.getClassLoader(), new Class<?>[]{Supplier.class}, (o, m, a) -> n * 5);
      long sum = 0; for (int i = 0; i < 3000000; i++) sum = sum * 31 + i * n;
      System.gc();
      return page.get() + " " + said + " " + ((Supplier<?>) made).get() + " " + sum;
    } }
  public static void main(String[] a) throws Exception {
    for (int n = 1;; Thread.sleep(10)) if (Files.exists(Path.of("ask." + n))) {
      String said; try { said = work(n); } catch (Throwable e) { said = "" + e; }
      Files.writeString(Path.of("said." + n), said + "\\n");
      Files.move(Path.of("said." + n), Path.of("answer." + n)); n++; } } }
""",
}
"""Programs that do some work of many kinds at each request: compile, start threads and children, connect, wait."""
FILES = {"node": "work.js", "java": "Main.java"}


@pytest.mark.parametrize("name", WORK)
def test_runtimes_work_again_after_a_restore(data_dir: Path, name: str) -> None:
    """Each step is new work: what a runtime has compiled before would hide what it cannot do any more."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    spec = EnvironmentSpec(files={f"/root/{FILES[name]}": WORK[name]}, limits=Limits(memory_mb=4096, pids=500))
    start = f"{name} {shlex.quote(FILES[name])} > log 2>&1 &"

    def step(number: int) -> str:
        wait = f"for i in {{1..500}}; do [ -e answer.{number} ] && break; sleep .05; done"
        return f"touch ask.{number}; {wait}; cat answer.{number} log"

    async def test(driver: LocalDriver) -> None:
        sandbox = await driver.start(spec)
        first = (await run(sandbox, f"{start} {step(1)}", timeout_s=60)).out
        assert first.startswith("/1 child 1 "), first
        frozen = await sandbox.freeze()
        live = [(await run(sandbox, step(number), timeout_s=60)).out for number in (2, 3)]
        assert [answer.split()[0] for answer in live] == ["/2", "/3"]
        twin = await driver.restore(spec, frozen)
        assert [(await run(twin, step(2), timeout_s=60)).out] == live[:1]
        for box in (await driver.restore(spec, frozen), await driver.restore(spec, await twin.freeze())):
            done = [(await run(box, step(number), timeout_s=60)).out for number in (2, 3)]
            assert done[-1] == live[-1]

    with_local(data_dir, test)
