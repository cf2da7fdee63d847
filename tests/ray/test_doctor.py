"""ray-fracbackend doctor on this machine, on one with faults in a mount namespace, and on a real Ray."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from types import ModuleType

import psutil
import pytest
import ray
import torch

from ray_fracbackend import __version__
from ray_fracbackend.cli.doctor import diagnose
from tests.processes import processes_with, python_path, wait_until
from tests.ray.nodes import head_node, ray_start

COMMAND = [sys.executable, "-m", "ray_fracbackend", "doctor", "--json"]


def why_no_namespace():
    """Return why this machine cannot mount files in a namespace, None if it can."""
    if shutil.which("unshare") is None:
        return "needs the command unshare"
    done = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, check=False
    )
    return f"mount namespaces are not allowed here ({done.stderr.strip()})" if done.returncode else None


def doctor(*arguments, before=()):
    done = subprocess.run([*before, *COMMAND, *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def lines(found):
    (node,) = found["nodes"]
    return {check["name"]: check for check in node["checks"]}


def test_this_machine():
    """Without a fault the exit code is 0, and every subject has a line."""
    code, found = doctor()
    problems = [check for check in lines(found).values() if check["level"] == "problem"]
    assert (code, found["ok"]) == ((1, False) if problems else (0, True))
    assert {"versions", "NCCL", "Gloo", "host name", "interfaces"} <= set(lines(found))
    assert lines(found)["Gloo"]["level"] == "ok", "the suite itself runs on Gloo here"
    environment = found["nodes"][0]["environment"]
    assert (environment["ray"], environment["torch"]) == (ray.__version__, torch.__version__)


@pytest.mark.full
@pytest.mark.linux(reason="needs mount namespaces")
def test_wrong_hosts_file_and_tiny_shm(tmp_path):
    """A host name that resolves to a foreign address, and a /dev/shm of 32 MiB, are problems; the other lines are unchanged."""
    if reason := why_no_namespace():
        pytest.skip(reason)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n203.0.113.5 {socket.gethostname()}\n")
    mounts = f'mount --bind {hosts} /etc/hosts && mount -t tmpfs -o size=32m none /dev/shm && exec "$@"'
    code, found = doctor(before=["unshare", "--mount", "sh", "-c", mounts, "sh"])
    shown = lines(found)
    assert [shown[name]["level"] for name in ("host name", "/dev/shm", "Gloo")] == ["problem", "problem", "ok"]
    assert (code, "203.0.113.5" in shown["host name"]["detail"]) == (1, True)


@pytest.mark.full
def test_ray_claims_gpus_that_are_not_there(cluster):
    """On a running Ray with num_gpus=2 the line has this number and the GPUs present."""
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has the GPUs that its Ray is told of")
    code, found = doctor("--address", ray.get_runtime_context().gcs_address, "--timeout-s", "200")
    assert "Ray's GPUs" in lines(found), found
    check = lines(found)["Ray's GPUs"]
    assert (code, check["level"]) == (1, "problem")
    assert f"num_gpus=2 of the node, and {torch.cuda.device_count()} GPUs" in check["text"]
    assert ray.get_runtime_context().get_node_id()[:8] in found["nodes"][0]["name"]


def unknown(*_):
    """Stands for a function that the node's installation does not have."""


unknown.__module__ = "only_on_the_driver"


@pytest.mark.parametrize(
    ("function", "timeout_s", "text"),
    [
        pytest.param(lambda *_: time.sleep(60), 3, "no answer within 3 s", id="silent"),
        pytest.param(lambda *_: {"ray_fracbackend": "0.0.1"}, 100, "0.0.1", id="version", marks=pytest.mark.full),
        pytest.param(unknown, 100, "No module named 'only_on_the_driver'", id="no package"),
    ],
)
def test_node_without_facts(cluster, monkeypatch, function, timeout_s, text):
    """A node that does not answer in time, has another version or lacks the package is a problem, and nothing hangs."""
    module = ModuleType("only_on_the_driver")
    module.unknown = unknown
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(diagnose, "collect_facts", function)
    (node,) = diagnose.diagnose_cluster(timeout_s)
    (check,) = node.checks
    assert (check.name, check.level, text in check.text) == ("node", "problem", True), check
    assert f"ray_fracbackend {__version__}" in check.fix


