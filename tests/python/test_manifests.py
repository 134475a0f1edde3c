"""Units, the compose file and Kubernetes' manifests: flags that the programs have, ports and probes of the docs, schemas."""

import copy
import json
import os
import pathlib
import re
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml
from clusters import tidemill

ROOT = pathlib.Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
ROLES = ("coordinator", "kvpool", "prefill", "decode")


def compose():
    return yaml.safe_load((DEPLOY / "container/compose.yaml").read_text())


def resources():
    """All of Kubernetes' resources, by the files that the Kustomization lists."""
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(path.name for path in KUBERNETES.glob("*.yaml") if path.name != "kustomization.yaml")
    return [resource for name in listed for resource in yaml.safe_load_all((KUBERNETES / name).read_text())]


def pods():
    return {it["metadata"]["name"]: it["spec"]["template"]["spec"] for it in resources() if it["kind"] in {"StatefulSet", "Deployment"}}


def containers():
    return {role: pod["containers"][0] for role, pod in pods().items()}


def commands():
    """The source and the words of each command."""
    unit = (DEPLOY / "systemd/tidemill@.service").read_text()
    start = re.search(r"^ExecStart=(.*)$", unit, re.M)[1]
    yield from ((f"unit of {role}", start.replace("%i", role).split()) for role in ROLES)
    yield from ((f"compose: {name}", service["command"]) for name, service in compose()["services"].items())
    yield from ((f"Kubernetes: {role}", container["command"] + container["args"]) for role, container in containers().items())


