"""A Debian 12 to test in: kernel 6.1, control groups of version 2, systemd, and root with every capability.

`python -m tests.guest` builds it from packages, boots it in QEMU, and runs the checks. QEMU emulates the processor in
software, so it needs no rights on the machine, and one second of a CPU there takes about ten here.

1. `image` builds the disk in a chroot on this machine, where installing is fast, and keeps it by content.
2. `machine` boots a throw-away copy of the disk, and sends commands to it over a serial line.
3. `agent` is the other end of that line, a service of the guest.
4. `checks` are what the guest has to show. They run in the guest, as programs or as tests of this repository.
"""