def ended(*arguments, **environment):
    """Return exit code and both outputs of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "ray_fracbackend", "doctor", *arguments],
        env={**{name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.full(but="win32")
def test_wrong_token(cluster):
    """A real cluster that refuses the token, or gets none, is an error in time."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        pytest.skip("this Ray starts clusters without tokens")
    address = ray.get_runtime_context().gcs_address
    for settings in {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8}, {}:
        code, out, err = ended("--address", address, "--timeout-s", "20", **settings)
        assert (code, "no connection" in out + err) == (1, True), out + err


@pytest.mark.full
@pytest.mark.linux(reason="stops a process")
@pytest.mark.skipif(not hasattr(ray.exceptions, "AuthenticationError"), reason="this Ray has no tokens")
def test_head_node_with_a_token(tmp_path):
    """With its token the cluster is checked, by address and by auto; a cluster that stops answering is reported in time."""
    token = {"HOME": str(tmp_path), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "right" * 8}
    with head_node(2, **token) as (address, settings):
        for given in (address, "auto"):
            code, out, err = ended("--address", given, "--json", "--timeout-s", "100", **settings)
            assert (len(json.loads(out)["nodes"]), err) == (1, ""), (code, out)
        of_cluster = processes_with("RAY_TMPDIR", settings["RAY_TMPDIR"])
        (gcs,) = [each for each in of_cluster if each.name() == "gcs_server"]
        gcs.suspend()
        try:
            code, out, err = ended("--address", address, "--timeout-s", "5", **settings)
        finally:
            gcs.resume()
    assert code == 1
    assert f"{address}: no connection within" in out + err


@pytest.mark.full
@pytest.mark.linux(reason="two Ray nodes on one machine")
def test_two_nodes():
    """Equal nodes are one block with both names, and the last line is the verdict; a node that stops is a problem of its own."""
    with head_node() as (address, settings), ray_start(settings, "--address", address, "--num-cpus", "4"):

        def doctor_of_both(*arguments):
            code, out, err = ended("--address", address, *arguments, **settings)
            assert out, err
            return code, out

        assert wait_until(lambda: len(json.loads(doctor_of_both("--json")[1])["nodes"]) == 2, 100)
        code, out = doctor_of_both()
        assert out.startswith("2 equal nodes, with the values of the first: node ")
        assert len([line for line in out.splitlines() if " versions " in line]) == 1
        assert out.splitlines()[-1].startswith(f"{code} problem")
        raylets = [each for each in processes_with("RAY_TMPDIR", settings["RAY_TMPDIR"]) if each.name() == "raylet"]
        last = max(raylets, key=psutil.Process.create_time)
        last.suspend()
        try:
            code, out = doctor_of_both("--json", "--timeout-s", "60")
        finally:
            last.resume()
    levels = {check["name"]: check["level"] for node in json.loads(out)["nodes"] for check in node["checks"]}
    assert (code, levels["node"], levels["Gloo"]) == (1, "problem", "ok")


_STARTS_LOCAL = """
from ray_fracbackend.cli.cluster import connected
with connected(None) as own:
    print("RUNNING", own, flush=True)
    input()
"""


@pytest.mark.full
@pytest.mark.linux(reason="looks for processes")
def test_local_ray(tmp_path):
    """Without any cluster a local Ray is announced in one line, and none of its processes is left."""
    short = tempfile.mkdtemp(prefix="rf")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "RAY_AUTH"))}
    environment = {**own, "HOME": str(tmp_path), "RAY_TMPDIR": short, "PYTHONPATH": python_path()}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", _STARTS_LOCAL], env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "RUNNING True\n"
        below = psutil.Process(process.pid).children(True)
        assert below
        _, err = process.communicate("\n", timeout=60)
    assert "no running Ray cluster found: starting a local one for this command" in err
    assert len(err.splitlines()) == 1
    assert process.returncode == 0
    assert not psutil.wait_procs(below, timeout=20)[1]
    shutil.rmtree(short, ignore_errors=True)
