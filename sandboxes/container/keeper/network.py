"""The network of a container: a namespace of its own with nothing but loopback, which its keeper enters and checks."""

import errno
import fcntl
import os
import socket
import struct

from sandboxes.linux import syscalls as kernel

_SIOCGIFFLAGS, _IFF_UP = 0x8913, 0x1
"""netdevice(7)."""


def enter(pid: int) -> None:
    """Move this process into the network namespace of a container's pid 1, and bring its loopback up.

    Docker makes the namespace (`network_disabled` in `sandboxes.container.daemon`). That it holds no network is looked
    at here, because an agent in the machine's own network would reach everything that the machine reaches.

    Raises:
        OSError: An interface other than loopback is up, or the kernel refuses.
    """
    with open(f"/proc/{pid}/ns/net") as namespace:  # noqa: PTH123
        kernel.setns(namespace.fileno(), kernel.CLONE_NEWNET)
    require_loopback_only()
    kernel.bring_up_loopback()


def require_loopback_only() -> None:
    """Check that no interface of this process's network namespace is up except loopback.

    Raises:
        OSError: Another one is up.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("16sH14x", os.fsencode(name), 0)
            (flags,) = struct.unpack("16xH14x", fcntl.ioctl(probe.fileno(), _SIOCGIFFLAGS, request))
            # The kernel's own tunnels are in every namespace, and down.
            if name != "lo" and flags & _IFF_UP:
                raise OSError(errno.EPERM, f"the interface {name} is up in the network of a container")
