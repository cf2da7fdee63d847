"""Connection of the commands to a Ray cluster: refusals with their reason, before Ray itself is imported, on real sockets."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from ray_fracbackend.cli import cluster, reach
from ray_fracbackend.cli.cluster import ClusterError, check_address
from tests.processes import free_port, python_path, with_signals

_SETTINGS = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS", "RAY_TMPDIR")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No settings of Ray, and a home and a temporary folder without a cluster."""
    for name in _SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def refused(address, timeout_s=5.0):
    """The error of an address."""
    with pytest.raises(ClusterError) as caught:
        check_address(address, timeout_s)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


@contextmanager
def server(answer):
    """A TCP server that reads and then sends an answer to each client, or nothing and keeps the connection open for None.

    Yields:
        Its address and what it has read.
    """
    read, open_ones = [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                open_ones.append(connection)
                if answer is not None:
                    read.append(connection.recv(65536))
                    connection.sendall(answer)
                    with suppress(OSError):  # the client has gone
                        # Closed with something unread, Windows would drop the answer.
                        connection.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", read
        for connection in open_ones:
            connection.close()


def grpc_answer(status, message=b"no"):
    """Trailers of a gRPC server after its settings."""
    text = str(status).encode()
    block = (
        b"\x88\x40\x0bgrpc-status"
        + bytes([len(text)])
        + text
        + b"\x40\x0cgrpc-message"
        + bytes([len(message)])
        + message
    )
    return reach._frame(4, 0, 0, b"") + reach._frame(1, 5, 1, block)


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
    """What is not an address is one line that says what one looks like, without a connection."""
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
    """An address that comes from RAY_ADDRESS is named with it, for None and for auto; an address that is given is not."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    text = f"no Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: "
    assert str(refused(None)).startswith(text)
    assert str(refused("auto")).startswith(text)
    assert "RAY_ADDRESS" not in str(refused("127.0.0.1:1"))


def test_the_file_of_a_dead_cluster_is_named(tmp_path):
    """The address that ray start has recorded is named with its file, and how to remove it."""
    file = tmp_path / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text(f"127.0.0.1:{free_port()}\n")
    error = refused(None)
    assert (error.reason, f"(from {file})" in str(error), "`ray stop`" in str(error)) == ("no_cluster", True, True)


def test_no_cluster_to_check():
    """Without any address there is nothing to refuse: connected() starts a local Ray."""
    check_address(None)
    assert cluster._target(None).is_local


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 70])
def test_unknown_host(host):
    """A name that does not resolve is no cluster."""
    assert refused(f"{host}:6379").reason == "no_cluster"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"-ERR unknown command\r\n",
        b"",
        b"\0\0",
        reach._frame(4, 0, 0, b"") + reach._frame(1, 5, 1, b"\x8d"),
    ],
    ids=["HTTP/1", "Redis", "closes", "two bytes", "HTTP/2 with 404"],
)
def test_other_servers(answer):
    """A port that answers and is not gRPC's is named so at once."""
    started = time.monotonic()
    with server(answer) as (address, _):
        error = refused(address)
    assert error.reason == "not_ray"
    assert str(error).startswith(f"{address} is not a Ray cluster: ")
    assert "6379" in str(error)
    assert time.monotonic() - started < 3


def test_http_server():
    """Python's own HTTP server is recognized."""
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        error = refused(f"127.0.0.1:{found.server_port}")
        found.shutdown()
    assert (error.reason, "an HTTP server answers" in str(error)) == ("not_ray", True)


def test_silent_port():
    """A port that accepts and never answers is over in time."""
    started = time.monotonic()
    with server(None) as (address, _):
        error = refused(address, 0.5)
    assert error.reason == "no_answer"
    assert "sends nothing within 0.5 s" in str(error)
    assert time.monotonic() - started < 3


@pytest.mark.parametrize("status", [0, 12, 14])
def test_grpc_servers_are_left_to_ray(status):
    """Success, an unknown call and a server that is not ready are for Ray to judge."""
    with server(grpc_answer(status)) as (address, _):
        check_address(address, 5)


TOKENS = {
    "mode not set": ({"RAY_AUTH_TOKEN": "secret1"}, "while RAY_AUTH_MODE is not set; set RAY_AUTH_MODE=token, "),
    "mode disabled": ({"RAY_AUTH_MODE": "disabled"}, "with RAY_AUTH_MODE=disabled; set RAY_AUTH_MODE=token, "),
    "no token": ({"RAY_AUTH_MODE": "token"}, "requires a token, and there is none here; "),
    "wrong token": ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "secret1"}, "refuses the token of RAY_AUTH_TOKEN; "),
    "wrong file": (
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "secret.txt"},
        "refuses the token of RAY_AUTH_TOKEN_PATH=secret.txt; ",
    ),
}


