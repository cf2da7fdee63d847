"""Addresses of Ray clusters, and connections that fail, on real sockets; a Ray that hangs or fails is a fake."""

import ctypes
import os
import socket
import subprocess
import sys

import pytest
from ray._private.services import find_gcs_addresses

from ray_fracbackend.cli.address import Target, target_of
from ray_fracbackend.cli.program import CommandError
from tests.processes import free_port, processes_with, python_path, wait_until, with_signals


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """Use a temporary folder without a cluster."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


@pytest.fixture
def address_file(tmp_path):
    """Write a file as ray start does."""
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("10.0.0.3:6379\n")
    return file


@pytest.mark.parametrize(
    ("address", "named", "target"),
    [
        (None, "", Target("local", "local", automatic=True)),
        ("local", "", Target("local", "local")),
        ("head:1", "head:2", Target("head:1", "head:1")),
        (None, "head:2", Target("head:2", "RAY_ADDRESS=head:2")),
        ("auto", "head:2", Target("head:2", "RAY_ADDRESS=head:2")),
        ("", "", Target("", "''")),
    ],
)
def test_addresses(monkeypatch, address, named, target):
    """The user's address comes first, then RAY_ADDRESS; without any, a local Ray is started."""
    monkeypatch.setenv("RAY_ADDRESS", named)
    assert target_of(address) == target


@pytest.mark.parametrize(("address", "named"), [("auto", ""), (None, "auto")])
def test_no_cluster_on_this_machine(monkeypatch, address, named):
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(CommandError, match="ray start --head") as caught:
        target_of(address)
    assert caught.value.reason == "no_cluster"


@pytest.mark.parametrize("address", [None, "auto"])
def test_the_cluster_of_this_machine(address_file, address):
    """The address in the file is used, not looked up again."""
    assert target_of(address) == Target("10.0.0.3:6379", f"10.0.0.3:6379 (from {address_file})", automatic=True)


@pytest.mark.skipif(
    sys.platform == "win32" or os.getuid() != 0, reason="gives a file to another user: needs root on Unix"
)
@pytest.mark.parametrize("address", [None, "auto"])
def test_a_file_of_another_user(address_file, address):
    """Another user could create /tmp/ray first and name their cluster: only an explicit address connects there."""
    os.chown(address_file, 4242, 4242)
    with pytest.raises(CommandError, match=r"belongs to another user.*--address 10\.0\.0\.3:6379") as caught:
        target_of(address)
    assert caught.value.reason == "other_user"
    assert target_of("10.0.0.3:6379").address == "10.0.0.3:6379"


@pytest.mark.linux(reason="links and FIFOs are those of Unix")
@pytest.mark.parametrize(
    "plant", [lambda file: file.symlink_to("/proc/1/comm"), lambda file: os.mkfifo(file)], ids=["link", "FIFO"]
)
def test_only_a_file_has_the_address(address_file, plant):
    """A link could lead to text that another user wrote into a file of root; a FIFO would block the command."""
    address_file.unlink()
    plant(address_file)
    assert target_of(None) == Target("local", "local", automatic=True)


@pytest.mark.linux(reason="gives a process another name")
def test_the_token_goes_to_the_address_that_was_checked(address_file):
    """Ray's own search prefers the address on the command line of any user's process that is named raylet."""
    # Ray replaces loopback by the node's own address.
    with socket.create_server(("0.0.0.0", 0)) as own, socket.create_server(("127.0.0.1", 0)) as planted:
        address_file.write_text(f"127.0.0.1:{own.getsockname()[1]}")
        other = f"127.0.0.1:{planted.getsockname()[1]}"
        raylet = ["/x/raylet", "-c", "read", f"--gcs-address={other}"]
        command = [sys.executable, "-m", "ray_fracbackend", "plan", "--num-workers", "1"]
        env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret" * 8}
        own.settimeout(100)
        with (
            subprocess.Popen(raylet, executable="/bin/bash", stdin=subprocess.PIPE),
            subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL) as plan,
        ):
            assert other in find_gcs_addresses()
            own.accept()  # the test whether something listens
            assert own.accept()[0].recv(16) == b"PRI * HTTP/2.0\r\n"  # Ray
            plan.kill()
        planted.setblocking(False)
        with pytest.raises(BlockingIOError):
            planted.accept()


