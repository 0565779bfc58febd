"""A state becomes a container image again, as `docker commit` makes one of a container.

The image has the layers of the state over those of the base, without what every sandbox gets beside them
(`sandboxes.local.bases.Base.bare`). A process of its own mounts and reads them: a mount changes the working directory
of its process, and thousands of files would keep the proxy's interpreter busy while hits wait.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sandboxes.errors import SandboxError
from sandboxes.images import build
from sandboxes.images.config import ImageConfig, ImageError
from sandboxes.images.daemon import ImageDaemon
from sandboxes.linux import syscalls as kernel
from sandboxes.linux.descriptors import Opened
from sandboxes.linux.plain_paths import plain_descriptor
from sandboxes.portability import NoImageError


class ImageOrder(NamedTuple):
    """What the process needs to make an image."""

    lowers: Sequence[str]  # The directories, topmost first; at least two. The last but `empty` may be another user's.
    empty: bool  # Whether the last one is an empty directory, because an overlay needs two.
    config: dict[str, Any]
    left_out: Sequence[str]  # Names in the root directory that the image does not have.
    name: str  # The name of the image; empty for none.
    target: str | None  # The new file of the archive; None gives the image to the Docker daemon.
    folder: str  # Where a copy of the tree has room for a moment.


async def make(order: ImageOrder) -> str:
    """Make an image; return its id. A cancellation ends the process; what it has written of the file stays."""
    program = [sys.executable, "-m", "sandboxes.images.state_image"]
    pipe = asyncio.subprocess.PIPE
    maker = await asyncio.create_subprocess_exec(*program, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        out, err = await maker.communicate(json.dumps(order._asdict()).encode())
    finally:
        if maker.returncode is None:
            maker.kill()
            await maker.wait()
    if maker.returncode:
        raise SandboxError(f"the image could not be made: {err.decode(errors='replace').strip()[-200:]}")
    result: dict[str, str] = json.loads(out)
    if "refused" in result:
        raise NoImageError(result["refused"])
    if "failed" in result:
        raise SandboxError(f"the image could not be made: {result['failed']}")
    return result["id"]


def _result(order: ImageOrder) -> dict[str, str]:
    try:
        return {"id": _made(order)}
    except ImageError as error:
        return {"refused": str(error)}
    except (SandboxError, OSError) as error:
        return {"failed": str(error)}


def _made(order: ImageOrder) -> str:
    *above, base = order.lowers[:-1] if order.empty else order.lowers
    config = ImageConfig.parse(order.config)
    # A base may be a directory in which another user can put a link after its path was checked.
    with Opened(plain_descriptor(base)) as opened:
        lowers = [*above, f"/proc/self/fd/{opened}", *(order.lowers[-1:] if order.empty else [])]
        with Opened(kernel.overlay(lowers, None, None)) as overlay:
            root = Path(f"/proc/self/fd/{overlay}/.")
            if order.target is not None:
                return build.write(Path(order.target), root, config, order.name, left_out=order.left_out)
            daemon = ImageDaemon()
            try:
                return build.load(daemon, root, config, order.name, Path(order.folder), left_out=order.left_out)
            finally:
                daemon.close()


if __name__ == "__main__":
    parent = os.getppid()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        print(json.dumps(_result(ImageOrder(**json.load(sys.stdin)))))
