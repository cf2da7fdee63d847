"""ray-fracbackend doctor on this machine, on one with faults in a mount namespace, and on a real Ray."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import ray
import torch

COMMAND = [sys.executable, "-m", "ray_fracbackend", "doctor", "--json"]


def why_no_namespace():
    """Why this machine cannot mount files in a namespace, None where it can."""
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
    """Without a fault the exit code is 0, and every subject has its line."""
    code, found = doctor()
    problems = [check for check in lines(found).values() if check["level"] == "problem"]
    assert (code, found["ok"]) == ((1, False) if problems else (0, True))
    assert {"versions", "Ray's GPUs", "NCCL", "MPS", "ipc", "Gloo", "host name", "interfaces", "environment"} <= set(
        lines(found)
    )
    assert torch.__version__ in lines(found)["versions"]["text"]
    assert lines(found)["Gloo"]["level"] == "ok", "the suite itself runs on Gloo here"


@pytest.fixture(scope="module")
def faulty_machine(tmp_path_factory):
    """The doctor's answer where the host name resolves to a foreign address and /dev/shm has 32 MiB."""
    if reason := why_no_namespace():
        pytest.skip(reason)
    hosts = tmp_path_factory.mktemp("etc") / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n203.0.113.5 {socket.gethostname()}\n")
    mounts = f'mount --bind {hosts} /etc/hosts && mount -t tmpfs -o size=32m none /dev/shm && exec "$@"'
    return doctor(before=["unshare", "--mount", "sh", "-c", mounts, "sh"])


@pytest.mark.linux(reason="needs mount namespaces")
def test_wrong_hosts_file(faulty_machine):
    """The address and the line to write are named; exit code 1."""
    code, found = faulty_machine
    check = lines(found)["host name"]
    assert (code, check["level"]) == (1, "problem")
    assert "203.0.113.5, which is no address of this machine" in check["text"]
    assert "hosts file" in check["fix"]


@pytest.mark.linux(reason="needs mount namespaces")
def test_tiny_shm(faulty_machine):
    """Its size and Docker's option are named; the other lines are as ever."""
    code, found = faulty_machine
    check = lines(found)["/dev/shm"]
    assert (code, check["level"]) == (1, "problem")
    assert "32 MiB free of 32 MiB" in check["text"]
    assert "--shm-size" in check["fix"]
    assert lines(found)["Gloo"]["level"] == "ok"


def test_ray_claims_gpus_that_are_not_there(cluster):
    """On a running Ray with num_gpus=2: the number, the GPUs present, and what to do."""
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has the GPUs that its Ray is told of")
    code, found = doctor("--address", ray.get_runtime_context().gcs_address)
    check = lines(found)["Ray's GPUs"]
    assert (code, check["level"]) == (1, "problem")
    assert f"num_gpus=2 of the node exceeds the GPUs present ({torch.cuda.device_count()})" in check["text"]
    assert "--num-gpus" in check["fix"]
    assert ray.get_runtime_context().get_node_id()[:8] in found["nodes"][0]["node"]


def test_node_without_the_package(cluster, monkeypatch, tmp_path):
    """What a node cannot import is its line, with the fix, in place of a traceback."""
    from ray_fracbackend.cli import doctor

    (tmp_path / "only_on_the_driver.py").write_text("def collect(*_):\n    return None\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(doctor, "collect_machine", importlib.import_module("only_on_the_driver").collect)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    (check,) = doctor._ask(nodes, 100)
    assert (check.level, check.text) == ("problem", "No module named 'only_on_the_driver'")
    assert check.fix == "install only_on_the_driver on that node, as on all others"


def test_silent_node(cluster, monkeypatch):
    """A node that does not answer in time is a problem, not a hang."""
    from ray_fracbackend.cli import doctor

    monkeypatch.setattr(doctor, "collect_machine", never)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    (check,) = doctor._ask(nodes, 1)
    assert (check.level, check.text) == ("problem", "no answer within 1 s")


def never(*_):
    """Hangs."""
    import time

    time.sleep(600)


def test_no_cluster():
    """An address without a cluster: a sentence and exit code 1."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        code, found = doctor("--address", f"127.0.0.1:{unused.getsockname()[1]}")
    assert code == 1
    assert "no Ray cluster at '127.0.0.1:" in found["error"]


@pytest.mark.parametrize("arguments", [["--timeout-s", "0"], ["--timeout-s", "x"], ["--colour"]])
def test_wrong_usage(arguments):
    """Wrong usage is exit code 2."""
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr


_THREE_TIMES = """
import contextlib, io, os
from ray_fracbackend.cli import main

main(["doctor"])
with contextlib.redirect_stdout(io.StringIO()) as piped:
    main(["doctor"])
print("PIPED", piped.getvalue())
os.environ["NO_COLOR"] = "1"
print("NO_COLOR")
main(["doctor"])
"""


@pytest.mark.full
@pytest.mark.linux(reason="needs pseudo terminals")
def test_colours_on_a_terminal_only():
    """A terminal gets colours, unless NO_COLOR says otherwise; what is no terminal gets plain text."""
    terminal, rest = on_terminal([sys.executable, "-c", _THREE_TIMES]).split(b"PIPED")
    piped, without = rest.split(b"NO_COLOR\r\n")
    assert b"\x1b[32mok" in terminal
    assert b"ok " in piped
    assert b"\x1b[" not in piped
    # A package that Ray imports resets the terminal's colours at the end.
    assert b"\x1b[3" not in without


def on_terminal(command):
    import pty

    main, side = pty.openpty()
    with subprocess.Popen(command, stdout=side, stderr=subprocess.DEVNULL) as process:
        os.close(side)
        shown = b""
        try:
            while part := os.read(main, 65536):
                shown += part
        except OSError:  # Linux: the other side is closed
            pass
        os.close(main)
        process.wait(120)
    return shown
