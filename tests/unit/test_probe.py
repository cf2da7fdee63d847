"""The probe without a GPU: simulated answers of a GPU's libraries."""

import os
import socket
import subprocess
import sys
import types
import uuid
from dataclasses import replace

import pytest
import torch

from ray_fracbackend import _ray
from ray_fracbackend.decide.plain import workers_of
from ray_fracbackend.decide.worker_info import WorkerInfo
from ray_fracbackend.worker import devices as devices_module
from ray_fracbackend.worker import probe
from ray_fracbackend.worker.cuda_driver import DriverFacts
from ray_fracbackend.worker.devices import boot_id, described, mps_reachable, worker_devices
from ray_fracbackend.worker.missing_cuda import nvml_session

_UUID = "ab12cd34-0000-0000-0000-000000000001"


class FakeNvml(types.SimpleNamespace):
    """pynvml's functions that the probe uses, for one GPU that may be split into MIG slices."""

    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 2, 3
    NVML_ERROR_GPU_IS_LOST = 15

    class NVMLError(Exception):
        """Same name as in pynvml."""

    def __init__(self, known, mode=0, count=1, refused=""):
        super().__init__()
        self.known, self.mode, self.count = known, mode, count
        if refused:
            setattr(self, refused, self.refuse)

    def refuse(self, *arguments):
        raise self.NVMLError

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return self.count

    def nvmlSystemGetDriverVersion(self):
        return "580.65"

    def nvmlDeviceGetHandleByIndex(self, index):
        return "GPU"

    def nvmlDeviceGetHandleByUUID(self, name):
        if name.decode() not in self.known:
            raise self.NVMLError
        return name.decode()

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return "GPU-parent"

    def nvmlDeviceGetUUID(self, handle):
        return handle.encode()

    def nvmlDeviceGetPciInfo(self, handle):
        return types.SimpleNamespace(busId=b"00000000:3B:00.0")

    def nvmlDeviceGetComputeMode(self, handle):
        return self.mode


NO_GPUS = RuntimeError("No CUDA GPUs are available")


@pytest.fixture
def cuda(monkeypatch):
    """Simulate one CUDA device in torch, and NVML."""

    def install(known=(f"GPU-{_UUID}",), mode=0, count=1, device_count=1, refused="", error=NO_GPUS, **properties):
        described = {"uuid": uuid.UUID(_UUID), "name": "NVIDIA H200", "total_memory": 1 << 30, **properties}

        def init():
            if not device_count:
                raise error

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: device_count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: device_count)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: types.SimpleNamespace(**{k: v for k, v in described.items() if v is not None}),
        )
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(known, mode, count, refused))

    return install


_BUS = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}


def facts_on(*devices, ask_nvml=True, **own):
    """Probe a worker with these devices, without Ray."""
    return probe.collect_info(
        [torch.device(device) for device in devices], ask_nvml, rank=0, node_id="", node_ip="127.0.0.1", **own
    )


def describe():
    with nvml_session() as nvml:
        (found,), missing = described([torch.device("cuda:0")], nvml)
    assert missing is None
    return found


def test_whole_gpu(cuda):
    """CUDA's UUID gets NVML's prefix, bus id and compute mode."""
    cuda(mode=3)
    facts = describe()
    assert (facts.uuid, facts.pci_bus_id, facts.parent_uuid) == (f"GPU-{_UUID}", "00000000:3b:00.0", None)
    assert (facts.compute_mode, facts.is_mig) == ("exclusive_process", False)


def test_mig_slice(cuda):
    """A slice keeps its own UUID and gets its parent's UUID and bus id."""
    cuda(known=(f"MIG-{_UUID}",))
    facts = describe()
    assert (facts.uuid, facts.parent_uuid, facts.pci_bus_id) == (f"MIG-{_UUID}", "GPU-parent", "00000000:3b:00.0")


def test_a_slice_has_the_uuid_of_the_driver(cuda, monkeypatch):
    """The runtime's properties may contain the UUID of the GPU, so its slices would count as one device."""
    own = "ab12cd34-0000-0000-0000-000000000002"
    monkeypatch.setattr(devices_module, "driver_facts", lambda index: DriverFacts(uuid=own))
    cuda(known=(f"MIG-{own}", f"GPU-{_UUID}"))
    assert describe().uuid == f"MIG-{own}"


