"""Command ``doctor``: collect reports of this machine or of every node of a Ray cluster, and check them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_fracbackend import __version__
from ray_fracbackend.cli.checks import Check, Diagnosis, MachineInfo, check_cluster, check_machine
from ray_fracbackend.cli.cluster import connected, root_cause, wait
from ray_fracbackend.decide.rendezvous import IFNAME, owner_of
from ray_fracbackend.errors import RendezvousError
from ray_fracbackend.worker.network import check_gloo_device, resolve
from ray_fracbackend.worker.probe import probe_machine

# Ray hides GPUs from a task that asks for none; the node's own CUDA_VISIBLE_DEVICES stays.
_ALL_DEVICES = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


def collect_machine(node_id: str = "", node_ip: str = "127.0.0.1", ray_gpus: float | None = None) -> MachineInfo:
    """Collect the report of this machine. Creates no CUDA context and no process group.

    Args:
        node_id: Ray's id of the node, empty without Ray.
        node_ip: Ray's address of the node.
        ray_gpus: num_gpus of the node in Ray.
    """
    started = time.perf_counter()
    addresses, missing = _host_addresses()
    lookup_s = time.perf_counter() - started
    worker = probe_machine(node_id, node_ip)
    interface = worker.env.get(IFNAME) or owner_of(worker, node_ip)
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return MachineInfo(
        worker=worker,
        package_version=__version__,
        python_version=platform.python_version(),
        host_addresses=addresses,
        host_missing=missing,
        host_lookup_s=lookup_s,
        gloo_interface=interface,
        gloo_device_missing=_gloo_device_missing(interface) if worker.network.gloo_missing is None else None,
        shm_total_bytes=shm.total if shm else None,
        shm_free_bytes=shm.free if shm else None,
        ray_gpus=ray_gpus,
        vgpu_preloaded=_is_loaded("libvgpu"),
        name_server_silent=name_server_silent(node_ip),
    )


def diagnose_machine() -> Diagnosis:
    """Check this machine."""
    machine = collect_machine()
    return Diagnosis({f"this machine ({machine.worker.hostname})": check_machine(machine)})


def diagnose_cluster(address: str, timeout_s: float) -> Diagnosis:
    """Check every node of a running cluster; a node that does not answer is a problem.

    Args:
        address: Of the cluster, as ``ray.init`` takes it; ``auto`` for the one that runs on this machine.
        timeout_s: Bound on the answers, in seconds.

    Raises:
        ConnectionError: There is no cluster at the address.
    """
    with connected(address):
        nodes = [node for node in ray.nodes() if node["Alive"]]
        answers = _ask(nodes, timeout_s)
    checks: dict[str, tuple[Check, ...]] = {}
    for node, answer in zip(nodes, answers, strict=True):
        name = f"node {node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:8]})"
        checks[name] = (answer,) if isinstance(answer, Check) else check_machine(answer, len(nodes))
    return Diagnosis(checks, check_cluster([answer for answer in answers if isinstance(answer, MachineInfo)]))


def _ask(nodes: list[dict[str, Any]], timeout_s: float) -> list[MachineInfo | Check]:
    """Collect the report of every node, or a line that says why there is none."""
    # Pickled by reference, so that the node's own installation is checked.
    remote = ray.remote(num_cpus=0, max_retries=0, runtime_env=_ALL_DEVICES)(collect_machine)
    refs = []
    for node in nodes:
        here = remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        refs.append(here.remote(node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("GPU", 0.0)))
    pending = wait(refs, timeout_s, "asking the nodes")
    return [_answer(ref, ref not in pending, timeout_s) for ref in refs]


def _answer(ref: Any, done: bool, timeout_s: float) -> MachineInfo | Check:
    if not done:
        ray.cancel(ref, force=True)
        fix = "look at the node's logs and load, or raise --timeout-s"
        return Check("node", "problem", f"no answer within {timeout_s:g} s", fix)
    try:
        machine: MachineInfo = ray.get(ref)
    except Exception as error:  # any error of the node is a line of the result
        cause = root_cause(error)
        text = f"{type(cause).__name__}: {cause}"
        # Where a node cannot import the function, Ray raises its own error with the reason in its text.
        if missing := re.search(r"No module named '([^'.]+)", text):
            fix = f"install {missing[1]} on that node, as on all others"
            return Check("node", "problem", f"{missing[0]}'", fix)
        return Check("node", "problem", text.splitlines()[0], "look at the node's logs")
    return machine


def _host_addresses() -> tuple[tuple[str, ...], str | None]:
    try:
        return resolve(socket.gethostname()), None
    except (OSError, UnicodeError) as error:
        return (), str(error)


def _gloo_device_missing(interface: str | None) -> str | None:
    try:
        check_gloo_device(interface)
    except RendezvousError as error:
        return str(error)
    return None


def _is_loaded(library: str) -> bool:
    try:
        return library in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def name_server_silent(address: str, timeout_s: float = 1.0) -> bool:
    """Check whether a look-up like c10d's gets no answer of any kind in time.

    For its log c10d resolves the names of peers, when a store is connected to and when it accepts, and a store that waits for
    an answer serves no rank. glibc gives a silent server two attempts of 5 s each (resolv.conf(5)).

    Args:
        address: This node's own address, a literal IP.
        timeout_s: Bound in seconds.

    Returns:
        True where there was no answer; False also off Linux, where nothing is checked.
    """
    if sys.platform != "linux":
        return False
    # c10d's sockets are IPv6 and see IPv4 peers by mapped addresses, which no hosts file lists.
    peer = address if ":" in address else f"::ffff:{address}"
    try:
        # In a process of its own, which can be killed.
        subprocess.run(["getent", "hosts", peer], timeout=timeout_s, stdout=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        pass
    return False
