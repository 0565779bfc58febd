"""A fork server that forks nothing: it echoes requests, or reports an error at its start."""

import os
import sys

from sandboxes.ipc.fork_child import connect, requests
from sandboxes.ipc.frames import pack


def main() -> None:
    driver = connect()
    if sys.argv[2:] == ["fail"]:
        driver.sendall(pack({"error": "no luck"}))
        return
    driver.sendall(pack({"ready": True}))
    for message in requests(driver):
        driver.sendall(pack({**message.fields, "pid": os.getpid()}))