@pytest.mark.parametrize(
    ("name", "other", "uuid_prefix", "parent"),
    [
        ("NVIDIA H200 MIG 1g.18gb", None, "MIG", None),
        ("NVIDIA H200", "ab12cd34-0000-0000-0000-000000000002", "MIG", "GPU-ab12cd34-0000-0000-0000-000000000002"),
        ("NVIDIA H200", None, "GPU", None),
        ("NVIDIA H200", "00000000-0000-0000-0000-000000000000", "GPU", None),
    ],
)
def test_a_slice_without_nvml(cuda, monkeypatch, name, other, uuid_prefix, parent):
    """A slice is detected by its name, or by another UUID in the properties; a rank with NVML reports the same UUID."""
    monkeypatch.setattr(devices_module, "driver_facts", lambda index: DriverFacts(uuid=_UUID))
    cuda(known=(), name=name, uuid=uuid.UUID(other or _UUID))
    facts = describe()
    assert (facts.uuid, facts.parent_uuid) == (f"{uuid_prefix}-{_UUID}", parent)


def test_without_nvml(monkeypatch, cuda):
    """Without NVML the driver reports everything except a slice's GPU; without the driver library the UUID is torch's."""
    cuda(known=())
    facts = describe()
    assert (facts.uuid, facts.compute_mode, facts.pci_bus_id) == (f"GPU-{_UUID}", "unknown", None)
    said = DriverFacts(uuid=_UUID, pci_bus_id="00000000:3b:00.0", compute_mode=3)
    monkeypatch.setattr(devices_module, "driver_facts", lambda index: said)
    facts = describe()
    assert (facts.uuid, facts.compute_mode, facts.pci_bus_id) == (
        f"GPU-{_UUID}",
        "exclusive_process",
        "00000000:3b:00.0",
    )


PROBE_A_DEVICE = """
import sys, types, torch
from ray_fracbackend.worker import probe
from ray_fracbackend.worker.devices import described
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(name="a GPU", total_memory=1, uuid="UUID")
assert described([torch.device("cuda:0")], None)[1] is None
print([name for name in sys.modules if name.startswith("ray_fracbackend.ipc")])
"""


def test_devices_are_probed_without_the_ipc_backend():
    """The next release may lack private names of torch that ipc uses, but jobs with NCCL must still start."""
    found = subprocess.run([sys.executable, "-c", PROBE_A_DEVICE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("refused", "uuid_prefix", "unknown"),
    [
        ("nvmlInit", "GPU", {"pci_bus_id": None, "compute_mode": "unknown"}),
        ("nvmlShutdown", "GPU", {}),
        ("nvmlDeviceGetHandleByUUID", "GPU", {"pci_bus_id": None, "compute_mode": "unknown"}),
        ("nvmlDeviceGetPciInfo", "GPU", {"pci_bus_id": None}),
        ("nvmlDeviceGetComputeMode", "GPU", {"compute_mode": "unknown"}),
        ("nvmlDeviceGetUUID", "MIG", {"parent_uuid": None}),
        (
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
            "MIG",
            {"parent_uuid": None, "pci_bus_id": None, "compute_mode": "unknown"},
        ),
    ],
)
def test_what_nvml_refuses_is_unknown(cuda, refused, uuid_prefix, unknown):
    """After an NVMLError in an optional detail only that detail is unknown."""
    cuda(known=(f"{uuid_prefix}-{_UUID}",))
    whole = describe()
    cuda(known=(f"{uuid_prefix}-{_UUID}",), refused=refused)
    assert describe() == replace(whole, **unknown)


@pytest.mark.parametrize("missing", [None, types.ModuleType("pynvml")], ids=["not installed", "another module"])
def test_without_pynvml(monkeypatch, cuda, missing):
    """If pynvml cannot be imported or is not NVIDIA's, the probe works as without NVML."""
    cuda(**_BUS)
    monkeypatch.setitem(sys.modules, "pynvml", missing)
    found = facts_on("cuda:0")
    assert (found.devices[0].uuid, found.devices[0].pci_bus_id) == (f"GPU-{_UUID}", "00000000:3b:00.0")
    assert found.devices[0].compute_mode == "unknown"


@pytest.mark.parametrize("uuid_of", [None, uuid.UUID(int=0)], ids=["none", "zeros"])
@pytest.mark.parametrize(("bus", "last"), [(_BUS, "00000000:3b:00.0"), ({}, "0")], ids=["bus id", "index"])
@pytest.mark.parametrize("kernel", ["b0071d", ""], ids=["boot id", "host name"])
def test_device_without_uuid(monkeypatch, cuda, uuid_of, bus, last, kernel):
    """Without a UUID the device is identified by host and PCI bus id, or by its index if the bus id is unknown."""
    cuda(uuid=uuid_of, **bus)
    monkeypatch.setattr(devices_module, "boot_id", lambda: kernel)
    found = describe()
    assert found.uuid == f"BUS-{kernel or socket.gethostname()}/{last}"
    assert (found.pci_bus_id, found.is_mig) == (last if bus else None, False)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            RuntimeError("CUDA error: GPU is lost\nCUDA kernel errors might be reported late"),
            'cannot use CUDA (CUDA says "CUDA error: GPU is lost"',
        ),
        (AssertionError("Invalid device id"), 'cannot use CUDA (CUDA says "Invalid device id"'),
        (torch.cuda.DeferredCudaCallError("CUDA call failed lazily"), 'CUDA says "CUDA call failed lazily"'),
    ],
)
def test_device_that_cannot_be_read(monkeypatch, cuda, error, cause):
    """If torch counts a device but cannot describe it, this is the worker's cause, and none of its devices is used."""
    cuda()

    def fail(index):
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    found = facts_on("cuda:0", cuda_missing=None)
    assert found.devices == ()
    assert found.cuda_missing.startswith("cuda:0 cannot be used: ")
    assert cause in found.cuda_missing