def test_every_flag_is_one_that_the_program_has():
    flags = {}
    for role in ROLES:
        program = pathlib.Path(tidemill()).with_name(f"tidemill-{role}")
        said = subprocess.run([program, "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
        flags[program.name] = set(re.findall(r"(--[a-z0-9-]+)", "\n".join(re.findall(r"^ +(?:-\w, )?--\S+", said, re.M))))
    for where, (program, *arguments) in commands():
        used = {argument.split("=")[0] for argument in arguments if argument.startswith("--")}
        unknown = used - flags[pathlib.PurePath(program).name]
        assert used and not unknown, f"{where}: {program} has no {unknown}"


def test_ports_and_probes_are_those_of_the_docs():
    tutorial, http = ((ROOT / "docs" / page).read_text() for page in ("tutorials/two-machines.md", "reference/http.md"))
    documented = {(protocol, int(port)) for protocol, port in re.findall(r"\b(TCP|UDP) (\d{4})\b", tutorial)}
    assert documented == {("TCP", 8000), ("TCP", 9100), ("UDP", 7100), ("TCP", 7100), ("UDP", 7200), ("TCP", 7200)}
    opened = {(port.get("protocol", "TCP"), port["containerPort"]) for each in containers().values() for port in each.get("ports", [])}
    rules = [rule for it in resources() if it["kind"] == "NetworkPolicy" for rule in it["spec"].get("ingress", [])]
    allowed = {(port["protocol"], port["port"]) for rule in rules for port in rule["ports"]}
    services = [it["spec"] for it in resources() if it["kind"] == "Service"]
    served = {(port.get("protocol", "TCP"), port["port"]) for service in services for port in service["ports"]}
    assert opened == allowed == documented and served <= documented
    addresses = re.compile(r"--(?:http|admin|listen|bind|coordinators)=\S+:(\d+)")
    given = {int(port) for _, command in commands() for port in addresses.findall(" ".join(command))}
    assert given == {port for _, port in documented}
    probed = [probe for each in containers().values() for name, probe in each.items() if name.endswith("Probe")]
    probes = {probe["httpGet"]["path"] for probe in probed if "httpGet" in probe}
    assert probes == {"/ready", "/health"} and all(f"`{path}`" in http for path in probes)


def test_kubernetes_takes_the_manifests():
    kinds = [it["kind"] for it in resources()]
    assert {kind: kinds.count(kind) for kind in ("StatefulSet", "Deployment", "PodDisruptionBudget")} == {
        "StatefulSet": 2,
        "Deployment": 2,
        "PodDisruptionBudget": 4,
    }
    for it in resources():
        # Schemas of cert-manager's kinds are cert-manager's.
        if not it["apiVersion"].startswith("cert-manager.io/"):
            kubernetes_validate.validate(copy.deepcopy(it), kubernetes_validate.latest_version(), strict=True)


def test_keda_scales_the_engines_by_the_wanted_workers_of_the_model():
    scaled = {it["metadata"]["name"]: it["spec"] for it in yaml.safe_load_all((KUBERNETES / "autoscaling/keda.yaml").read_text())}
    deployments = {it["metadata"]["name"] for it in resources() if it["kind"] == "Deployment"}
    assert set(scaled) == deployments == {spec["scaleTargetRef"]["name"] for spec in scaled.values()}
    dirs = [argument for argument in containers()["coordinator"]["args"] if argument.startswith("--model=")]
    model = pathlib.PurePath(dirs[0].partition("=")[2]).name
    for role, spec in scaled.items():
        metadata = spec["triggers"][0]["metadata"]
        assert metadata["query"] == f'max(tidemill_wanted_workers{{role="{role}",model="{model}"}})' and metadata["threshold"] == "1"
        assert 1 <= spec["minReplicaCount"] <= spec["maxReplicaCount"]


def test_selectors_find_their_pods():
    names = set(pods())
    selectors = [it["spec"]["selector"] for it in resources() if "selector" in it.get("spec", {})]
    found = [selector.get("matchLabels", selector)["app.kubernetes.io/name"] for selector in selectors]
    assert set(found) == names == set(ROLES)


def test_pods_may_do_no_more_than_they_must():
    for role, pod in pods().items():
        container = pod["containers"][0]
        rights = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] and rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        # The drain has its time: `drain_announce_s` and `drain_s` together.
        drain = sum(int(seconds) for seconds in re.findall(r"--drain(?:-announce)?-s=(\d+)", " ".join(container["args"])))
        assert pod["terminationGracePeriodSeconds"] > drain and "kill -TERM 1" in container["lifecycle"]["preStop"]["exec"]["command"][-1]
        volumes = {volume["name"] for volume in pod["volumes"]} | ({"data"} if role == "coordinator" else set())
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        pki = next(volume["csi"]["volumeAttributes"] for volume in pod["volumes"] if volume["name"] == "pki")
        assert pki["csi.cert-manager.io/uri-sans"] == f"tidemill://{role}/${{POD_NAME}}"
    for service in compose()["services"].values():
        assert service["read_only"] and service["cap_drop"] == ["ALL"]


def test_the_kustomization_builds():
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl")
    built = subprocess.run(["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    for it in yaml.safe_load_all(built.stdout):
        template = it.get("spec", {}).get("template")
        # Network policies select by it.
        assert not template or template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "tidemill"


def test_systemd_takes_the_units_and_finds_them_hardened(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    programs = pathlib.Path(tidemill()).parent
    shutil.copytree(DEPLOY / "systemd", tmp_path, dirs_exist_ok=True)
    unit = tmp_path / "tidemill@.service"
    unit.write_text(unit.read_text().replace("/usr/bin/tidemill-", f"{programs}/tidemill-"))
    environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    for role in ROLES:
        verify = ["systemd-analyze", "verify", "--man=no", f"tidemill@{role}.service"]
        said = subprocess.run(verify, env=environment, capture_output=True, text=True, timeout=60)
        # Keys of newer versions are ignored by older ones, which say so.
        errors = [line for line in said.stderr.splitlines() if "tidemill" in line and "Unknown key 'Restart" not in line]
        assert said.returncode == 0 and not errors, said.stderr
    security = ["systemd-analyze", "security", "--offline=true", "--no-pager", "--threshold=25", "--json=short", unit]
    said = subprocess.run(security, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, [row["name"] for row in json.loads(said.stdout) if row["exposure"]]
