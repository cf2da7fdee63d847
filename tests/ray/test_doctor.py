"""ray-fracbackend doctor on this machine, on one with faults in a mount namespace, and on a real Ray."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
import torch

from ray_fracbackend import __version__
from ray_fracbackend.cli.connect.address import ClusterError
from ray_fracbackend.timeouts import Deadline
from tests.processes import NAPS, free_port, python_path, wait_for_port, wait_until, with_signals
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
    assert {"versions", "Ray's GPUs", "NCCL", "MPS", "ipc", "Gloo", "host name", "interfaces", "environment"} <= set(
        lines(found)
    )
    assert torch.__version__ in lines(found)["versions"]["text"]
    assert found["environment"]["torch"] == torch.__version__
    assert found["environment"]["Ray"] == ray.__version__
    assert lines(found)["Gloo"]["level"] == "ok", "the suite itself runs on Gloo here"


@pytest.fixture(scope="module")
def faulty_machine(tmp_path_factory):
    """Return the doctor's result if the host name resolves to a foreign address and /dev/shm has 32 MiB."""
    if reason := why_no_namespace():
        pytest.skip(reason)
    hosts = tmp_path_factory.mktemp("etc") / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n203.0.113.5 {socket.gethostname()}\n")
    mounts = f'mount --bind {hosts} /etc/hosts && mount -t tmpfs -o size=32m none /dev/shm && exec "$@"'
    return doctor(before=["unshare", "--mount", "sh", "-c", mounts, "sh"])


@pytest.mark.full
@pytest.mark.linux(reason="needs mount namespaces")
def test_wrong_hosts_file(faulty_machine):
    """The address and the line to write are named; the exit code is 1."""
    code, found = faulty_machine
    check = lines(found)["host name"]
    assert (code, check["level"]) == (1, "problem")
    assert "203.0.113.5, which is not an address of this machine" in check["text"]
    assert "hosts file" in check["fix"]


@pytest.mark.full
@pytest.mark.linux(reason="needs mount namespaces")
def test_tiny_shm(faulty_machine):
    """Its size and Docker's option are named; the other lines are unchanged."""
    code, found = faulty_machine
    check = lines(found)["/dev/shm"]
    assert (code, check["level"]) == (1, "problem")
    assert "32 MiB free of 32 MiB" in check["text"]
    assert "--shm-size" in check["fix"]
    assert lines(found)["Gloo"]["level"] == "ok"


@pytest.mark.full
def test_ray_claims_gpus_that_are_not_there(cluster):
    """On a running Ray with num_gpus=2 the line has this number, the GPUs present, and the advice."""
    if torch.cuda.device_count() >= 2:
        pytest.skip("this machine has the GPUs that its Ray is told of")
    code, found = doctor("--address", ray.get_runtime_context().gcs_address)
    check = lines(found)["Ray's GPUs"]
    assert (code, check["level"]) == (1, "problem")
    assert f"num_gpus=2 of the node exceeds the GPUs present ({torch.cuda.device_count()})" in check["text"]
    assert "--num-gpus" in check["fix"]
    assert ray.get_runtime_context().get_node_id()[:8] in found["nodes"][0]["node"]
    assert found["environment"]["torch"] == torch.__version__
    (node,) = found["environment"]["nodes"]
    assert f"Ray {ray.__version__}, torch {torch.__version__}" in node


