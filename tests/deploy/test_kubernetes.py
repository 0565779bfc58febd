"""The Helm chart renders to valid Kubernetes objects, and `docker/deploy/kubernetes/forkpoint.yaml` is its output.

helm itself is on no package registry, so the templates are rendered by Go's own template engine with Sprig, from the
package `py-go-template`. `python -m tests.deploy.test_kubernetes` writes the manifests.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from proxy.settings import Settings
from tests.test_shell_blocks import parse_all

DEPLOY = Path(__file__).parents[2] / "docker" / "deploy"
CHART = DEPLOY / "helm" / "forkpoint"
MANIFESTS = DEPLOY / "kubernetes" / "forkpoint.yaml"
KUBERNETES = "1.30"
TOKEN = "0123456789abcdef"
HEAD = """\
# Forkpoint on Kubernetes, without Helm: the output of docker/deploy/helm/forkpoint with its default values.
# Make the token first: kubectl create secret generic forkpoint-token --from-literal=token=$(openssl rand -hex 24)
"""


def values(**changed: Any) -> dict[str, Any]:
    """Return the chart's values, checked by its schema as Helm does."""
    merged: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text()) | changed
    jsonschema.validate(merged, json.loads((CHART / "values.schema.json").read_text()))
    return merged


def cluster(**changed: Any) -> dict[str, Any]:
    """Return the chart's values of a cluster."""
    return {**yaml.safe_load((CHART / "values.yaml").read_text())["cluster"], **changed}


RENDER = """\
import json, sys
from pathlib import Path
import go_template
templates, context = json.load(sys.stdin)
json.dump([go_template.render(Path(template), context).decode() for template in templates], sys.stdout)
"""
"""Runs in a process of its own: Go's runtime takes over SIGPIPE and SIGURG of the process that loads it."""


def rendered(chosen: dict[str, Any]) -> list[str]:
    """Return the output of each template that has any."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    context = {
        "Values": chosen,
        "Release": {"Name": "forkpoint", "Namespace": "default", "Service": "Helm"},
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
    }
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    with tempfile.TemporaryDirectory() as folder:
        templates = []
        for template in sorted((CHART / "templates").glob("*.yaml")):
            joined = Path(folder) / template.name
            joined.write_text(helpers + template.read_text())
            templates.append(str(joined))
        done = subprocess.run(
            [sys.executable, "-c", RENDER], input=json.dumps([templates, context]), capture_output=True, text=True,
            check=True, timeout=120,
        )  # fmt: skip
    texts = [text.strip() for text in json.loads(done.stdout)]
    return [text for text in texts if text]


def objects(**changed: Any) -> dict[str, dict[str, Any]]:
    """Return the rendered objects by kind."""
    loaded = [yaml.safe_load(text) for text in rendered(values(**changed))]
    return {each["kind"]: each for each in loaded}


def manifests() -> str:
    """Return what `docker/deploy/kubernetes/forkpoint.yaml` must contain."""
    return HEAD + "".join(f"---\n{text}\n" for text in rendered(values()))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"token": TOKEN, "names": ["tools.example"], "nodeSelector": {"disk": "ssd"}},
        {"tolerations": [{"key": "gpu", "operator": "Exists"}], "storage": {"size": "1Gi", "className": "fast"}},
        {"cluster": cluster(kind="DaemonSet", store="s3://bucket/states", storeCredentials="bucket")},
        {"cluster": cluster(kind="DaemonSet", storeClaim="states")},
        {"cluster": cluster(kind="StatefulSet", members=5, storeClaim="states")},
    ],
)
def test_objects_are_valid(changed: dict[str, Any]) -> None:
    """Against the schema of Kubernetes' own API, in which unknown members are errors."""
    for each in objects(**changed).values():
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


def test_manifests_are_the_charts_output() -> None:
    assert MANIFESTS.read_text() == manifests(), "write it again: python -m tests.deploy.test_kubernetes"


