"""The network of a container: a namespace of its own with nothing but loopback, which its keeper checks."""

import errno
import fcntl
import os
import socket
import struct

_SIOCGIFFLAGS, _IFF_UP = 0x8913, 0x1
"""netdevice(7)."""


def require_loopback_only() -> None:
    """Check that no interface of this process's network namespace is up except loopback.

    Docker makes the namespace of a container (`network_disabled` in `sandboxes.container.daemon`). That it holds no
    network is looked at here, because an agent in the machine's own would reach everything that the machine reaches.

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