def test_node_without_the_package(cluster, monkeypatch, tmp_path):
    """If a node cannot import the package, its line states this with the fix instead of a traceback."""
    from ray_fracbackend.cli.doctor import diagnose

    (tmp_path / "only_on_the_driver.py").write_text("def collect(*_):\n    return None\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(diagnose, "collect_packed", importlib.import_module("only_on_the_driver").collect)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    (check,) = diagnose._ask(nodes, 100)
    assert (check.level, check.text) == ("problem", "No module named 'only_on_the_driver'")
    assert check.fix == "install only_on_the_driver on that node, as on the other nodes"


def test_silent_node(cluster, monkeypatch):
    """A node that does not answer in time is a problem, and nothing hangs."""
    from ray_fracbackend.cli.doctor import diagnose

    monkeypatch.setattr(diagnose, "collect_packed", never)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    (check,) = diagnose._ask(nodes, 1)
    assert (check.level, check.text) == ("problem", "no answer within 1 s")


def test_node_with_another_version(cluster, monkeypatch, tmp_path):
    """A node whose ray_fracbackend lacks the function, or whose report lacks needed values, has a line that says so."""
    from ray_fracbackend.cli.doctor import diagnose

    (tmp_path / "ray_fracbackend_newer.py").write_text("def collect(*_):\n    return None\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    newer = importlib.import_module("ray_fracbackend_newer").collect
    newer.__module__ = "ray_fracbackend.cli.newer"
    monkeypatch.setitem(sys.modules, "ray_fracbackend.cli.newer", importlib.import_module("ray_fracbackend_newer"))
    monkeypatch.setattr(diagnose, "collect_packed", newer)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    (check,) = diagnose._ask(nodes, 100)
    assert (check.level, "another version of ray_fracbackend is installed" in check.text) == ("problem", True), check
    assert check.fix.startswith("install ray_fracbackend ")


def packed_by_an_older_one(*_):
    """A report of another version with other field positions: it must not be unpickled."""
    return "0.0.1", pickle.dumps({"worker": "another form"})


def test_a_report_of_another_version(cluster, monkeypatch):
    """Reports are pickled by the position of their fields: a report of another version is not read, and the version is named."""
    from ray_fracbackend.cli.doctor import diagnose

    monkeypatch.setattr(diagnose, "collect_packed", packed_by_an_older_one)
    (check,) = diagnose._ask([node for node in ray.nodes() if node["Alive"]], 100)
    assert (check.level, check.text) == ("problem", "another version of ray_fracbackend is installed: 0.0.1")
    assert check.fix == f"install ray_fracbackend {__version__} on that node, as on this machine"


def test_a_cluster_that_does_not_list_its_nodes(monkeypatch):
    """The head node may stop between the connection and the query: there is a reason and no traceback."""
    from ray_fracbackend.cli.doctor import diagnose

    monkeypatch.setattr(ray, "nodes", never)
    with pytest.raises(ClusterError, match=r"did not list its nodes within 0\.2 s; check the head node") as caught:
        diagnose._ask_all(Deadline(0.2))
    assert caught.value.reason == "no_answer"


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
    assert "no Ray cluster at 127.0.0.1:" in str(found["error"])


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
    """A real cluster that refuses the token is reported in one line, without the retries and warnings of Ray's client."""
    if os.environ.get("RAY_AUTH_MODE") != "token":
        pytest.skip("this Ray starts clusters without tokens")
    address = ray.get_runtime_context().gcs_address
    for settings, text in (
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "wrong" * 8}, "refuses the token of RAY_AUTH_TOKEN;"),
        ({}, "requires a token, and Ray sends none to this address while RAY_AUTH_MODE is not set;"),
    ):
        # The command has no time limit that ends it: Ray's client continues for minutes.
        code, out, err = ended("--address", address, "--timeout-s", "600", **settings)
        (shown,) = (out + err).splitlines()
        assert (code, text in shown, "ray get-auth-token" in shown) == (1, True, True), shown