@pytest.mark.parametrize(("settings", "text"), TOKENS.values(), ids=TOKENS)
def test_refused_token(monkeypatch, tmp_path, settings, text):
    """Each cause has its words and where the token comes from, and no token is printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.txt").write_text("secret2\n")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with server(grpc_answer(16)) as (address, _):
        error = refused(address)
    assert error.reason == "authentication"
    assert text in str(error)
    assert "RAY_AUTH_TOKEN_PATH" in str(error)
    assert "ray get-auth-token" in str(error)
    assert not {"secret1", "secret2"} & set(str(error).replace(";", " ").split())


SENT = {
    "variable": ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "one"}, b"Bearer one"),
    "long": ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "x" * 300}, b"Bearer " + b"x" * 300),
    "home": ({"RAY_AUTH_MODE": "token"}, b"Bearer two"),
    "not asked for": ({"RAY_AUTH_TOKEN": "one"}, None),
}


@pytest.mark.parametrize(("settings", "sent"), SENT.values(), ids=SENT)
def test_the_token_that_is_sent(monkeypatch, tmp_path, settings, sent):
    """It is the one that Ray sends: RAY_AUTH_TOKEN before the file in the home, and none unless RAY_AUTH_MODE asks for it."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("two\n")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with server(grpc_answer(0)) as (address, read):
        check_address(address, 5)
    (request,) = read
    assert b"/ray.rpc.NodeInfoGcsService/GetClusterId" in request
    assert (sent or b"Bearer") in request if sent else b"Bearer" not in request


def test_tls_is_left_to_ray(monkeypatch):
    """With RAY_USE_TLS the port is connected to, and Ray does the rest."""
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with server(None) as (address, _):
        check_address(address, 5)


