"""Connections of the commands to a Ray cluster: refusals with a reason, before Ray is imported, on real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from ray_fracbackend.cli.connect.address import ClusterError, target_of
from ray_fracbackend.cli.connect.attempt import cluster_error
from ray_fracbackend.cli.connect.cluster import check_address
from tests.processes import free_port, processes_with, python_path, wait_until, with_signals

_SETTINGS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_TMPDIR")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """Remove Ray's settings, and use a home and a temporary folder without a cluster."""
    for name in _SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def refused(address, timeout_s=5.0):
    """Return the error of an address."""
    with pytest.raises(ClusterError) as caught:
        check_address(address, timeout_s)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


WRONG = {
    "empty": ("", "''"),
    "no port": ("head", "head is not"),
    "no number": ("head:port", "head:port is not"),
    "port 0": ("head:0", "head:0 is not"),
    "port too high": ("head:70000", "head:70000 is not"),
    "a path": ("head:6379/x", "head:6379/x is not"),
    "HTTP": ("http://head:8265", "http://head:8265 is an HTTP address"),
}


@pytest.mark.parametrize(("address", "text"), WRONG.values(), ids=WRONG)
def test_malformed_addresses(address, text):
    """For a malformed address one line shows the format of an address, without a connection."""
    error = refused(address)
    assert error.reason == "no_cluster"
    assert str(error).startswith(text)
    assert "HOST:PORT, ray://HOST:PORT or auto" in str(error)


def test_nothing_listens():
    """A refused connection names the address, the cause and how to start a cluster."""
    address = f"127.0.0.1:{free_port()}"
    error = refused(address)
    assert error.reason == "no_cluster"
    assert str(error).startswith(f"no Ray cluster at {address}: Connection refused; ")
    assert "ray start --head" in str(error)


def test_the_variable_is_named(monkeypatch):
    """If the address comes from RAY_ADDRESS, the error names the variable, for None and for auto; not for an explicit address."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    text = f"no Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: "
    assert str(refused(None)).startswith(text)
    assert str(refused("auto")).startswith(text)
    assert "RAY_ADDRESS" not in str(refused("127.0.0.1:1"))


def test_the_file_of_a_dead_cluster_is_named(tmp_path):
    """If ray start recorded the address, the error names the file and how to remove it."""
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text(f"127.0.0.1:{free_port()}\n")
    error = refused(None)
    assert (error.reason, f"(from {file})" in str(error), "`ray stop`" in str(error)) == ("no_cluster", True, True)


def test_no_cluster_to_check():
    """Without any address nothing is refused: connected() starts a local Ray."""
    check_address(None)
    assert target_of(None).is_local


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70])
def test_unknown_host(host):
    """A host name that does not resolve is refused."""
    assert refused(f"{host}:6379").reason == "no_cluster"


@pytest.fixture
def address_file(tmp_path):
    """Write a file as ray start does, for a cluster that has ended."""
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("127.0.0.1:1\n")
    return file


@pytest.mark.skipif(
    sys.platform == "win32" or os.getuid() != 0, reason="gives a file to another user: needs root on Unix"
)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"RAY_AUTH_TOKEN": "secret1"}, "authentication"),
        ({"RAY_AUTH_TOKEN": "secret1", "RAY_AUTH_MODE": "token"}, "authentication"),
        ({"RAY_AUTH_TOKEN": "secret1", "RAY_AUTH_MODE": "disabled"}, "no_cluster"),
        ({}, "no_cluster"),
    ],
    ids=["a token", "mode token", "mode disabled", "no token"],
)
def test_a_file_of_another_user(address_file, monkeypatch, settings, reason):
    """Another user could create /tmp/ray first and name their cluster: no token is sent there, and without a token nothing is refused."""
    os.chown(address_file, 4242, 4242)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    error = refused("auto")
    assert error.reason == reason
    assert "secret1" not in str(error)
    if reason == "authentication":
        assert f"{address_file} belongs to another user (uid 4242)" in str(error)
        assert "--address 127.0.0.1:1" in str(error)


def in_a_process(code, timeout_s=60, **environment):
    """Run code in a process."""
    return subprocess.run(
        with_signals(sys.executable, "-c", code),
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_refusals_do_not_import_ray():
    """The check ends before Ray, torch or psutil are imported, and the command's modules import without them."""
    code = (
        "import sys\n"
        "for name in ('ray', 'torch', 'psutil'): sys.modules[name] = None\n"
        "from ray_fracbackend.cli.connect.cluster import connected, ClusterError\n"
        "from ray_fracbackend.cli.doctor.diagnose import diagnose_machine, diagnose_cluster\n"
        "try:\n"
        "    with connected('127.0.0.1:1'): pass\n"
        "except ClusterError as error:\n"
        "    print(error.reason)\n"
    )
    done = in_a_process(code)
    assert (done.stdout.split(), done.stderr) == (["no_cluster"], "")