# A Ray whose connection hangs, fails or succeeds.
_FAKE_RAY = """
import os, signal, sys, time, types
def shutdown(): print("SHUTDOWN", flush=True)
def init(address, **options):
    signal.signal(signal.SIGTERM, lambda *_: None) if address == "local" else None
    BODY
"""
_CONNECT = """
import os, signal, sys, time, types
sys.modules["ray_fracbackend._ray"] = types.SimpleNamespace(send_token=lambda: None)
import ray_fracbackend
ray_fracbackend._ray = sys.modules["ray_fracbackend._ray"]
from ray_fracbackend.cli.cluster import connected
from ray_fracbackend.cli.program import CommandError
def own_handler(*_): pass
signal.signal(signal.SIGTERM, own_handler)
started = time.monotonic()
try:
    with connected("ADDRESS", TIMEOUT) as own:
        print("INSIDE", own, signal.getsignal(signal.SIGTERM) is own_handler)
except CommandError as error:
    print(error.reason, error)
except KeyboardInterrupt:
    print("INTERRUPTED")
print(f"{time.monotonic() - started:.1f} s")
"""


@pytest.fixture
def connect(tmp_path):
    """Return the lines of connected() with a Ray whose init has the given body."""

    def connect(body, address="head", timeout_s=30.0):
        (tmp_path / "ray.py").write_text(_FAKE_RAY.replace("BODY", body))
        code = _CONNECT.replace("ADDRESS", address).replace("TIMEOUT", str(timeout_s))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), python_path()])}
        command = with_signals(sys.executable, "-c", code)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert wait_until(lambda: not processes_with("PYTHONPATH", str(tmp_path)), 20)
        assert (done.returncode, done.stderr) == (0, "")
        *lines, last = done.stdout.splitlines()
        assert float(last.split()[0]) < 20
        return lines

    return connect


# The system's text, on Windows in its language.
_REFUSED = "Connection refused" if sys.platform != "win32" else ctypes.FormatError(10061).rstrip(".\r\n ")


@pytest.mark.parametrize(
    ("body", "address", "lines"),
    [
        ("time.sleep(600)", "head", ["no_answer head: no connection within 1 s; check"]),
        ("pass", f"127.0.0.1:{free_port()}", ["no_cluster no connection to Ray at 127.0.0.1:", f"{_REFUSED}; start"]),
        ("pass", "no-such-host.invalid:6379", ["no_cluster no connection to Ray at no-such-host.invalid:6379: "]),
        ("raise RuntimeError('Version mismatch')", "head", ["no_cluster no connection to Ray at head: Version mismatch; start"]),
        ("raise Exception('timed out')", "local", ["SHUTDOWN", "no_cluster no connection to Ray at local: timed out; start"]),
    ],
    ids=["hangs", "refused", "unknown host", "an error", "local"],
)  # fmt: skip
def test_connections_that_fail(connect, body, address, lines):
    """The command ends in time with the address and the words of Ray or of the system; a local Ray is shut down."""
    said = "\n".join(connect(body, address, timeout_s=1 if "sleep" in body else 30))
    assert all(line in said for line in lines)
    assert ("SHUTDOWN" in said) == (address == "local")


@pytest.mark.parametrize("address", ["head", "local"])
def test_a_connection(connect, address):
    """SIGTERM is the process's own again, and Ray is shut down at the end."""
    assert connect("pass", address) == [f"INSIDE {address == 'local'} True", "SHUTDOWN"]


@pytest.mark.linux(reason="sends a signal to a process that waits")
@pytest.mark.parametrize("address", ["head", "local"])
def test_interrupt_during_the_connection(connect, address):
    assert "INTERRUPTED" in connect("time.sleep(0.3); os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", address, 60)
