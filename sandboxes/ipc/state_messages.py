"""Messages that start, freeze and restore a sandbox.

A checkpoint is the record that `guest.checkpoints.restore` makes of running processes. It is part of a snapshot on
disk, so its members are a disk format: they are carried here as plain JSON.
"""

from typing import TYPE_CHECKING, Any, Literal

from sandboxes.ipc.codec import IpcMessage, IpcRecord, IpcRequest, plain_json
from sandboxes.ipc.launch_messages import ServiceMounts
from sandboxes.ipc.messages import ReportedSession, StateSummary
from sandboxes.shell_text import ShellSession

Checkpoint = dict[str, Any]
"""What the supervisor has to know to take restored processes over; part of a snapshot."""

if TYPE_CHECKING:
    ReportedCheckpoint = dict[str, Any]
else:
    ReportedCheckpoint = dict[str, plain_json(6)]
"""A checkpoint as a supervisor reports it: sessions are members of its shells."""


# No error: the sandbox goes on unfrozen.
class NotFreezable(IpcMessage, op="not_freezable"):
    """The state cannot be frozen, for this reason."""

    reason: str


# The answer to the first half of a freeze: the proxy runs CRIU on this tree before it asks for the files.
class ProcessTree(IpcMessage, op="process_tree"):
    """Processes run, and CRIU can dump them: they are the tree below this process, by its number in the sandbox."""

    pid: int
    has_segments: bool = False  # Whether System V shared memory exists, which CRIU dumps with its namespace.


# -- pid 1 of a local sandbox ----------------------------------------------------------------------------------------


# Unasked: a pid 1 is forked ahead of its use and waits as a spare.
class Ready(IpcMessage, op="ready"):
    """Pid 1 has its namespaces and waits for `StartSandbox`."""


class SandboxStarted(IpcMessage, op="sandbox_started", descriptors=(1, 2)):
    """The sandbox runs; its mount namespace accompanies this message, and with egress its listening socket."""

    shell_error: str | None  # Why its main shell does not start; None if it does.
    state: StateSummary  # The digests of the state that it begins with.
    pristine: ReportedSession | None  # A new shell's session; None if none was started.


# Asked once for each launcher, because all its forks have the same things at the same addresses.
class PagesListed(IpcMessage, op="pages_listed"):
    """The pages of memory that pid 1 shares with no other process: of each run the first and the number."""

    runs: list[list[int]]


class ListPages(IpcRequest[PagesListed], op="list_pages"):
    """List the pages of memory that are not shared."""


# The second half is `FinishRestore`, because CRIU runs between the two under the proxy's control.
class RestoreStarted(IpcMessage, op="restore_started"):
    """CRIU was started, and the proxy may tell it to restore."""


Links = Literal["", "regular", "other"]
"""What kind of hard links a layer has: none, such as stay links over it, or others."""


# One descriptor is the complete table of the state's rows; a restore from a checkpoint adds `ns_last_pid` and CRIU's
# files. The body is the tables of the layers above that one. The mounts come from the launcher (`Mounted`).
class StartSandbox(IpcRequest[SandboxStarted | RestoreStarted], op="start_sandbox", descriptors=(1, 6)):
    """Become a sandbox."""

    binds: list[str]  # Directories of the host that are visible in the sandbox, read-only.
    hidden: list[str]  # Paths below them that are not.
    disk_bytes: int  # How much the sandbox may write.
    # Limits of each process where no control group exists; otherwise None, and the group limits all of them.
    memory_bytes: int | None  # A limit of each process's address space; None where a control group limits memory.
    pids: int | None  # A limit of the number of processes; None where a control group limits them.
    environment: dict[str, str]
    workdir: str
    output_bytes: int  # How much of each stream of a command is recorded.
    tail_bytes: int  # How much of that are the last bytes of a longer one.
    below_bytes: int  # What the sandbox has written into layers already.
    born_ns: int  # When the root state was made, on the clock of file times.
    reserve_bytes: int  # With less free disk than this, failures are the machine's.
    seals: bool  # Whether what a call wrote becomes a layer after each call.
    keeps_links: bool  # Whether hard links of regular files stay links over frozen layers.
    regular_below: bool  # Whether only regular files have several names in the base, as far as is known.
    linked_below: bool  # Whether the layers have hard links.
    linked_root: bool  # Whether those of the root state have some.
    sessions: dict[str, ShellSession]  # The shell sessions of the state that it begins with, by name.
    pristine: ShellSession | None  # A new shell's session, if it is known.
    # Plain JSON here: its members are a disk format and outlive this version of the vocabulary.
    checkpoint: Checkpoint | None  # The running processes to restore; None for none.
    keeps_locks: bool  # Whether a restore sets record locks on mapped files again (`guest.checkpoints.mapped_locks`).
    criu_arguments: list[str]  # CRIU's arguments; empty without a checkpoint.
    egress: bool  # Whether to make the listening socket of its egress.
    cpus: int | None  # How many CPUs its processes may run on; None for all.
    hostname: str
    user: str  # The user of its sessions, as an image names it; empty for root.
    services: ServiceMounts


class FinishRestore(IpcRequest[SandboxStarted], op="restored"):
    """CRIU has restored the processes and ended."""


# A record and no message. The two digests of `guest.files.manifest`.
class LayerManifest(IpcRecord):
    """The digests by which damage of a layer is noticed later."""

    stats: bytes  # A digest of names, modes, sizes and times.
    contents: bytes  # A digest of contents.


# The answer to `Pause` without processes, and to `InspectHeld` while CRIU holds them. The body is the table of the rows
# that the upper layer changes.
class LayerState(IpcMessage, op="layer_state"):
    """The state of a sandbox whose upper layer can be frozen now."""

    sessions: dict[str, ReportedSession]  # The shell sessions that differ from a new one, by name.
    pristine: ReportedSession | None  # A new shell's session; None if none was started yet.
    manifest: LayerManifest
    differing: list[str]  # Which of the paths of `InspectHeld` differ from the root state.
    size_bytes: int  # The bytes on disk of the upper layer.
    empty: bool  # Whether nothing was written into the upper layer.
    links: Links  # Whether some of its paths are hard links to one file: `other` if these would break over it.
    state: StateSummary
    checkpoint: ReportedCheckpoint | None  # What must be known of the running processes; None if none run.


class Pause(IpcRequest[NotFreezable | ProcessTree | LayerState], op="pause"):
    """Get ready to be frozen, perhaps as a root state, in which hard links may break, and perhaps without CRIU."""

    root: bool
    checkpoint: bool


# Files and processes are of the same moment, because neither can change meanwhile.
class InspectHeld(IpcRequest[NotFreezable | LayerState], op="inspect_held"):
    """Report the state while CRIU holds all processes still, and which of some paths differ from the root state."""

    paths: list[str]


# The descriptors (the new upper directory, what is below, and the table of rows) replace those of `Mounted` and
# `StartSandbox`, which still lead to the old layers. The launcher sends it.
class LayersSwitched(IpcMessage, op="layers_switched", descriptors=(3, 3)):
    """The sandbox has a fresh upper layer."""

    added_bytes: int  # The bytes of the layer that the old upper became; 0 if it was thrown away.
    linked_below: bool  # Whether the layers below have hard links.
