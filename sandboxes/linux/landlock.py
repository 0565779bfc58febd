"""Landlock: a process confines itself, and every process that it forks, to the files below one directory.

A ruleset names the kinds of access that it handles; handled access is denied unless a rule allows it (Linux 5.13,
Documentation/userspace-api/landlock.rst). The kernel refuses kinds that it does not know, so the version is queried
first.
"""

import ctypes
import os
import struct
from pathlib import Path

from sandboxes.linux.descriptors import Opened
from sandboxes.linux.syscalls import syscall

_ASK_VERSION, _PATH_BENEATH = 1, 1
_WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_FILE, _MAKE_REG = 1 << 1, 1 << 2, 1 << 3, 1 << 5, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_VERSION = (1 << 13) - 1
"""All kinds of access that version 1 handles."""


def restrict_to(folder: Path) -> None:
    """Deny this process, with no_new_privs, every file except regular files below a directory, for good."""
    version = syscall("landlock_create_ruleset", None, ctypes.c_size_t(0), ctypes.c_uint(_ASK_VERSION))
    handled = _FIRST_VERSION
    for since, access in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= access if version >= since else 0
    attributes, no_flags = struct.pack("=Q", handled), ctypes.c_uint(0)
    size = ctypes.c_size_t(len(attributes))
    made = syscall("landlock_create_ruleset", ctypes.c_char_p(attributes), size, no_flags)
    with Opened(made) as rules, Opened(os.open(folder, os.O_PATH | os.O_CLOEXEC)) as below:
        allowed = (_WRITE_FILE | _READ_FILE | _READ_DIR | _REMOVE_FILE | _MAKE_REG | _TRUNCATE) & handled
        rule = struct.pack("=Qi", allowed, below)
        kind, given = ctypes.c_int(_PATH_BENEATH), ctypes.c_char_p(rule)
        syscall("landlock_add_rule", ctypes.c_int(rules), kind, given, no_flags)
        syscall("landlock_restrict_self", ctypes.c_int(rules), no_flags)
