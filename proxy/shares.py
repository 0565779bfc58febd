"""Which of several worker processes of one proxy has a task (pure)."""

from dataclasses import dataclass
from hashlib import blake2b

from proxy.refusals import RefusalError


@dataclass(frozen=True, slots=True)
class Share:
    """The tasks of worker `number`, from 0, of so many. Data is divided by this rule, so it must never change."""

    number: int
    of: int

    def worker_of(self, name: str) -> int:
        """Return the worker that has a task, or a rollout's token. 1 us."""
        return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") % self.of

    def has(self, name: str) -> bool:
        """Return whether this worker has a task, or a rollout's token."""
        return self.worker_of(name) == self.number

    def require(self, task: str) -> None:
        """Raise RefusalError (421) if another worker has a task, behind one of ours in the same connection."""
        if not self.has(task):
            raise RefusalError(
                421, "other-worker",
                f"another worker of this proxy has task {task!r}. Name the task in the URL or in X-Forkpoint-Task, and "
                "send no request before the one before it is answered.",
            )  # fmt: skip
