"""Servers of the shapes that the shipped dialects are for, of the standard library alone."""

import json
import random
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sandboxes: dict[str, list[str]] = {}
sums: dict[str, int] = {}


def video(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The wire of TVCACHE's authors."""
    name = body["sandbox_id"]
    match path:
        case "/start":
            sandboxes[name] = []
            return {"success": True, "sandbox_id": name, "sandbox_path": f"/tmp/{name}"}
        case "/execute":
            sandboxes[name].append(body["argument"])
            answer = " ".join(sandboxes[name]) + f" {random.random()}"  # noqa: S311
            return {"success": True, "command": body["command"], "result": f"{name}: {answer}"}
    return {"success": False}


def fusion(_path: str, body: dict[str, Any]) -> dict[str, Any]:
    """SandboxFusion's /run_code."""
    done = subprocess.run([sys.executable, "-c", body["code"]], capture_output=True, text=True, check=False)
    payload = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return {"status": "Success" if done.returncode == 0 else "Failed", "message": "", "run_result": payload}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *_: object) -> None: ...

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        cookie = {}
        if sys.argv[2] == "gym":
            # Its session is a cookie, as it is signed again with each answer.
            session = self.headers.get("Cookie", "").partition("session=")[2].partition(";")[0].partition(".")[0]
            if self.path == "/seed_session":
                session = f"s{len(sums)}"
                sums[session] = int(body.get("start", 0))
            elif self.path == "/add":
                sums[session] += int(body["n"])
            answer: Any = {"sum": sums[session], "luck": random.random()}  # noqa: S311
            cookie = {"Set-Cookie": f"session={session}.{random.random()}; path=/"}  # noqa: S311
        else:
            answer = {"video": video, "fusion": fusion}[sys.argv[2]](self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(200)
        for name, value in {"Content-Type": "application/json", **cookie, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    Path("/tmp/started").touch()
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
