"""The `local` driver: Linux namespaces and overlay layers without a daemon.

Process: the proxy; `launcher` and `init` run in a fork server and as pid 1 of each sandbox.

| process  | parent               | what it holds                           | what ends it                            |
|----------|----------------------|-----------------------------------------|-----------------------------------------|
| proxy    |                      | the lock of the data directory; layers; |                                         |
|          |                      | channels                                |                                         |
| launcher | proxy                | a view of the host's root; its socket   | the proxy closes the socket, or dies    |
| pid 1    | launcher             | namespaces, sessions and delta of its   | a signal of the proxy's, the end of its |
|          |                      | sandbox                                 | channel, or the launcher's death        |
| anchor   | pid 1                | shells and servers as its children      | pid 1's end                             |
| shell    | anchor               | one session                             | pid 1 replaces it by a fresh one        |
| CRIU     | launcher for a dump, | the images; its socket to the proxy     | the proxy closes the socket             |
|          | pid 1 for a restore  |                                         |                                         |

Pid 1, anchor and shells run inside the sandbox; `sandboxes.guest` has their code.
May import: sandboxes, sandboxes.egress, sandboxes.guest, sandboxes.guest.anchors, sandboxes.guest.checkpoints,
sandboxes.guest.files, sandboxes.host, sandboxes.images, sandboxes.ipc, sandboxes.linux, sandboxes.rights,
sandboxes.shell_files.
"""
