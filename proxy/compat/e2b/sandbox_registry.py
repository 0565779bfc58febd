"""E2B's sandboxes: which rollouts they are, what is stored about them, and when they end.

A sandbox is a rollout, and its ID is the rollout's name. Its `SandboxNote` is read from the store when a task is first
used, and written on every change. A sandbox ends by a request, or by its timeout, which a timer or a request notices.
"""

import time
from dataclasses import replace
from typing import NamedTuple

from proxy.compat.e2b.lifetimes import Lifetimes
from proxy.compat.e2b.processes import Processes
from proxy.compat.e2b.sandbox_note import SandboxNote
from proxy.compat.endpoints import EndpointContext
from proxy.refusals import RefusalError
from proxy.tree.rollout import Rollout

_PROTOCOL = "e2b"


class RunningSandbox(NamedTuple):
    """A sandbox that has not ended; it may be paused. The note is what is stored about it."""

    rollout: Rollout
    note: SandboxNote


class SandboxRegistry:
    """The sandboxes of all tasks: finds, stores, pauses, resumes and ends them."""

    def __init__(self, context: EndpointContext, processes: Processes) -> None:
        self._context, self._processes = context, processes
        self._lifetimes = Lifetimes(self._end_if_over)
        context.lifecycle.before_close.append(self._lifetimes.aclose)
        context.lifecycle.at_drop.append(self.forget)
        context.tasks.rollouts.at_end.append(self._ended)
        self._notes: dict[int, SandboxNote] = {}
        self._read_tasks: set[str] = set()

    async def find(self, task: str, name: str) -> RunningSandbox | None:
        """Return a sandbox; None if it does not exist or has ended."""
        tasks = self._context.tasks
        rollout = tasks.rollouts.running.get((task, name)) or await tasks.running(task, name)
        if rollout is None:
            return None
        note = self.note(rollout)
        if note.is_over(time.time()):
            if not note.pauses:
                # Ending it waits for the call under way, so a timer does it. For clients it has ended already.
                self._lifetimes.watch(rollout, note)
                return None
            self.pause(RunningSandbox(rollout, note))
        return RunningSandbox(rollout, self._notes[rollout.id])

    def awake(self, rollout: Rollout) -> SandboxNote | None:
        """Return what is stored about a sandbox that takes calls now; None if it has to be looked at by `find`."""
        note = self._notes.get(rollout.id)
        return None if note is None or note.paused or note.is_over(time.time()) else note

    async def require(self, task: str, name: str) -> RunningSandbox:
        """Return a sandbox. Raises RefusalError (404) if it does not exist or has ended."""
        sandbox = await self.find(task, name)
        if sandbox is None:
            raise RefusalError(404, "no-such-sandbox", f"sandbox {name!r} was not found")
        return sandbox

    def note(self, rollout: Rollout) -> SandboxNote:
        """Return what is stored about a rollout's sandbox."""
        now = time.time()
        if rollout.task not in self._read_tasks:
            for name, text in self._context.store.notes.of_task(rollout.task, _PROTOCOL).items():
                noted = self._context.tasks.rollouts.running.get((rollout.task, name))
                if noted is not None:
                    self._notes[noted.id] = SandboxNote.decode(text, now)
                    self._lifetimes.watch(noted, self._notes[noted.id])
            # One query reads the notes of all rollouts of a task.
            self._read_tasks.add(rollout.task)
        # Rollouts started through another protocol are visible as sandboxes as well.
        return self._notes.setdefault(rollout.id, SandboxNote.new(now))

    def write(self, rollout: Rollout, note: SandboxNote) -> None:
        """Store what is known about a sandbox, and set its timer accordingly."""
        self._notes[rollout.id] = note
        self._lifetimes.watch(rollout, note)
        self._context.tasks.rollouts.note(rollout, _PROTOCOL, note.encode())

    def pause(self, sandbox: RunningSandbox) -> None:
        """Pause a sandbox and end its streams. The state stays in the tree; nothing else needs to be kept."""
        rollout, note = sandbox
        self.write(rollout, replace(note, paused=True))
        self._processes.end(rollout, f"the sandbox {rollout.name!r} was paused")

    def resume_on_request(self, sandbox: RunningSandbox) -> RunningSandbox:
        """Resume a paused sandbox that was created to resume on requests; return any other as it is."""
        rollout, note = sandbox
        if note.paused and note.resumes:
            note = replace(note, paused=False, ends_at=time.time() + note.timeout_s)
            self.write(rollout, note)
        return RunningSandbox(rollout, note)

    def forget(self, task: str) -> None:
        """Forget a task that another proxy may change from now on; it is read again when it is used."""
        self._read_tasks.discard(task)
        for (owner, _), rollout in self._context.tasks.rollouts.running.items():
            if owner == task and self._notes.pop(rollout.id, None) is not None:
                self._lifetimes.forget(rollout)
                self._processes.end(rollout, "another proxy serves it now")

    async def end(self, rollout: Rollout, reason: str) -> None:
        """End a rollout's sandbox with its running command, which is detached. Open streams get the reason."""
        # The call under way would otherwise keep the turn until its command ends.
        self._context.step.detach(rollout)
        await self._context.tasks.rollouts.finish_in_turn(rollout)
        self._processes.end(rollout, f"the sandbox {rollout.name!r} has ended: {reason}")

    def _ended(self, rollout: Rollout) -> None:
        """Forget the note and the timer of a rollout, whatever has ended it."""
        self._lifetimes.forget(rollout)
        self._notes.pop(rollout.id, None)

    async def _end_if_over(self, rollout: Rollout) -> None:
        note = self._notes.get(rollout.id)
        if note is None or rollout.finished:
            return
        if not note.is_over(time.time()):
            # Extended meanwhile, or later than the longest timer.
            self._lifetimes.watch(rollout, note)
        elif note.pauses:
            self.pause(RunningSandbox(rollout, note))
        else:
            await self.end(rollout, "its time is over")
