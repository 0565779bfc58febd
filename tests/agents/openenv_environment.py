"""An OpenEnv environment with its project's own server library: it runs inside sandboxes, and beside Forkpoint."""

import random
import sys

import uvicorn
from openenv.core.env_server import create_fastapi_app  # type: ignore[import-not-found]
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]
from pydantic import Field

total = 0


class Move(Action):  # type: ignore[misc]
    word: str


class Seen(Observation):  # type: ignore[misc]
    words: list[str] = Field(default_factory=list)
    roll: int = 0
    luck: str = ""
    total: int = 0


class Words(Environment[Move, Seen, State]):  # type: ignore[misc]
    """Keeps the words of an episode; rolls a seeded die; draws lots when asked."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._words: list[str] = []
        self._die = random.Random(0)  # noqa: S311
        self._luck = ""
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> Seen:
        self._words = []
        self._die = random.Random(seed)  # noqa: S311
        self._state = State(episode_id=episode_id, step_count=0)
        return Seen(done=False, reward=0.0)

    def step(self, action: Move, timeout_s: float | None = None, **_: object) -> Seen:
        del timeout_s
        if action.word == "fail":
            raise ValueError("as asked")
        if action.word == "draw":
            self._luck = str(random.random())  # noqa: S311
        self._words.append(action.word)
        self._state.step_count += 1
        done = action.word == "end"
        roll = self._die.randrange(1 << 30)
        return Seen(done=done, reward=float(done), words=list(self._words), roll=roll, luck=self._luck)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    uvicorn.run(
        create_fastapi_app(Words, Move, Seen, max_concurrent_envs=64), port=int(sys.argv[1]), log_level="warning"
    )
