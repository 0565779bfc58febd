"""SandboxFusion's own client, with no word of Forkpoint. Arguments: the endpoint."""

import json
import sys

from sandbox_fusion import RunCodeRequest, run_code  # type: ignore[import-not-found]

answers = []
for _ in range(3):
    for code in ("print(6 * 7)", "import random; print(random.random())", "1 / 0"):
        answer = run_code(RunCodeRequest(code=code, language="python"), endpoint=sys.argv[1], max_attempts=1)
        assert answer.run_result is not None
        answers.append([str(answer.status), answer.run_result.return_code, answer.run_result.stdout])
print(json.dumps(answers))
