"""The doctor's lines about CUDA devices and what moves data between them. Pure."""

from __future__ import annotations

from ray_fracbackend.diagnosis import Check, MachineFacts
from ray_fracbackend.facts import DeviceFacts, WorkerFacts, version_text
from ray_fracbackend.sharing import NCCL_COMPARES_UUID, NCCL_MULTI_RANK, short_uuid


def check_devices(facts: MachineFacts) -> tuple[Check, ...]:
    """Devices and who may share them, Ray's count of them, NCCL, MPS and the ipc backend."""
    worker = facts.worker
    return (*_devices(worker), _ray_gpus(facts), _nccl(worker), _mps(worker), *_ipc(worker))


def _devices(worker: WorkerFacts) -> list[Check]:
    if worker.devices:
        return [_device(device, worker) for device in worker.devices]
    if not worker.num_node_devices:
        return [Check("CUDA devices", "ok", f"none ({worker.cuda_missing}): workers train on the CPU")]
    # A cause that ends in what to do has it after its last semicolon.
    cause, _, advice = (worker.cuda_missing or "").rpartition("; ")
    text = f"torch uses none of the node's {worker.num_node_devices} GPUs: {cause or advice}"
    if cause:
        return [Check("CUDA devices", "problem", text, advice)]
    if worker.cuda_visible_devices is not None:
        return [Check("CUDA devices", "warning", text, "unset CUDA_VISIBLE_DEVICES, or set it to devices of the node")]
    return [Check("CUDA devices", "problem", text, "install a CUDA build of torch that the driver supports")]


def _device(device: DeviceFacts, worker: WorkerFacts) -> Check:
    text = f"{short_uuid(device.uuid)} {device.name}, {device.total_memory_bytes / 2**30:.1f} GiB"
    if device.is_mig:
        text += f", MIG slice of {short_uuid(device.parent_uuid or 'a GPU')}"
    name, text = f"cuda:{device.index}", f"{text}, compute mode {device.compute_mode}"
    default = "nvidia-smi -c DEFAULT"
    if device.compute_mode == "prohibited":
        return Check(name, "problem", f"{text}: no process may use it", default)
    if device.compute_mode == "exclusive_process" and not worker.mps_reachable:
        return Check(
            name, "warning", f"{text}: workers with a fraction of it fail", f"{default}, or nvidia-cuda-mps-control -d"
        )
    if device.is_mig and (worker.nccl_version or (0, 0, 0)) < NCCL_COMPARES_UUID and worker.nccl_available:
        version = version_text(worker.nccl_version)
        return Check(
            name,
            "warning",
            f"{text}: NCCL {version} takes slices of one GPU for one device and refuses them",
            "NCCL 2.30.7 or newer; until then such ranks use gloo",
        )
    return Check(name, "ok", f"{text}: several workers may share it")


def _ray_gpus(facts: MachineFacts) -> Check:
    worker, claimed = facts.worker, facts.ray_gpus
    if claimed is None:
        return Check("Ray's GPUs", "ok", "not asked; with --address they are compared with the devices")
    if any(device.is_mig for device in worker.devices):
        return Check("Ray's GPUs", "ok", f"{claimed:g} on a node with MIG slices, which are not counted here")
    there = max(worker.num_visible_devices, worker.num_node_devices or 0)
    if claimed > there:
        return Check(
            "Ray's GPUs",
            "problem",
            f"Ray gives out {claimed:g} GPUs, the node has {there}: workers get GPUs that are not there",
            f"start Ray there with --num-gpus={there}, or train with FracTorchConfig(on_missing_cuda='cpu')",
        )
    return Check("Ray's GPUs", "ok", f"{claimed:g} of {there} devices")


def _nccl(worker: WorkerFacts) -> Check:
    if not worker.nccl_available:
        if not worker.devices:
            return Check("NCCL", "ok", "not in this torch, and not needed without CUDA devices")
        fix = "" if worker.platform == "win32" else "install a torch build with NCCL"
        return Check("NCCL", "warning", "not in this torch: ranks use gloo, on devices of their own too", fix)
    if worker.nccl_version is None:
        fix = "set LD_PRELOAD to the library, or reinstall torch"
        return Check("NCCL", "warning" if worker.devices else "ok", "in this torch, its version cannot be read", fix)
    can = worker.nccl_version >= NCCL_MULTI_RANK
    shared = "takes shared devices with on_shared_device='nccl'" if can else "refuses shared devices"
    return Check("NCCL", "ok", f"{version_text(worker.nccl_version)} is loaded; it {shared}")


def _mps(worker: WorkerFacts) -> Check:
    return Check("MPS", "ok", "its control daemon answers" if worker.mps_reachable else "no daemon runs")


def _ipc(worker: WorkerFacts) -> list[Check]:
    if worker.platform != "linux":
        return [Check("ipc", "ok", "the ipc backend needs Linux; it is optional")]
    host = Check("ipc", "ok", "ranks of this machine can share host memory")
    if worker.ipc_host_memory_missing:
        text = f"ranks cannot share host memory: {worker.ipc_host_memory_missing}"
        host = Check("ipc", "warning", text, "mend that, or do without: the ipc backend is optional")
    if not worker.devices:
        return [host]
    if worker.ipc_device_memory_missing is None:
        return [host, Check("ipc", "ok", "ranks on one device can share its memory")]
    text = f"ranks cannot share device memory: {worker.ipc_device_memory_missing}"
    return [host, Check("ipc", "warning", text, "nothing to do: ranks that share a device use gloo")]
