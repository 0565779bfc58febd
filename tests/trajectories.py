"""Trajectories of shell commands with a model that predicts every answer. Pure.

A task's seed and a sequence of choices determine a trajectory. Equal choices give equal calls, so rollouts share their
common choices and diverge at the first difference.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

WORK = "/work"
SETUP = (f"echo seed > {WORK}/log",)
"""Commands that set up the model's first state in the workdir `WORK`."""
_SERVER = 'from itertools import count; [open("a", "w").write(f"{n}\\n") for n in count(1) if open("q").read()]'
"""A server that counts in memory: a line to pipe q requests the next number from pipe a."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A call and its predicted answer."""

    command: str
    out: str = ""
    code: int = 0


@dataclass
class Model:
    """The predicted state of a sandbox: files by path (None for a directory), a shell, and at most one job."""

    files: dict[str, str | None] = field(default_factory=lambda: {WORK: None, f"{WORK}/log": "seed\n"})
    cwd: str = WORK
    x: str = ""
    function: bool = False
    job: str = ""
    requests: int = 0

    def actions(self) -> list[Callable[[str], Turn]]:
        """Return the possible next actions; each takes a text."""
        actions = [self.append, self.read, self.assign, self.look, self.move, self.remove, self.list, self.define]
        actions += [self.call] if self.function else []
        if not self.job:
            return [*actions, self.sleep, self.serve]
        return [*actions, self.jobs, self.end] + [self.count, self.count] * (self.job == "server")

    def append(self, word: str) -> Turn:
        self.files[self._log] = (self.files.get(self._log) or "") + f"{word}\n"
        return Turn(f"echo {word} >> log")

    def read(self, _word: str) -> Turn:
        content = self.files.get(self._log)
        return Turn("cat log 2> /dev/null", content or "", 0 if content is not None else 1)

    def assign(self, word: str) -> Turn:
        self.x = word
        return Turn(f"X={word}")

    def look(self, _word: str) -> Turn:
        return Turn('echo "$X in $PWD"', f"{self.x} in {self.cwd}\n")

    def move(self, _word: str) -> Turn:
        if self.cwd.count("/") > 2:
            self.cwd = self.cwd.rpartition("/")[0]
            return Turn("cd ..; pwd", f"{self.cwd}\n")
        self.cwd += "/d"
        self.files[self.cwd] = None
        return Turn("mkdir -p d; cd d")

    def remove(self, _word: str) -> Turn:
        self.files.pop(self._log, None)
        return Turn("rm -f log")

    def list(self, _word: str) -> Turn:
        return Turn(f"find {WORK} | sort", "".join(f"{path}\n" for path in sorted(self.files)))

    def define(self, word: str) -> Turn:
        self.function = True
        return Turn(f'f() {{ echo "$1 $X"; }}; f {word}', f"{word} {self.x}\n")

    def call(self, word: str) -> Turn:
        return Turn(f"f {word}", f"{word} {self.x}\n")

    def sleep(self, _word: str) -> Turn:
        self.job = "sleep"
        return Turn("sleep 1000 > /dev/null 2>&1 &")

    def serve(self, _word: str) -> Turn:
        self.job, self.requests = "server", 0
        self.files |= {f"{WORK}/q": None, f"{WORK}/a": None}
        return Turn(f"(cd {WORK}; mkfifo q a; exec python3 -c '{_SERVER}') > /dev/null 2>&1 & "
                    f"until [ -p {WORK}/a ]; do sleep 0.01; done")  # fmt: skip

    def count(self, _word: str) -> Turn:
        self.requests += 1
        return Turn(f"echo > {WORK}/q; cat {WORK}/a", f"{self.requests}\n")

    def jobs(self, _word: str) -> Turn:
        return Turn("jobs -r | wc -l", "1\n")

    def end(self, _word: str) -> Turn:
        self.job = ""
        for name in "qa":
            self.files.pop(f"{WORK}/{name}", None)
        return Turn(f"{{ kill %1; wait %1; }} 2> /dev/null; echo $?; rm -f {WORK}/q {WORK}/a", "143\n")

    @property
    def _log(self) -> str:
        return f"{self.cwd}/log"


def trajectory(seed: int, choices: Sequence[int]) -> Iterator[Turn]:
    """Yield the calls that choices lead to, one for each, and their answers."""
    model = Model()
    for depth in range(len(choices)):
        dice = random.Random(f"{seed}:{','.join(map(str, choices[: depth + 1]))}")  # noqa: S311 - dice of a test
        yield dice.choice(model.actions())(f"w{dice.randrange(100)}")


def choices(seed: int, length: int) -> tuple[int, ...]:
    """Return what a rollout chooses: mostly what the others do."""
    dice = random.Random(seed)  # noqa: S311
    return tuple(dice.choices((0, 1, 2), weights=(8, 1, 1), k=length))
