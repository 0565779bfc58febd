"""A fork server that forks nothing: it answers requests with its own pid, or reports an error."""

import os
import sys

from sandboxes.ipc.codec import decode, pack_message
from sandboxes.ipc.fork_child import connect, requests
from sandboxes.ipc.launch_messages import ForkServerReady, InspectNames
from sandboxes.ipc.messages import Failed
from sandboxes.ipc.state_messages import ProcessTree


def main() -> None:
    driver = connect()
    if sys.argv[2:] == ["fail"]:
        driver.sendall(pack_message(Failed("no luck")))
        return
    driver.sendall(pack_message(ForkServerReady()))
    for frame in requests(driver):
        refused = isinstance(decode(frame).message, InspectNames)
        driver.sendall(pack_message(Failed("EPERM") if refused else ProcessTree(os.getpid())))
