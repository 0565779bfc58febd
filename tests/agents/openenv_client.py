"""OpenEnv's own client, with no word of Forkpoint: a group of episodes that begin alike and part.

Arguments: base URLs, one for each rollout, and what to do.
"""

import json
import sys
import time
from typing import Any

from openenv.core import GenericEnvClient  # type: ignore[import-not-found]

PREFIX = ["one", "two", "draw", "three"]
episodes: list[list[Any]] = []
clients = [GenericEnvClient(base_url=url).sync() for url in sys.argv[2:]]
for client in clients:
    client.connect()
seconds = []
for n, client in enumerate(clients):
    episode = []
    started = time.monotonic()
    first = client.reset(seed=7, episode_id=f"episode-{n}")
    episode.append([first.observation, first.reward, first.done])
    for word in PREFIX:
        seen = client.step({"word": word})
        episode.append([seen.observation, seen.reward, seen.done])
    episode.append(client.state())
    seconds.append(time.monotonic() - started)
    episodes.append(episode)
    if n == 0:
        # What was kept meanwhile is the proxy's business; it has the time in which a model would think.
        time.sleep(float(sys.argv[1]))
for n, client in enumerate(clients):
    for word in (f"of {n}", "draw" if n == len(clients) - 1 else "same", "end"):
        seen = client.step({"word": word})
        episodes[n].append([seen.observation, seen.reward, seen.done])
    episodes[n].append(client.state())
try:
    clients[0].step({"word": "fail"})
except RuntimeError as error:
    episodes[0].append(str(error))
# Another episode on the same connection.
again = clients[1].reset(seed=7, episode_id="again")
episodes[1].append([again.observation, clients[1].step({"word": "one"}).observation, clients[1].state()])
for client in clients:
    client.close()
print(json.dumps({"episodes": episodes, "seconds": seconds}))
