"""A resources server in the shape of NeMo-Gym's: Starlette's signed session cookie, sessions in memory."""

import random
import sys
import uuid

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

held: dict[str, dict[str, float]] = {}


async def seed_session(request: Request) -> JSONResponse:
    name = request.session.setdefault("session_id", str(uuid.uuid4()))
    held[name] = {"sum": (await request.json()).get("start", 0), "luck": random.random()}  # noqa: S311
    return JSONResponse({})


async def add(request: Request) -> JSONResponse:
    if request.session.get("session_id") not in held:
        return JSONResponse({"error": "no session"}, 400)
    mine = held[request.session["session_id"]]
    mine["sum"] += (await request.json())["n"]
    return JSONResponse(mine)


async def verify(request: Request) -> JSONResponse:
    return JSONResponse({"reward": held[request.session["session_id"]]["sum"]})


app = Starlette(
    routes=[Route(f"/{tool.__name__}", tool, methods=["POST"]) for tool in (seed_session, add, verify)],
    middleware=[Middleware(SessionMiddleware, secret_key="secret", session_cookie="gym")],  # noqa: S106
)

if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
