"""A first connection to a cluster, in a child process that can be ended. Standard library only; the child imports Ray.

If a port is not Ray's or a token is refused, Ray's client retries for a minute, cannot be interrupted, and prints the cause only
on standard error. The child is killed at the first line after which no retry can succeed.
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ray_fracbackend.cli.connect.address import ClusterError, Target
from ray_fracbackend.cli.connect.token import refusal
from ray_fracbackend.timeouts import Deadline

# With the import path of the parent.
_CHILD = """
import os, sys
sys.path[:] = {path!r}
from ray_fracbackend.cli.parent import end_with_parent
end_with_parent()
import ray
print({imported!r}, file=sys.stderr, flush=True)
try:
    ray.init({address!r}, log_to_driver=False, logging_level="ERROR")
except Exception as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
ray.shutdown()
"""
_IMPORTED = "ray_fracbackend: imported"
# Enough for a slow file system on a busy machine.
_IMPORT_S = 60.0
# Lines of Ray's C++ code.
_LOG = re.compile(r"\.(cc|h):\d+: ")
_TOKEN = re.compile(r"Unauthenticated|InvalidAuthToken|authentication token")
_HTTP = re.compile(r"http2 header with status|http1\.x server|HTTP/1\.")
# After these no retry can succeed.
_FINAL = re.compile(r"Unauthenticated|InvalidAuthToken|http2 header with status")
# Ray's client writes this after its first try, and retries for half a minute.
_SILENT = re.compile(r"Failed to connect to GCS at address \S+ within (\S+) seconds")
_VERSIONS = re.compile(r"[Vv]ersion mismatch")
# Time after that line, for a slow head node.
_PATIENCE_S = 10.0
_PORTS = "name the port that `ray start --head` prints (6379 by default), not the dashboard's (8265)"
# Time for a killed child to end.
_KILLED_S = 5.0


def attempt(target: Target, deadline: Deadline) -> None:
    """Connect to a cluster and disconnect.

    Args:
        target: The cluster; not a local Ray.
        deadline: Time limit of the connection. It begins when the child has imported Ray, which takes seconds.

    Raises:
        ClusterError: There is no connection; ``reason`` says why.
    """
    left_s, limit, late = deadline.left_s, Deadline(_IMPORT_S), _not_imported(target)
    with _child(target.address) as (child, lines):
        said = []
        while True:
            try:
                line = lines.get(timeout=limit.left_s)
            except queue.Empty:
                raise late from None
            if line is None:
                break
            if line.strip() == _IMPORTED:
                limit, late = Deadline(left_s), _not_joined(target, deadline)
                continue
            said.append(line)
            if _FINAL.search(line):
                raise cluster_error(target, line)
            if silent := _SILENT.search(line):
                limit, late = Deadline(min(_PATIENCE_S, limit.left_s)), _silent(target, silent[1])
        if child.wait(_KILLED_S) != 0:
            raise cluster_error(target, "".join(said))


@contextmanager
def _child(address: str) -> Iterator[tuple[subprocess.Popen[str], queue.SimpleQueue[str | None]]]:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD.format(path=sys.path, address=address, imported=_IMPORTED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C in a terminal then reaches only this process, which ends the child.
        start_new_session=True,
    )

    def read() -> None:
        assert child.stderr is not None
        with suppress(OSError, ValueError):
            for line in child.stderr:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
        yield child, lines
    finally:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.wait(_KILLED_S)


def cluster_error(target: Target, text: str) -> ClusterError:
    """Return the error for a ``ray.init`` that failed.

    Args:
        target: The cluster.
        text: Output and error of Ray.
    """
    if _TOKEN.search(text):
        return ClusterError(f"the Ray cluster at {target.text} {refusal(target.automatic)}", "authentication")
    if _HTTP.search(text):
        return ClusterError(f"{target.text} is not a Ray cluster: an HTTP server or proxy answers; {_PORTS}", "not_ray")
    if _VERSIONS.search(text):
        versions = "; ".join(re.findall(r"(?:Ray|Python): \S+", text)) or "Ray's or Python's version differs"
        fix = "run this command with the cluster's versions of Ray and Python"
        return ClusterError(f"{target.text}: the cluster has other versions ({versions}); {fix}", "version_mismatch")
    lines = [line for line in text.splitlines() if line.strip() and not _LOG.search(line)]
    if "any running Ray instance" in text:
        fix = "start one with `ray start --head`, or name its address"
        return ClusterError(f"no Ray cluster runs on this machine; {fix}", "no_cluster")
    said = lines[0].rstrip(".") if lines else "no error message"
    return ClusterError(f"no connection to Ray at {target.text}: {said}; check the head node", "no_answer")


def _silent(target: Target, seconds: str) -> ClusterError:
    return ClusterError(
        f"{target.text}: the port accepts connections, but Ray's client got no answer within {seconds} s; {_PORTS}, and check "
        "that the head node is not overloaded or stopped",
        "no_answer",
    )


def _not_imported(target: Target) -> ClusterError:
    text = f"{target.text}: the port accepts connections, but the import of Ray did not end within {_IMPORT_S:g} s"
    return ClusterError(f"{text}; check the file system that Python's packages are on", "no_answer")


def _not_joined(target: Target, deadline: Deadline) -> ClusterError:
    return ClusterError(
        f"{target.text}: the port accepts connections, but ray.init() did not end within {deadline.budget_s:.3g} s; a driver needs a "
        "Ray node on its own machine (`ray start --address=...`), or a Ray Client server (ray://HOST:10001); or raise --timeout-s",
        "no_answer",
    )