# A Ray whose connection hangs, fails or succeeds, in the child process and in the command.
_FAKE_RAY = """
import os, signal, sys, time, types
exceptions = types.SimpleNamespace(RayError=KeyError)
def is_initialized(): return False
def shutdown(): print("SHUTDOWN", flush=True)
def say(text): os.write(2, text.encode() + b"\\n")
def init(address, **options):
    say("[2026-11-27 00:45:14,140 W 1 1] gcs_client.cc:210: noise")
    signal.signal(signal.SIGTERM, lambda *_: None) if address == "local" else None
    BODY
"""
_CONNECT = """
import os, signal, time
from ray_fracbackend.cli.connect import attempt, cluster
from ray_fracbackend.cli.connect.address import ClusterError
attempt._IMPORT_S = BOUND
cluster.check_listening = lambda *_: None
def own_handler(*_): pass
signal.signal(signal.SIGTERM, own_handler)
started = time.monotonic()
try:
    with cluster.connected("ADDRESS", TIMEOUT) as own:
        os.write(2, b"after\\n")
        print("INSIDE", own, signal.getsignal(signal.SIGTERM) is own_handler)
except ClusterError as error:
    print(error.reason, error)
except KeyboardInterrupt:
    print("INTERRUPTED")
print(f"{time.monotonic() - started:.1f} s")
"""


@pytest.fixture
def connect(tmp_path):
    """Return the result of connected() with a Ray whose init has the given body."""

    def connect(body, address="127.0.0.1:6379", timeout_s=30.0, import_s=60.0):
        (tmp_path / "ray.py").write_text(_FAKE_RAY.replace("BODY", body))
        code = _CONNECT.replace("ADDRESS", address).replace("TIMEOUT", str(timeout_s))
        code = code.replace("BOUND", str(import_s))
        done = in_a_process(code, PYTHONPATH=os.pathsep.join([str(tmp_path), python_path()]))
        assert wait_until(lambda: not processes_with("PYTHONPATH", str(tmp_path)), 20)
        return done

    return connect


def test_connection_that_hangs(connect):
    """A connection that hangs ends in time, and no process is left."""
    done = connect("time.sleep(600)", timeout_s=2)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "no_answer 127.0.0.1:6379: the port accepts connections, but ray.init() did not end within 2 s"
    )
    assert "--timeout-s" in done.stdout


def test_an_import_of_ray_that_hangs(connect):
    """The import has its own time limit: the command's limit is that of the connection."""
    done = connect("pass\ntime.sleep(600)", timeout_s=2, import_s=3.0)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the import of Ray did not end within 3 s" in done.stdout


_INVALID = "Failed to get cluster ID from GCS server: Unauthenticated: RPC error: InvalidAuthToken: Authentication token is missing"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (f"say({_INVALID!r}); time.sleep(600)", "authentication"),
        ("say('Received http2 header with status: 404'); time.sleep(600)", "not_ray"),
        ("raise RuntimeError('Version mismatch: The cluster was started with:\\n Ray: 2.40.0\\n')", "version_mismatch"),
        ("raise ConnectionError('Could not find any running Ray instance. Please')", "no_cluster"),
        ("raise RuntimeError('first line\\nsecond')", "no_answer"),
        ("os.abort()", "no_answer"),
    ],
    ids=["token", "http", "versions", "no Ray", "an error", "a crash"],
)
def test_causes_in_rays_own_output(connect, body, reason):
    """An error of Ray, or a line of its C++ client, becomes one line with a reason as soon as it appears; Ray would go on for a minute."""
    done = connect(body)
    shown, seconds = done.stdout.splitlines()
    assert shown.split()[0] == reason, done.stdout + done.stderr
    assert ("(Ray: 2.40.0)" in shown) == (reason == "version_mismatch")
    assert float(seconds.split()[0]) < 25
    assert done.stderr == ""


def test_a_word_about_tokens_is_no_refusal(connect):
    """Ray may log the source of its token; this is not a refusal."""
    assert "INSIDE" in connect("say('I auth.cc:7: Loaded authentication token from a file')").stdout


