"""Collect facts about a machine in a child process. Runs on the driver, and as a task on every node of a cluster.

Only the standard library is imported at the top, because torch, Ray and the driver may fail, crash or hang. The child writes a JSON
line after each stage, so that the facts of the earlier stages are known if a stage ends the process.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ray_fracbackend import __version__
from ray_fracbackend.cli.parent import end_with_parent
from ray_fracbackend.decide.addresses import owner_of
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.worker_info import version_text
from ray_fracbackend.shown import may_be_secret

# Plain values by name.
Facts = dict[str, Any]
# Environment variables in the facts, unless their name may be that of a secret.
_SHOWN_PREFIXES = ("NCCL_", "GLOO_", "CUDA_", "RAY_TRAIN_", "RAY_FRACBACKEND_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_")
_SHOWN = (
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "OMP_NUM_THREADS", "RAY_AUTH_MODE", "USE_LIBUV"),
)
_NAME_SERVER_S = 1.0
_FILE_SYSTEM = r"SYSTEM\CurrentControlSet\Control\FileSystem"
# A process that is killed during a driver call may not end.
_KILLED_S = 1.0


def collect_facts(timeout_s: float, node_ip: str = "127.0.0.1") -> Facts:
    """Collect facts about this machine. Creates no CUDA context and no process group, and leaves no process behind.

    Args:
        timeout_s: Time limit in seconds.
        node_ip: Ray's address of the node.

    Returns:
        The version of this package and the facts of the stages that ended. If one did not, ``failed_stage`` is its name,
        and ``failure`` the reason.
    """
    # With the import path of this process: that of a Ray worker includes the driver's runtime environment.
    path = f"import sys; sys.path[:] = {sys.path!r}"
    code = f"{path}; from ray_fracbackend.cli.doctor.facts import main; main({node_ip!r}, {os.getpid()})"
    # Files, because they need no threads to read the output until the time limit.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+", errors="replace") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=errors,
            # Ctrl-C reaches only this process.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        try:
            exit_code = child.wait(timeout_s)
            failure = (
                f"ended the process: {signal.Signals(-exit_code).name if exit_code < 0 else f'exit code {exit_code}'}"
            )
        except subprocess.TimeoutExpired:
            failure = f"did not end within {timeout_s:.3g} s (--timeout-s)"
        finally:
            with suppress(OSError):
                if sys.platform == "win32":
                    child.kill()
                else:
                    os.killpg(child.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_KILLED_S)
        out.seek(0)
        lines = [json.loads(line) for line in out]
        errors.seek(0)
        if last := errors.read().strip().rpartition("\n")[2]:
            failure += f" ({last})"
    facts: Facts = {"ray_fracbackend": __version__}
    left = list(STAGES)
    for name, found, error in lines:
        facts |= found
        if error:
            failure = f"failed: {error}"
        else:
            left.remove(name)
    if left:
        not_checked = f"; not checked: {', '.join(left[1:])}" if left[1:] else ""
        facts |= {"failed_stage": left[0], "failure": failure + not_checked}
    return facts


def main(node_ip: str, parent: int) -> None:
    """Run the stages in order until one fails, and write a line for each: its name, its facts and its error.

    Args:
        node_ip: Ray's address of the node.
        parent: Process whose end ends this one.
    """
    # Libraries write to standard error.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        end_with_parent(parent)
        for name, stage in STAGES.items():
            facts, failure = {}, ""
            try:
                facts = stage(node_ip)
            except BaseException as error:  # also SystemExit
                failure = " ".join(f"{type(error).__name__}: {error}".split())
            print(json.dumps([name, facts, failure]), file=out, flush=True)
            if failure:
                break
    # Skip the clean-up of libraries, which may crash.
    os._exit(0)


def _system(node_ip: str) -> Facts:
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    facts: Facts = {
        "OS": platform.platform(),
        "Python": platform.python_version(),
        "platform": sys.platform,
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name in _SHOWN or (name.startswith(_SHOWN_PREFIXES) and not may_be_secret(name))
        },
        "shm_bytes": shm and (shm.total, shm.free),
    }
    if sys.platform == "win32":
        import winreg

        temporary, python = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), sys.executable
        in_code_page = python.encode("mbcs", "replace").decode("mbcs") == python
        facts["unusable_paths"] = [temporary] * (not temporary.isascii()) + [python] * (not in_code_page)
        facts["in_onedrive"] = os.getcwd().startswith(os.environ.get("ONEDRIVE") or "\0")
        with suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _FILE_SYSTEM) as key:
            facts["has_long_paths"] = bool(winreg.QueryValueEx(key, "LongPathsEnabled")[0])
    return facts


def _network(node_ip: str) -> Facts:
    from ray_fracbackend.worker.network import interfaces, resolve

    facts: Facts = {
        "node_ip": node_ip,
        "hostname": socket.gethostname(),
        "host_addresses": (),
        "interfaces": interfaces(),
    }
    try:
        facts["host_addresses"] = resolve(facts["hostname"])
    except (OSError, UnicodeError) as error:
        facts["host_missing"] = str(error)
    return facts | {"name_server_silent": _is_name_server_silent(node_ip)}


def _is_name_server_silent(address: str) -> bool:
    """Check whether a lookup of a peer's name, as c10d makes one for its log at every connection, gets no answer in time."""
    # c10d uses IPv6 sockets, on which IPv4 peers have mapped addresses; no hosts file lists these.
    command = ["getent", "hosts", address if ":" in address else f"::ffff:{address}"]
    try:
        # In a separate process, which can be killed.
        subprocess.run(command, timeout=_NAME_SERVER_S, stdout=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return True
    except OSError:  # no such command, as on Windows
        pass
    return False


def nvidia_driver(node_ip: str = "") -> Facts:
    """Return the version of the NVIDIA driver and the names of its GPUs; no facts without NVML."""
    from ray_fracbackend.worker.missing_cuda import nvml_answer, nvml_session

    with nvml_session() as nvml:
        if nvml is None:
            return {}
        count = nvml_answer(nvml, nvml.nvmlDeviceGetCount) or 0
        handles = [nvml_answer(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        names = [handle and nvml_answer(nvml, nvml.nvmlDeviceGetName, handle) for handle in handles]
        gpus = ", ".join(name or "one that does not answer" for name in names)
        version = nvml_answer(nvml, nvml.nvmlSystemGetDriverVersion)
        return {"NVIDIA driver": version, "GPUs": gpus, "num_driver_gpus": count}


def _torch(node_ip: str) -> Facts:
    import torch

    return {"torch": torch.__version__}


def _devices(node_ip: str) -> Facts:
    import torch

    from ray_fracbackend.worker.missing_cuda import why_no_cuda
    from ray_fracbackend.worker.probe import collect_info

    count = 0
    if torch.cuda.is_available():
        # Before CUDA is initialized torch counts NVML's GPUs. If they are in MIG mode, CUDA shows one slice of one GPU.
        with suppress(Exception):  # reported for each device below
            torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    devices = [torch.device("cuda", index) for index in range(count)]
    worker = collect_info(devices, rank=0, node_id="", node_ip=node_ip, cuda_missing=None if count else why_no_cuda())
    return {"worker": asdict(worker), "NCCL": worker.nccl_version and version_text(worker.nccl_version)}


def _ray(node_ip: str) -> Facts:
    import ray

    importlib.import_module("ray_fracbackend.config")  # needs ray.train
    return {"ray": ray.__version__}


def _gloo(node_ip: str) -> Facts:
    from ray_fracbackend.worker.network import check_gloo_device, interfaces

    interface = os.environ.get(IFNAME) or owner_of(interfaces(), node_ip)
    check_gloo_device(interface)
    return {"gloo_interface": interface}


# In their order. Each is called with Ray's address of the node.
STAGES: Mapping[str, Callable[[str], Facts]] = {
    "system": _system,
    "network": _network,
    "driver": nvidia_driver,
    "torch": _torch,
    "CUDA devices": _devices,
    "ray": _ray,
    "Gloo": _gloo,
}
