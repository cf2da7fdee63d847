"""Ray nodes that ``ray start`` starts, several on this machine if need be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.processes import free_port, python_path, wait_for_port, wait_until


@contextmanager
def head_node(num_cpus: int = 4, **more: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A head node, without a token by default: its address, and the environment of its nodes and drivers."""
    folder, port = tempfile.mkdtemp(prefix="rf"), free_port()  # sockets have short paths
    settings = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", **more}
    options = ("--head", "--port", str(port), "--include-dashboard", "false", "--num-cpus", str(num_cpus))
    try:
        with ray_start(settings, *options):
            wait_for_port(port)
            assert wait_until(Path(folder, "ray", "ray_current_cluster").exists, 60)
            yield f"127.0.0.1:{port}", settings
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_start(settings: dict[str, str], *options: str) -> Iterator[None]:
    """A node; none of its processes is left."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options]
    process = subprocess.Popen(
        [*command, "--min-worker-port", "0", "--max-worker-port", "0"],
        env={**os.environ, "PYTHONPATH": python_path(), **settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        process.wait(60)
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()
