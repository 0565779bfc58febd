"""Images: directories made of container images, of a Docker daemon's or in files, and images made of directories.

Process: the proxy, in threads: everything here blocks. `docker_layers` and `tree_check` run as programs of their own.
May import: sandboxes, sandboxes.guest.files, sandboxes.host, sandboxes.linux.
"""
