"""Collect the report of one machine, stage by stage. Runs in a child process that collect.py starts and may kill.

Only the standard library is imported at the top: if torch, Ray or the driver fails, crashes or hangs, this is the result of a
stage. The child sends each stage's name before the stage, and its values or its error after it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ray_fracbackend import __version__
from ray_fracbackend.cli.parent import end_with_parent
from ray_fracbackend.decide.secret_names import may_be_secret

# Environment variables in the report: no tokens.
_SHOWN_PREFIXES = ("NCCL_", "GLOO_", "CUDA_", "RAY_TRAIN_", "RAY_FRACBACKEND_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
_SHOWN = (
    *(
        "USE_LIBUV",
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
    ),
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "RAY_AUTH_MODE"),
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
)
# Variables that torch's collectives read.
_USED_PREFIXES = ("NCCL_", "GLOO_", "CUDA_MPS", "USE_LIBUV")


@dataclass
class Found:
    """Values of the stages so far.

    Attributes:
        worker: Attributes of `WorkerInfo`.
        machine: Attributes of `MachineInfo`.
    """

    worker: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def update(self, other: Found) -> None:
        """Add the values of another stage."""
        self.worker |= other.worker
        self.machine |= other.machine


@dataclass(frozen=True)
class Stage:
    """One step of the report.

    Attributes:
        run: Returns the values, given those of earlier stages and the node's address in Ray.
        needs: Stages without which it cannot run.
    """

    run: Callable[[Found, str], Found]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """Request of the parent.

    Attributes:
        stages: Names of the stages to run.
        done: Names of the stages that another child has finished.
        found: Their values.
        node_ip: Ray's address of the node.
    """

    stages: tuple[str, ...]
    done: frozenset[str] = frozenset()
    found: Found = field(default_factory=Found)
    node_ip: str = "127.0.0.1"


@dataclass(frozen=True)
class Event:
    """Message of the child: a stage begins, or has ended with values or with an error.

    Attributes:
        stage: Name of the stage.
        found: Its values; None if it begins or has failed.
        error: First line of its error.
        missing: Name of the module that was not found.
    """

    stage: str
    found: Found | None = None
    error: str | None = None
    missing: str | None = None


def main() -> None:
    """Run the stages that the parent asks for on standard input."""
    # Send the output of libraries to standard error.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        request: Request = pickle.load(sys.stdin.buffer)
        end_with_parent()

        def send(event: Event) -> None:
            pickle.dump(event, out)
            out.flush()

        run_stages(request, send)
    # Skip the clean-up of libraries, which may crash.
    os._exit(0)


def run_stages(request: Request, send: Callable[[Event], None]) -> None:
    """Run stages in this process.

    Args:
        request: The stages.
        send: Called with every event.
    """
    done, found = set(request.done), request.found
    for name in request.stages:
        if not done.issuperset(STAGES[name].needs):
            continue
        send(Event(name))
        try:
            new = STAGES[name].run(found, request.node_ip)
        except BaseException as error:  # including exceptions that end the process, such as SystemExit
            line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            send(
                Event(name, error=f"{type(error).__name__}: {line}" if line else type(error).__name__, missing=missing)
            )
            continue
        found.update(new)
        done.add(name)
        send(Event(name, found=new))


def _host(found: Found, node_ip: str) -> Found:
    started = time.perf_counter()
    addresses, missing = _host_addresses()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return Found(
        {"env": _variables(_USED_PREFIXES)},
        {
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "host_addresses": addresses,
            "host_missing": missing,
            "host_lookup_s": time.perf_counter() - started,
            "shm_total_bytes": shm.total if shm else None,
            "shm_free_bytes": shm.free if shm else None,
            "name_server_silent": name_server_silent(node_ip),
            "variables": shown_variables(),
        },
    )


def own_values() -> Found:
    """Return the values of a machine that need no stage."""
    return Found(
        {"hostname": socket.gethostname(), "boot_id": _boot_id(), "pid": os.getpid(), "platform": sys.platform},
        {
            "package_version": __version__,
            "python_version": platform.python_version(),
            "os_text": platform.platform(),
        },
    )


def shown_variables(names: Iterable[str] = _SHOWN, prefixes: tuple[str, ...] = _SHOWN_PREFIXES) -> dict[str, str]:
    """Return the variables that a report may show.

    Args:
        names: Names to show.
        prefixes: Names with these prefixes are shown too, unless they may contain a secret.
    """
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in names or name.startswith(prefixes)) and not may_be_secret(name)
    }


def _variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(prefixes) and not may_be_secret(name)}


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _host_addresses() -> tuple[tuple[str, ...], str | None]:
    from ray_fracbackend.worker.network import resolve

    try:
        return resolve(socket.gethostname()), None
    except (OSError, UnicodeError) as error:
        return (), str(error)


def name_server_silent(address: str, timeout_s: float = 1.0) -> bool:
    """Check whether a lookup like c10d's gets no answer at all in time.

    For its log c10d resolves the names of peers when it connects to a store and when a store accepts a connection. A store that
    waits for an answer serves no rank. glibc tries a silent server twice, for 5 s each (resolv.conf(5)).

    Args:
        address: This node's own address, a literal IP.
        timeout_s: Time limit in seconds.

    Returns:
        True if there was no answer; False also on other systems than Linux, where nothing is checked.
    """
    if sys.platform != "linux":
        return False
    # c10d uses IPv6 sockets, on which IPv4 peers have mapped addresses; no hosts file lists these.
    peer = address if ":" in address else f"::ffff:{address}"
    try:
        # In a separate process, which can be killed.
        subprocess.run(["getent", "hosts", peer], timeout=timeout_s, stdout=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        pass
    return False


def _interfaces(found: Found, node_ip: str) -> Found:
    from ray_fracbackend.decide.worker_info import NetworkInfo
    from ray_fracbackend.worker.network import interfaces, network_id

    return Found({"network": NetworkInfo(network_id=network_id(_boot_id()), interfaces=interfaces())})


def _ray(found: Found, node_ip: str) -> Found:
    import ray

    return Found({"ray_version": ray.__version__})


def _torch(found: Found, node_ip: str) -> Found:
    import torch

    hip = getattr(torch.version, "hip", None)
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU"
    return Found({"torch_version": torch.__version__}, {"torch_built_for": built_for})


def _driver(found: Found, node_ip: str) -> Found:
    from ray_fracbackend.worker.missing_cuda import nvml_answer, nvml_session

    with nvml_session() as nvml:
        if nvml is None:
            return Found()
        count = nvml_answer(nvml, nvml.nvmlDeviceGetCount)
        handles = [nvml_answer(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count or 0)]
        names = [nvml_answer(nvml, nvml.nvmlDeviceGetName, handle) if handle else None for handle in handles]
        cuda = nvml_answer(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        values = {
            "num_node_devices": count,
            "driver_version": nvml_answer(nvml, nvml.nvmlSystemGetDriverVersion),
            "driver_cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
            "driver_gpus": tuple(name or "GPU that does not answer" for name in names),
        }
    return Found(machine=values)


def _devices(found: Found, node_ip: str) -> Found:
    from ray_fracbackend.worker.devices import machine_devices

    return Found(machine_devices(), {"vgpu_preloaded": _is_loaded("libvgpu")})


def _is_loaded(library: str) -> bool:
    try:
        return library in Path("/proc/self/maps").read_text()
    except OSError:
        return False


def _nccl(found: Found, node_ip: str) -> Found:
    import torch.distributed as dist

    from ray_fracbackend.worker.devices import mps_reachable
    from ray_fracbackend.worker.nccl_library import loaded_nccl_version

    return Found(
        {
            "nccl_available": dist.is_nccl_available(),
            "nccl_version": loaded_nccl_version(),
            "mps_reachable": mps_reachable(),
        }
    )


def _ipc(found: Found, node_ip: str) -> Found:
    from ray_fracbackend.worker.probe import ipc_support

    return Found(ipc_support(found.worker.get("devices", ())))


def _staged(found: Found, node_ip: str) -> Found:
    from ray_fracbackend.staged import staged_support

    return Found({"staged_missing": staged_support()})


def _gloo(found: Found, node_ip: str) -> Found:
    import torch.distributed as dist

    from ray_fracbackend.decide.addresses import normal
    from ray_fracbackend.decide.interfaces import IFNAME
    from ray_fracbackend.errors import RendezvousError
    from ray_fracbackend.worker.network import check_gloo_device, gloo_missing

    network = replace(found.worker["network"], gloo_missing=gloo_missing())
    own = (name for name, addresses in network.interfaces.items() if normal(node_ip) in addresses)
    interface = os.environ.get(IFNAME) or next(own, None)
    missing = None
    if network.gloo_missing is None:
        try:
            check_gloo_device(interface)
        except RendezvousError as error:
            missing = str(error)
    return Found(
        {"network": network, "gloo_available": dist.is_gloo_available()},
        {"gloo_interface": interface, "gloo_device_missing": missing},
    )


def _train(found: Found, node_ip: str) -> Found:
    importlib.import_module("ray_fracbackend.config")
    return Found()


# In their order. Most have the names of the doctor's lines.
STAGES: Mapping[str, Stage] = {
    "host name": Stage(_host),
    "interfaces": Stage(_interfaces),
    "ray": Stage(_ray),
    "torch": Stage(_torch),
    "driver": Stage(_driver),
    "CUDA devices": Stage(_devices, ("torch", "driver")),
    "NCCL": Stage(_nccl, ("torch",)),
    "ipc": Stage(_ipc, ("torch",)),
    "staged": Stage(_staged, ("torch",)),
    "Gloo": Stage(_gloo, ("torch", "interfaces")),
    "ray.train": Stage(_train, ("ray", "torch")),
}
