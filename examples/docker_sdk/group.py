"""Run a group of rollouts through Forkpoint with Docker's Python SDK: each has a container, the shared part runs once.

    ./run serve &
    .venv/bin/python examples/docker_sdk/group.py [tcp://127.0.0.1:8700]

It needs no Docker daemon: the task's spec names the driver `local`, and any image name is accepted.
"""

import sys
import time

import docker

from forkpoint import Client

HOST = sys.argv[1] if len(sys.argv) > 1 else "tcp://127.0.0.1:8700"
TASK = "docker-sdk-example"


def main() -> None:
    """Run four rollouts. From the second on, their shared part takes no time."""
    with Client(HOST.replace("tcp", "http", 1)) as proxy:
        proxy.task(TASK).put({"driver": "local"})
    # Only the base URL differs from Docker. Each container is a rollout of the task.
    client = docker.DockerClient(base_url=f"{HOST}/t/{TASK}/docker")
    for n in range(4):
        box = client.containers.run("any:latest", "sleep infinity", detach=True, environment={"SEED": "7"})
        began = time.perf_counter()
        box.exec_run(["sh", "-c", "sleep 0.5; echo $SEED > seed"])
        seed = box.exec_run("cat seed").output
        shared_s = time.perf_counter() - began
        box.exec_run(["sh", "-c", f"echo {n} >> seed"])
        print(n, seed, box.exec_run("cat seed").output, f"shared part {shared_s:.3f} s")
        box.remove(force=True)
    client.close()


if __name__ == "__main__":
    main()
