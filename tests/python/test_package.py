"""The Debian package, unpacked into a root of its own: what is in it, and a cluster of three processes from it by its example files."""

import pathlib
import re
import signal
import socket
import subprocess

import httpx
import pytest
from clusters import tidemill, wait_until
from conftest import MODEL

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ["tidemill", *(f"tidemill-{role}" for role in ("coordinator", "prefill", "decode", "kvpool"))]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The Debian package and the tarball."""
    out = tmp_path_factory.mktemp("packages")
    make = [ROOT / "deploy/make-package", pathlib.Path(tidemill()).parent, out]
    made = subprocess.run(make, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    return next(out.glob("*.deb")), next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def root(packages, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    subprocess.run(["dpkg-deb", "-x", packages[0], root], check=True, timeout=120)
    return root


def test_package_and_tarball_hold_the_same_tree(packages, root):
    listed = subprocess.run(["tar", "-tzf", packages[1]], capture_output=True, text=True, check=True, timeout=120).stdout.splitlines()
    in_tarball = {name.partition("/")[2].rstrip("/") for name in listed} - {""}
    in_package = {str(path.relative_to(root)) for path in root.rglob("*")}
    assert in_tarball == in_package
    expected = {f"usr/bin/{name}" for name in PROGRAMS} | {
        "lib/systemd/system/tidemill@.service",
        "usr/lib/sysusers.d/tidemill.conf",
        "usr/share/doc/tidemill/copyright",
        "usr/share/tidemill/monitoring/alerts.yml",
        "usr/share/tidemill/kubernetes/kustomization.yaml",
    }
    assert expected <= in_package
    assert not [name for name in in_package if "__pycache__" in name]


def test_the_package_says_what_it_is(packages, root):
    fields = subprocess.run(["dpkg-deb", "-f", packages[0]], capture_output=True, text=True, check=True, timeout=60).stdout
    version = re.search(r"^Version: (\S+)$", fields, re.M)[1]
    assert re.search(r"^Depends: libc6 \(>= 2\.\d+\), libgcc-s1$", fields, re.M)
    for name in PROGRAMS:
        said = subprocess.run([root / "usr/bin" / name, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
        assert said.split() == [name, version]


def test_three_processes_of_the_package_are_a_cluster(root, tmp_path):
    """Each reads its example file, with this test's ports and directories in place of the machine's."""
    ports = free_ports(4)
    names = ("coordinator/coordinator-0", "kvpool/kvpool-0", "decode/decode-0")
    subprocess.run([root / "usr/bin/tidemill", "certs", tmp_path / "pki", *names], check=True, timeout=60, stdout=subprocess.DEVNULL)
    changed = {
        "/etc/tidemill/pki": f"{tmp_path}/pki",
        "/var/lib/tidemill": f"{tmp_path}/data",
        "/srv/models/my-model": str(MODEL),
        **{f"127.0.0.1:{was}": f"127.0.0.1:{now}" for was, now in zip((8000, 9100, 7100, 7200), ports)},
        '"2GiB"': '"64MiB"',
        '"1GiB"': '"64MiB"',
    }
    processes = []
    try:
        for role in ("coordinator", "kvpool", "decode"):
            text = (root / f"usr/share/doc/tidemill/examples/{role}.toml").read_text()
            for was, now in changed.items():
                text = text.replace(was, now)
            config = tmp_path / f"{role}.toml"
            config.write_text(text)
            with open(tmp_path / f"{role}.log", "w") as log:
                command = [root / f"usr/bin/tidemill-{role}", "--config", config]
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        front_door = f"http://127.0.0.1:{ports[0]}"

        def is_ready():
            for process in processes:
                assert process.poll() is None, "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
            try:
                return httpx.get(f"{front_door}/ready", timeout=10).status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_ready)
        members = httpx.get(f"http://127.0.0.1:{ports[1]}/cluster", timeout=10).json()["members"]
        wait_until(lambda: len(httpx.get(f"http://127.0.0.1:{ports[1]}/cluster", timeout=10).json()["members"]) == 2)
        assert {member["name"] for member in members} <= {"kvpool-0", "decode-0"}
        model = httpx.get(f"{front_door}/v1/models", timeout=10).json()["data"][0]["id"]
        body = {"model": model, "prompt": [1, 2, 3, 4], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{front_door}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert answer["usage"]["completion_tokens"] == 4
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "a process that is told to stop ends well"
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def free_ports(count):
    """Ports that were free a moment ago."""
    held = [socket.socket() for _ in range(count)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
