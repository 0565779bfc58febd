"""What makes states dear on this machine: a task's view, and the reason why a state is not kept, say it."""

from sandboxes.linux import syscalls as kernel
from tests.agents.serving import real_proxy
from tests.machine import require_criu, require_sandboxes


def test_task_says_what_missing_checkpoints_cost() -> None:
    require_sandboxes()
    with real_proxy(checkpoints=False) as proxy:
        view = proxy.client.put("/api/v1/tasks/servers", json={}).json()
    assert "turned off" in view["advice"]
    assert "1.8 s" in view["advice"]


def test_process_of_another_user_needs_a_capability() -> None:
    """Where the proxy has it, the state is kept. Where not, the reason names it, and not only CRIU's own words."""
    require_sandboxes()
    require_criu()
    command = "setpriv --reuid 65534 --regid 65534 --clear-groups setsid sleep 1000 >/dev/null 2>&1 </dev/null &"
    with real_proxy(checkpoints=True) as proxy:
        call = proxy.client.post("/t/others/r/1/shell/exec", json={"command": command})
        kept = proxy.client.post(f"/api/v1/tasks/others/nodes/{call.headers['x-forkpoint-node']}/snapshot")
        assert proxy.client.get("/api/v1/tasks/others").json()["advice"] == ""
    if kernel.permitted() >> kernel.CAP_SYS_RESOURCE & 1:
        assert kept.is_success
    else:
        assert (kept.status_code, "SYS_RESOURCE is missing" in kept.json()["detail"]) == (409, True), kept.text
