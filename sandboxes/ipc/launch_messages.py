"""Messages to the launcher, which forks pid 1s, mounts layers and starts CRIU."""

from sandboxes.ipc.codec import IpcMessage, IpcRecord, IpcRequest
from sandboxes.ipc.messages import Done


class ForkServerReady(IpcMessage, op="fork_server_ready"):
    """A fork server has what it needs and waits for requests."""

    confined: bool = False  # Whether files outside its directory are out of its reach; see `workers.zygote`.


class Forked(IpcMessage, op="forked", descriptors=(0, 1)):
    """The process was forked; its descriptor accompanies this message."""


# The socket is made by the proxy, so the new pid 1 needs no name by which it could be reached.
class ForkSandbox(IpcRequest[Forked], op="fork", descriptors=(2, 2)):
    """Fork a pid 1, which serves on the first socket, and hears on the second one that its layers were switched."""

    # A process that writes 0 there moves itself, before it starts anything else.
    cgroups: list[str]  # Files of control groups that it joins by writing 0 to them.
    shell_files: str  # The directory of `shell_files.copies`; empty for none.


# Once for each launcher: with each fork it would cost as much as a part of what it saves.
class WritePages(IpcRequest[Done], op="write_pages"):
    """Give each pid 1 forked from now on these pages before it is needed; see `fork_pages` and `PagesListed`."""

    runs: list[list[int]]


class LayerStack(IpcRecord):
    """The layers of an overlay mount."""

    lowers: list[str]  # The directories below, the topmost first.
    upper: str  # The directory that takes what is written.
    work: str  # The work directory that overlayfs needs beside it.
    # The lower directories of the root state, to be shown as well; None if they are not needed.
    root: list[str] | None = None
    links: bool = False  # Whether hard links of the directories below stay links when one of their names is written.


class ServiceMounts(IpcRecord):
    """The mounts of side services, which every change of layers makes anew."""

    roots: list[str]  # The directories that are roots of services, as absolute paths of the sandbox.
    shared: list[list[str]]  # Directories that a second path leads to: of each the directory and that path.


# Descriptors and not paths: a detached mount has no path.
class Mounted(IpcMessage, op="mounted", descriptors=(2, 5)):
    """The layers are mounted: the overlay, the upper and the lower directories, and with `root` the root state."""


# The launcher answers to pid 1 and not to the proxy, here and for `SwitchLayers`: that saves a round trip.
class MountLayers(IpcMessage, op="mount", descriptors=(1, 1)):
    """Make a detached overlay mount for a spare sandbox, and give it to its pid 1: `Mounted`, or `Failed`."""

    stack: LayerStack


class LinksTried(IpcMessage, op="links_tried"):
    """Why the kernel keeps no index of some layers; empty if it does. `final` says that it never will over these."""

    refusal: str
    final: bool


# Asked once for each base: the kernel tells only by a mount that was made.
class TryLinks(IpcRequest[LinksTried], op="try_links"):
    """Mount a stack with `links`, and let it go."""

    stack: LayerStack


# The sandbox's mount namespace, pid 1's second socket, and the table of rows. The namespace crosses as a descriptor,
# because a number could belong to another process by then.
class SwitchLayers(IpcMessage, op="switch", descriptors=(3, 3)):
    """Put a sandbox on other layers, and tell its pid 1 with `LayersSwitched`, or with `Failed`."""

    stack: LayerStack
    binds: list[str]  # Directories of the host that are visible in the sandbox, read-only.
    services: ServiceMounts
    added_bytes: int  # The bytes of the layer that the old upper became; 0 if it was thrown away.
    # The present root shows what the layers below the new upper hold, so it serves as the view of them.
    same_below: bool


# Pid 1 has no right to that. The descriptor is the sandbox's process; the answer's is the new one.
class SetLastPid(IpcRequest[Forked], op="set_last_pid", descriptors=(1, 1)):
    """Fork a process after which those of a sandbox get the pids after a number; no descriptor if it has ended."""

    number: int


# The sandbox's process, then CRIU's files: all are opened by the proxy; the launcher passes them on.
class RunCriu(IpcRequest[Done], op="run_criu", descriptors=(5, 5)):
    """Start CRIU, with these arguments, inside a sandbox to dump its processes."""

    criu_arguments: list[str]
    # Whether System V shared memory is dumped, for which CRIU must be in another IPC namespace.
    dumps_segments: bool = False


# Unasked: CRIU's socket exists only once CRIU is about to run.
class CriuStarted(IpcMessage, op="criu_started", descriptors=(1, 1)):
    """CRIU runs; the socket to it accompanies this message."""


class WatchedFound(IpcMessage, op="watched_found"):
    """The paths of the directories that processes watch, as far as they were found."""

    paths: list[str]


class FindWatched(IpcRequest[WatchedFound], op="find_watched"):
    """Find the directories that processes watch, before CRIU stops them; see `guest.checkpoints.watched`."""


class NamesInspected(IpcMessage, op="names_inspected"):
    """No name that the processes hold can lead CRIU astray."""

    mapped: dict[str, str]  # CRIU's names of mapped files that it cannot open by itself, and their paths.
    # Times of the last access and change, in ns since 1970, by path: of what a restore touches.
    times: dict[str, list[int]]
    noted: dict[str, str]  # What a restore has to set again, by its name; see `guest.checkpoints.lost_settings`.


class NamesRefused(IpcMessage, op="names_refused"):
    """The processes must not be dumped, for this reason."""

    reason: str


# Only while CRIU holds the processes still: the answer is true until they run on.
class InspectNames(IpcRequest[NamesInspected | NamesRefused], op="inspect_names"):
    """Look at every name that the processes hold, before CRIU looks one up."""


# After CRIU's last look at a path, and before the restored processes run. `done` comes once more when locks are set.
class FollowLinks(IpcRequest[Done], op="follow_links", descriptors=(0, 1)):
    """Put back what CRIU has touched or does not save, and let the sandbox follow symbolic links again.

    The descriptor is that of the frozen processes (`linux.cgroups.open_freezer`), if locks are to be set.
    """

    times: dict[str, list[int]]  # What `NamesInspected` had of them at the dump.
    noted: dict[str, str]  # The same of what is set again.
    pids: list[int]  # The restored processes, all of which are frozen if there are locks.
    locks: list[list[int]]  # What `guest.checkpoints.mapped_locks.held` returned. They are set when CRIU has ended.
