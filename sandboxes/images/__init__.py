"""Images: directories made of container images, of a Docker daemon's or in files, and images made of directories.

Process: the proxy, in threads: everything here blocks. `docker_layers`, `tree_check`
and `state_image` run as programs of their own.
May import: sandboxes, sandboxes.guest.files, sandboxes.host, sandboxes.linux, sandboxes.rights.
"""
