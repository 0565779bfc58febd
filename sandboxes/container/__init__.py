"""The `container` driver: sandboxes in Docker containers.

Process: the proxy; `keeper` runs beside each container.

| process         | parent          | what it holds                        | what ends it                             |
|-----------------|-----------------|--------------------------------------|------------------------------------------|
| proxy           |                 | lock of the data directory; channels |                                          |
| keeper launcher | proxy           | mounts of its own; its socket        | the proxy closes the socket, or dies     |
| keeper          | keeper launcher | processes, sessions, delta of its    | the proxy closes its channel, or the     |
|                 |                 | container                            | launcher dies; it kills pid 1            |
| pid 1           | the keeper, or  | nothing: it starts the anchor        | the keeper kills it                      |
|                 | Docker's shim   |                                      |                                          |
| anchor          | pid 1, or tini  | shells and servers, its children     | pid 1's end; pid 1 replaces a killed one |
| shell           | anchor          | one session                          | the keeper replaces it by a fresh one    |
| CRIU            | keeper          | the images; its socket to the proxy  | the proxy closes the socket              |

Docker starts a pattern for each image and limits, and keepers the containers of sandboxes (`patterns`).
Pid 1, anchor and shells run inside the container; `boot_scripts` has their programs.
May import: sandboxes, sandboxes.container.keeper, sandboxes.egress, sandboxes.guest.bash, sandboxes.guest.files,
sandboxes.host, sandboxes.ipc, sandboxes.linux.
"""