def test_environment_has_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    pod = objects(names=["tools.example"])["StatefulSet"]["spec"]["template"]["spec"]
    for entry in pod["containers"][0]["env"]:
        monkeypatch.setenv(entry["name"], entry.get("value", TOKEN))
    settings = Settings.load()
    assert settings.names == ("forkpoint", "forkpoint.default", "forkpoint.default.svc", "tools.example")
    assert settings.snapshot_bytes == 20 * 2**30
    mount = pod["containers"][0]["volumeMounts"][0]["mountPath"]
    assert str(settings.data) == mount
    # Otherwise Kubernetes sets FORKPOINT_PORT to a URL.
    assert pod["enableServiceLinks"] is False


def test_token_becomes_a_secret() -> None:
    made = objects(token=TOKEN, serviceMonitor={"enabled": True})
    assert made["Secret"]["stringData"] == {"token": TOKEN}
    (environment,) = [
        entry["valueFrom"]["secretKeyRef"]
        for entry in made["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["env"]
        if entry["name"] == "FORKPOINT_TOKEN"
    ]
    assert environment == {"name": made["Secret"]["metadata"]["name"], "key": "token"}
    credentials = made["ServiceMonitor"]["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert credentials == environment
    assert objects()["StatefulSet"]["kind"]
    assert "Secret" not in objects()


def test_pods_with_ipv6_addresses() -> None:
    """The host of the settings takes the place of the chart's."""
    (container,) = objects(settings={"host": "::"})["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert [entry["value"] for entry in container["env"] if entry["name"] == "FORKPOINT_HOST"] == ["::"]


@pytest.mark.parametrize("kind", ["DaemonSet", "StatefulSet"])
def test_members_have_what_a_cluster_needs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pod has a name of its own, a link that other pods reach, and hands its tasks over before it ends."""
    made = objects(cluster=cluster(kind=kind, storeClaim="states"))
    pod = made[kind]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    from_pod = {
        entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
        for entry in container["env"] if "fieldRef" in entry.get("valueFrom", ())
    }  # fmt: skip
    assert from_pod["FORKPOINT_NODE"] == {"DaemonSet": "spec.nodeName", "StatefulSet": "metadata.name"}[kind]
    for entry in container["env"]:
        if entry["name"].startswith("FORKPOINT_"):
            monkeypatch.setenv(entry["name"], entry.get("value", TOKEN).replace("$(POD_IP)", "fd00::1"))
    settings = Settings.load()
    assert settings.link == "[fd00::1]:8701"
    assert settings.store in [mount["mountPath"] for mount in container["volumeMounts"]]
    (links,) = [rule for rule in made["NetworkPolicy"]["spec"]["ingress"] if rule["ports"] == [{"port": 8701}]]
    assert links["from"][0]["podSelector"] == made[kind]["spec"]["selector"]
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["sh", "-c"]
    parse_all(command[2])
    assert {"name": "data", "mountPath": str(settings.data)} in container["volumeMounts"]
    if kind == "DaemonSet":
        assert made["Service"]["spec"]["internalTrafficPolicy"] == "Local"
        assert "hostPath" in {name for volume in pod["volumes"] for name in volume}


def test_workers_of_kuberay_use_the_service() -> None:
    """Its own objects have no schema here, but their pods are Kubernetes'."""
    ray = yaml.safe_load((DEPLOY / "kubernetes" / "kuberay.yaml").read_text())["spec"]
    service = objects()["Service"]
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for group in (ray["headGroupSpec"], *ray["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert {"name": "FORKPOINT_URL", "value": url} in pod["spec"]["containers"][0]["env"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"token": "short"}, {"replicas": 2}, {"storage": {"size": 5}}, {"cluster": cluster(kind="Deployment")},
        {"cluster": cluster(kind="DaemonSet")}, {"cluster": cluster(kind="DaemonSet", store="s3://a", storeClaim="b")},
    ],
)  # fmt: skip
def test_schema_refuses_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        values(**wrong)


def test_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    released = re.search(r'^version = "(.+)"$', project, re.MULTILINE)
    assert released is not None
    assert chart["appVersion"] == released[1]


if __name__ == "__main__":
    MANIFESTS.write_text(manifests())