def test_a_port_that_is_not_rays(connect):
    """Ray's client reports after 5 s that it gets no answer; a slow head node has the rest of the time."""
    line = "rpc_client.h:153: Failed to connect to GCS at address 10.0.0.3:8265 within 5 seconds."
    done = connect(f"say({line!r}); time.sleep(600)", timeout_s=2)
    assert done.stdout.startswith(
        "no_answer 127.0.0.1:6379: the port accepts connections, but Ray's client got no answer within 5 s; "
    )
    assert "6379 by default" in done.stdout
    assert "INSIDE" in connect(f"say({line!r}); time.sleep(0.5)").stdout


TOKENS = {
    "mode not set": ({"RAY_AUTH_TOKEN": "secret1"}, "while RAY_AUTH_MODE is not set; set RAY_AUTH_MODE=token, "),
    "mode disabled": ({"RAY_AUTH_MODE": "disabled"}, "with RAY_AUTH_MODE=disabled; set RAY_AUTH_MODE=token, "),
    "no token": ({"RAY_AUTH_MODE": "token"}, "requires a token, and this process has none; "),
    "wrong token": ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret1"}, "refuses the token of RAY_AUTH_TOKEN; "),
    "wrong file": (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "secret.txt"},
        "refuses the token of RAY_AUTH_TOKEN_PATH=secret.txt; ",
    ),
}


@pytest.mark.parametrize(("settings", "text"), TOKENS.values(), ids=TOKENS)
def test_refused_token(monkeypatch, tmp_path, settings, text):
    """Each cause has its own message with the source of the token, and no token is printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("secret2\n")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    error = str(cluster_error(target_of("127.0.0.1:6379"), _INVALID))
    assert error.startswith("the Ray cluster at 127.0.0.1:6379 ")
    assert text in error
    assert "RAY_AUTH_TOKEN_PATH" in error
    assert "ray get-auth-token" in error
    assert not {"secret1", "secret2"} & set(error.replace(";", " ").split())


def test_a_local_ray_that_does_not_start(connect):
    """Ray raises a plain Exception; it becomes one line, and the started processes are shut down."""
    done = connect("raise Exception('The current node timed out during startup. This could\\nhappen')", "local")
    assert done.stdout.splitlines()[:2] == [
        "SHUTDOWN",
        "no_answer Ray did not start on this machine: The current node timed out during startup. This could; try again when this "
        "machine is less busy, or name a running cluster",
    ]
    assert done.stderr == ""


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "local"])
def test_after_the_connection_nothing_is_redirected(connect, address):
    """Ray's output during ray.init is dropped. Later output, and SIGTERM, are the process's own again. Ray is shut down."""
    done = connect("pass", address)
    assert done.stderr == "after\n"
    assert done.stdout.splitlines()[:2] == [f"INSIDE {address == 'local'} True", "SHUTDOWN"]


@pytest.mark.linux(reason="sends a signal to a process that waits")
@pytest.mark.parametrize("address", ["127.0.0.1:6379", "local"])
def test_interrupt_during_the_connection(connect, address):
    """Ctrl-C ends a connection and the attempt in the child process at once."""
    to = "getppid" if address != "local" else "getpid"
    done = connect(f"time.sleep(0.3); os.kill(os.{to}(), signal.SIGINT); time.sleep(30)", address, 60)
    assert "INTERRUPTED" in done.stdout
    assert float(done.stdout.split()[-2]) < 20


@pytest.mark.linux(reason="kills a process that waits")
def test_the_attempt_ends_with_the_command(connect):
    """The child ends with the command in any case, because it holds the other end of a pipe."""
    assert connect("os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)").returncode == -signal.SIGKILL


def test_sigterm_during_a_local_start_reaches_the_commands_handler():
    """Ray's handler would raise SystemExit; the command's own handler is called instead and stays set."""
    code = (
        "import signal, sys\n"
        "from ray_fracbackend.cli.connect import cluster\n"
        "class Terminated(BaseException): pass\n"
        "def own(*_): raise Terminated\n"
        "signal.signal(signal.SIGTERM, own)\n"
        "try:\n"
        "    with cluster.own_sigterm():\n"
        "        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "except Terminated:\n"
        "    print('terminated', signal.getsignal(signal.SIGTERM) is own)\n"
    )
    assert in_a_process(code).stdout == "terminated True\n"
