"""Texts of the page's `format.js`, in Node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

FORMAT = Path(__file__).parents[2] / "proxy/ui/static/js/format.js"


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
def test_seconds_never_show_sixty_of_a_smaller_unit() -> None:
    values = {119.6: "2 min 00 s", 121.2: "2 min 01 s", 3599.7: "1 h 00 min", 0.0: "0 s", 4.31: "4.31 s"}
    program = f"import {{ seconds }} from '{FORMAT}'; console.log(JSON.stringify({list(values)}.map(seconds)))"
    command = ["node", "--no-warnings", "--experimental-default-type=module", "--input-type=module", "-e", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == list(values.values())