def in_a_process(code, timeout_s=60, **environment):
    """Runs code in a process."""
    return subprocess.run(
        with_signals(sys.executable, "-c", code),
        env={**os.environ, "PYTHONPATH": python_path(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def test_refusals_do_not_import_ray():
    """The check is over before Ray, torch or psutil are imported, and the command's modules import without them."""
    code = (
        "import sys\n"
        "for name in ('ray', 'torch', 'psutil'): sys.modules[name] = None\n"
        "from ray_fracbackend.cli.cluster import connected, ClusterError\n"
        "from ray_fracbackend.cli.doctor import diagnose_machine, diagnose_cluster\n"
        "try:\n"
        "    with connected('127.0.0.1:1'): pass\n"
        "except ClusterError as error:\n"
        "    print(error.reason)\n"
    )
    done = in_a_process(code)
    assert (done.stdout.split(), done.stderr) == (["no_cluster"], "")


# A Ray whose connection hangs, fails or succeeds.
_FAKE_RAY = """
import os, signal, sys, time, types
fake = types.ModuleType("ray")
fake.exceptions = types.SimpleNamespace(RayError=KeyError)
fake.is_initialized = lambda: False
def shutdown(): print("SHUTDOWN", flush=True)
fake.shutdown = shutdown
def init(address, **options):
    os.write(2, b"gcs_client.cc: noise\\n")
    signal.signal(signal.SIGTERM, lambda *_: None) if address == "local" else None
    BODY
fake.init = init
sys.modules["ray"] = fake
from ray_fracbackend.cli.cluster import connected, ClusterError
import ray_fracbackend.cli.cluster as cluster
cluster._check = lambda *_: None
def own_handler(*_): pass
signal.signal(signal.SIGTERM, own_handler)
started = time.monotonic()
try:
    with connected("ADDRESS", TIMEOUT) as own:
        os.write(2, b"after\\n")
        print("INSIDE", own, signal.getsignal(signal.SIGTERM) is own_handler)
except ClusterError as error:
    print(error.reason, error)
except KeyboardInterrupt:
    print("INTERRUPTED")
print(f"{time.monotonic() - started:.1f} s")
"""


def fake_connection(body, address="127.0.0.1:6379", timeout_s=0.5):
    """What connected() does with a Ray whose init has this body."""
    code = _FAKE_RAY.replace("BODY", body).replace("ADDRESS", address).replace("TIMEOUT", str(timeout_s))
    return in_a_process(code)


def test_connection_that_hangs():
    """ray.init that does not end is left behind in time, and the process ends although it never does."""
    done = fake_connection("time.sleep(600)")
    assert done.returncode == 0, done.stderr
    assert "no_answer" in done.stdout
    assert "did not end within 0.5 s" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            "os.write(2, b'Failed: Unauthenticated: InvalidAuthToken'); raise ConnectionError('Failed')",
            "authentication",
        ),
        ("os.write(2, b'Received http2 header with status: 404'); raise ConnectionError('Failed')", "not_ray"),
        (
            "raise RuntimeError('Version mismatch: The cluster was started with:\\\\n Ray: 2.40.0\\\\n')",
            "version_mismatch",
        ),
        ("raise ConnectionError('Could not find any running Ray instance. Please')", "no_cluster"),
        ("raise RuntimeError('first line\\\\nsecond')", "no_answer"),
    ],
)
def test_causes_in_rays_own_output(body, reason):
    """What Ray raises, or its C++ client writes, is one line with its reason."""
    done = fake_connection(body)
    assert done.stdout.splitlines()[1].split()[0] == reason, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ""


def test_an_import_of_ray_that_hangs(tmp_path):
    """It is bounded as the connection is, and the process ends although the import never does."""
    (tmp_path / "ray.py").write_text("import time\ntime.sleep(600)\n")
    code = (
        "import ray_fracbackend.cli.cluster as cluster\n"
        "cluster._check = lambda *_: None\n"
        "try:\n"
        "    with cluster.connected('127.0.0.1:6379', 0.5): pass\n"
        "except cluster.ClusterError as error:\n"
        "    print(error.reason, error)\n"
    )
    done = in_a_process(code, 30, PYTHONPATH=os.pathsep.join([str(tmp_path), python_path()]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(
        "no_answer 127.0.0.1:6379: a cluster answers, but the import of Ray did not end within 0.5 s"
    )


def test_a_local_ray_that_does_not_start():
    """Ray raises a plain Exception then; it is a line, and what was started is shut down."""
    done = fake_connection("raise Exception('The current node timed out during startup. This could\\nhappen')", "local")
    assert done.stdout.splitlines()[:2] == [
        "SHUTDOWN",
        "no_answer Ray did not start on this machine: The current node timed out during startup. This could; try again when this "
        "machine is less busy, or name a running cluster",
    ]
    assert done.stderr == ""


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "local"])
def test_after_the_connection_nothing_is_redirected(address):
    """Ray's output during ray.init is dropped; later output, and SIGTERM, are the process's own again; Ray is shut down."""
    done = fake_connection("", address, 30)
    assert done.stderr == "after\n"
    assert done.stdout.splitlines()[:2] == [f"INSIDE {address == 'local'} True", "SHUTDOWN"]


@pytest.mark.linux(reason="sends a signal to a process that waits")
@pytest.mark.parametrize("address", ["127.0.0.1:6379", "local"])
def test_interrupt_during_the_connection(address):
    """Ctrl-C ends a connection at once."""
    body = "import threading; threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start(); time.sleep(30)"
    done = fake_connection(body, address, 60)
    assert "INTERRUPTED" in done.stdout
    assert float(done.stdout.split()[-2]) < 10


def test_sigterm_during_a_local_start_reaches_the_commands_handler():
    """Ray's handler raises SystemExit; the command's own is called in its place, and stays set."""
    code = (
        "import signal, sys\n"
        "from ray_fracbackend.cli import cluster\n"
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