@pytest.mark.parametrize(
    ("visible", "gpu_ids"), [("0", [0]), ("0,1", [1]), (f"GPU-{_UUID}", [f"GPU-{_UUID}"]), ("MIG-1,MIG-2", ["MIG-2"])]
)
def test_devices_by_index_and_by_uuid(cuda, monkeypatch, visible, gpu_ids):
    """CUDA_VISIBLE_DEVICES by number, GPU UUID or MIG UUID: the device is at the position of Ray's id."""
    cuda(device_count=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(
        _ray, "worker_devices", lambda: [torch.device("cuda", visible.split(",").index(str(g))) for g in gpu_ids]
    )
    devices, missing = worker_devices(True)
    assert missing is None
    assert [device.index for device in devices] == [visible.split(",").index(str(gpu_ids[0]))]


@pytest.mark.parametrize("visible", ["0", "MIG-1"])
def test_num_gpus_above_the_real_gpus(cuda, monkeypatch, visible):
    """If num_gpus is too high, the device index does not exist; this is reported, also for a slice."""
    cuda(device_count=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(_ray, "worker_devices", lambda: [torch.device("cuda:1")])
    missing = "num_gpus of the node exceeds the GPUs present: device 1 of 1; correct num_gpus"
    assert worker_devices(True) == ([], missing)


def test_two_variables_that_mask_amds_devices(cuda, monkeypatch):
    """Ray sets one variable and Ray Train shares the other: the error names both with their values, and which one to unset."""
    cuda(device_count=1)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(_ray, "worker_devices", lambda: [torch.device("cuda:1")])
    devices, missing = worker_devices(True)
    assert devices == []
    assert "HIP_VISIBLE_DEVICES='1' and CUDA_VISIBLE_DEVICES='0,1' mask AMD's devices one after the other" in missing
    assert "unset HIP_VISIBLE_DEVICES" in missing


def test_a_list_of_slices_that_workers_share(cuda, monkeypatch):
    """CUDA shows a process only one MIG slice, whatever the list, so num_gpus is not wrong."""
    cuda(device_count=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    monkeypatch.setattr(_ray, "worker_devices", lambda: [torch.device("cuda:1")])
    devices, missing = worker_devices(True)
    assert devices == []
    assert missing.startswith(
        "Ray Train passes every worker the whole list of 2 MIG slices, and CUDA shows a process only 1 of them; "
    )
    assert missing.endswith("TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES=0")


@pytest.mark.parametrize(("given", "says"), [([torch.device("cpu")], "cpu"), ([], "none")])
def test_no_cuda_device_from_ray(cuda, monkeypatch, given, says):
    """If Ray Train assigns the CPU to a GPU worker, as after `train_on_cpu`, the worker reports why it has no device."""
    cuda()
    monkeypatch.setattr(_ray, "worker_devices", lambda: given)
    devices, missing = worker_devices(True)
    assert devices == []
    expected = f"Ray Train assigned this worker no CUDA device (ray.train.torch.get_devices() returned {says})"
    assert missing.startswith(expected)
    assert missing.endswith("start the worker in a new process")


def test_visible_devices_that_do_not_fit(cuda, monkeypatch):
    """If the user's CUDA_VISIBLE_DEVICES lacks Ray's id, the error names the variable and its value."""
    cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    def fail():
        raise ValueError("'0' is not in list")

    monkeypatch.setattr(_ray, "worker_devices", fail)
    missing = worker_devices(True)[1]
    assert "CUDA_VISIBLE_DEVICES='7' does not fit Ray's GPU ids ('0' is not in list)" in missing
    assert missing.endswith("leave the variable to Ray")


@pytest.mark.parametrize(
    ("error", "count", "expected"),
    [
        (RuntimeError("Found no NVIDIA driver on your system. Please check"), None, "finds no NVIDIA driver"),
        (NO_GPUS, 2, "CUDA_VISIBLE_DEVICES='2' names none of the node's GPUs"),
        (RuntimeError("... set an error? Error 802: system not yet initialized"), 2, "Error 802: system not yet"),
    ],
)
def test_why_there_is_no_cuda(monkeypatch, cuda, error, count, expected):
    """If torch has no device, the cause comes from CUDA first, then from NVML, then from the variable."""
    cuda(count=count, device_count=0, refused="nvmlInit" if count is None else "", error=error)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    devices, missing = worker_devices(True)
    assert devices == []
    assert expected in missing


def test_cpu_worker_has_no_devices():
    """Missing CUDA is not reported for a worker without GPUs."""
    assert worker_devices(False) == ([], None)


@pytest.mark.linux(reason="needs named pipes in the file system")
def test_mps_needs_a_daemon_that_reads(monkeypatch, tmp_path):
    """A control pipe without a reader belongs to a dead daemon; with one the daemon is alive."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_reachable()
    os.mkfifo(tmp_path / "control")
    assert not mps_reachable()
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert mps_reachable()
    finally:
        os.close(reader)


@pytest.mark.linux(reason="needs the boot id of the kernel")
def test_boot_id_is_the_kernels():
    """The boot id is read from the kernel, because it is the same in all containers of a host."""
    assert uuid.UUID(boot_id())


@pytest.mark.windows(reason="needs a system without Linux's boot id")
def test_no_boot_id():
    """Only Linux has a boot id."""
    assert boot_id() == ""


@pytest.fixture
def half_a_gpu(monkeypatch, cuda):
    """Simulate a Ray worker with half a GPU, without Ray."""
    cuda()
    monkeypatch.setattr(_ray, "node_ids", lambda: ("node", "127.0.0.1"))
    monkeypatch.setattr(_ray, "assigned_resources", lambda: {"CPU": 1.0, "GPU": 0.5})
    monkeypatch.setattr(_ray, "accelerator_ids", lambda: {"GPU": ["0"]})
    monkeypatch.setattr(_ray, "worker_devices", lambda: [torch.device("cuda:0")])


def ipc_missing(found):
    """Return the attributes of WorkerInfo about the ipc backend."""
    return found.ipc_host_memory_missing, found.ipc_device_memory_missing


_NOT_PROBED = ipc_missing(WorkerInfo(rank=0, node_id="", node_ip="", hostname=""))
_NO_DEVICE = "the worker has no CUDA device" if sys.platform == "linux" else "the ipc backend needs Linux"


def test_a_node_known_by_name(monkeypatch, half_a_gpu):
    """The probe returns the address of the node's name, with which the driver decides."""
    monkeypatch.setattr(_ray, "node_ids", lambda: ("node", "head"))
    monkeypatch.setattr(probe, "node_address", {"head": "10.0.0.1"}.get)
    assert probe.probe_devices(0).node_ip == "10.0.0.1"


def test_a_start_does_not_ask_for_ipc(monkeypatch, half_a_gpu):
    """A worker's probe does not check ipc unless requested."""

    def fail(devices):
        raise AssertionError("ipc was asked")

    monkeypatch.setattr(probe, "ipc_support", fail)
    assert ipc_missing(probe.probe_devices(0)) == _NOT_PROBED
    assert ipc_missing(*workers_of([probe.probe_worker(1)])) == _NOT_PROBED


def test_ipc_on_demand(monkeypatch, half_a_gpu):
    """ask_ipc checks the worker's own devices, in probe_worker and probe_devices."""
    answer = {"ipc_host_memory_missing": None, "ipc_device_memory_missing": "a reason"}
    monkeypatch.setattr(probe, "ipc_support", lambda devices: answer if devices else {})
    assert ipc_missing(probe.probe_devices(0, ask_ipc=True)) == (None, "a reason")
    assert ipc_missing(*workers_of([probe.probe_worker(1, None, None, True, ask_ipc=True)])) == (None, "a reason")


def test_the_doctor_asks_for_ipc():
    """A machine's probe includes what ipc can use."""
    assert "not probed" not in probe.ipc_support(()).values()


def test_ipc_of_a_worker_without_a_device():
    """Device memory is checked on the worker's own device, and not at all without a device."""
    assert ipc_missing(facts_on(ask_ipc=True))[1] == _NO_DEVICE


@pytest.mark.linux(reason="needs Linux, which the ipc backend asks for first")
def test_device_memory_of_a_torch_without_cuda(monkeypatch, cuda):
    """The ipc backend provides the reason."""
    cuda()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA" in ipc_missing(facts_on("cuda:0", ask_ipc=True))[1]


@pytest.mark.full
def test_probe_does_not_load_ipc():
    """A process that is probed without ask_ipc neither imports nor registers the ipc backend."""
    code = (
        "import sys; import torch.distributed as dist; from ray_fracbackend.worker import probe\n"
        "probe.collect_info([], True, rank=0, node_id='', node_ip='127.0.0.1')\n"
        "assert 'ray_fracbackend.ipc' not in sys.modules, 'imported'\n"
        "assert 'ipc' not in dist.Backend.backend_list, 'registered'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
