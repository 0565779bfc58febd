"""The keeper of a container: it runs commands in the container and observes what they change.

Standard library and msgspec only, no event loop.

Process: the keeper beside each container, forked from the launcher.
May import: sandboxes, sandboxes.container, sandboxes.guest, sandboxes.guest.anchors, sandboxes.guest.bash,
sandboxes.guest.files, sandboxes.ipc, sandboxes.linux.
"""