@pytest.fixture
def own_head(tmp_path_factory):
    """Address, settings and GCS of a cluster that ``ray start`` has started with its own token."""
    if not hasattr(ray.exceptions, "AuthenticationError"):
        pytest.skip("this Ray has no tokens")
    folder = tmp_path_factory.mktemp("head", numbered=True)
    short = tempfile.mkdtemp(prefix="rf")  # sockets have short paths
    settings = {"HOME": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "right" * 8, "RAY_TMPDIR": short}
    port = free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus", "2"]
    command += ["--port", str(port), "--include-dashboard", "false", "--min-worker-port", "0", "--max-worker-port", "0"]
    with subprocess.Popen(
        command, env={**os.environ, **settings}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for_port(port)
            end = time.monotonic() + 60
            while not Path(short, "ray", "ray_current_cluster").exists() and time.monotonic() < end:
                time.sleep(0.1)
            gcs = [each for each in psutil.Process(process.pid).children(True) if "gcs_server" in each.name()]
            yield f"127.0.0.1:{port}", settings, gcs
        finally:
            below = psutil.Process(process.pid).children(True)
            process.terminate()
            process.wait(60)
            for each in below:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            shutil.rmtree(short, ignore_errors=True)


@pytest.mark.full
@pytest.mark.linux(reason="stops a process")
def test_head_node_with_a_token(own_head):
    """With its token the cluster is checked, by address and by auto; a cluster that stops answering is reported in time."""
    address, settings, gcs = own_head
    for given in (address, "auto"):
        code, out, err = ended("--address", given, "--json", "--timeout-s", "100", **settings)
        assert (len(json.loads(out)["nodes"]), err) == (1, ""), (code, out)
    for each in gcs:
        each.suspend()
    try:
        code, out, err = ended("--address", address, "--timeout-s", "5", **settings)
    finally:
        for each in gcs:
            each.resume()
    assert (code, len((out + err).splitlines())) == (1, 1), out + err
    assert "the port accepts connections, but ray.init() did not end within" in out + err


@pytest.mark.full
@pytest.mark.linux(reason="two Ray nodes on one machine")
def test_equal_nodes():
    """Two nodes of one cluster are one block with both names, and the last line is the verdict; JSON has each node's lines."""
    with head_node() as (address, settings), ray_start(settings, "--address", address, "--num-cpus", "4"):
        assert wait_until(
            lambda: len(json.loads(ended("--address", address, "--json", **settings)[1])["nodes"]) == 2, 100
        )
        code, out, _ = ended("--address", address, **settings)
        found = json.loads(ended("--address", address, "--json", **settings)[1])
    lines = out.splitlines()
    assert lines[0] == "2 equal nodes; the lines show names and addresses of the first one"
    assert all(node["node"] in " ".join(lines[1:3]) for node in found["nodes"])
    assert sum(line.startswith(("  ok       versions ", "  problem  versions ")) for line in lines) == 1
    levels = [check["level"] for check in found["nodes"][0]["checks"]]
    assert f"{levels.count('problem')} problem" in lines[-1]
    assert f"{levels.count('warning')} warning" in lines[-1]
    assert code == (1 if "problem" in levels else 0)


_STARTS_LOCAL = f"""
import os, sys
from ray_fracbackend.cli.connect.cluster import connected
with connected(None) as own:
    print("RUNNING", own, flush=True)
    if len(sys.argv) > 1:
        import time
        {NAPS}
"""


@pytest.mark.full
@pytest.mark.linux(reason="sends signals")
@pytest.mark.parametrize("ending", [None, signal.SIGINT, signal.SIGTERM], ids=["end", "Ctrl-C", "SIGTERM"])
def test_local_ray(tmp_path, ending):
    """Without any cluster a local Ray is announced in one line, and none of its processes is left, however the command ends."""
    short = tempfile.mkdtemp(prefix="rf")
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "RAY_AUTH"))}
    command = with_signals(sys.executable, "-c", _STARTS_LOCAL, *(["wait"] if ending else []))
    environment = {**own, "HOME": str(tmp_path), "RAY_TMPDIR": short, "PYTHONPATH": python_path()}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "RUNNING True\n"
        below = psutil.Process(process.pid).children(True)
        assert below
        if ending:
            process.send_signal(ending)
        _, err = process.communicate(timeout=60)
    assert "no running Ray cluster found: starting a local one for this command" in err.splitlines()[0]
    assert ending or len(err.splitlines()) == 1
    # Without the command's own handler Ray's stays installed for SIGTERM: it exits with the signal's number.
    assert process.returncode == {None: 0, signal.SIGINT: -2, signal.SIGTERM: 15}[ending]
    assert not psutil.wait_procs(below, timeout=20)[1]
    shutil.rmtree(short, ignore_errors=True)


@pytest.mark.parametrize("arguments", [["--timeout-s", "0"], ["--timeout-s", "x"], ["--colour"]])
def test_wrong_usage(arguments):
    """Wrong usage exits with code 2, here as JSON."""
    code, found = doctor(*arguments)
    assert (code, found["error"]["reason"]) == (2, "wrong_usage")
    assert arguments[0] in found["error"]["message"]


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
    """Output to a terminal has colours, unless NO_COLOR is set; other output is plain text."""
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
