"""What can be probed without a GPU, and what a GPU's own libraries would answer, replaced at the edge."""

import os
import types
import uuid

import pytest
import torch

from ray_fracbackend import probe, ray_compat
from ray_fracbackend.probe import mps_reachable

_UUID = "ab12cd34-0000-0000-0000-000000000001"


class FakeNvml(types.SimpleNamespace):
    """pynvml's functions as the probe uses them, over one GPU that may be cut into MIG slices."""

    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 2, 3

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, known, mode=0, count=1):
        super().__init__()
        self.known, self.mode, self.count = known, mode, count

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return self.count

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


@pytest.fixture
def cuda(monkeypatch):
    """One CUDA device as torch would describe it, and NVML beside it."""

    def install(known=(f"GPU-{_UUID}",), mode=0, count=1, device_count=1):
        properties = types.SimpleNamespace(uuid=uuid.UUID(_UUID), name="NVIDIA H200", total_memory=1 << 30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: device_count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: device_count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml(known, mode, count))

    return install


def describe():
    with probe._nvml() as nvml:
        return probe._describe(0, nvml)


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


def test_without_nvml(monkeypatch, cuda):
    """Without NVML the UUID is still CUDA's, the rest is unknown."""
    cuda(known=())
    facts = describe()
    assert (facts.uuid, facts.compute_mode, facts.pci_bus_id) == (f"GPU-{_UUID}", "unknown", None)


@pytest.mark.parametrize(
    ("visible", "gpu_ids"), [("0", [0]), ("0,1", [1]), (f"GPU-{_UUID}", [f"GPU-{_UUID}"]), ("MIG-1,MIG-2", ["MIG-2"])]
)
def test_devices_by_index_and_by_uuid(cuda, monkeypatch, visible, gpu_ids):
    """CUDA_VISIBLE_DEVICES by number, GPU UUID or MIG UUID: the device is where Ray's id stands in it."""
    cuda(device_count=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(
        ray_compat, "worker_devices", lambda: [torch.device("cuda", visible.split(",").index(str(g))) for g in gpu_ids]
    )
    devices, missing = probe._devices(True)
    assert missing is None
    assert [device.index for device in devices] == [visible.split(",").index(str(gpu_ids[0]))]


def test_more_gpus_told_than_there_are(cuda, monkeypatch):
    """An overstated num_gpus gives a device index that does not exist: said as that."""
    cuda(device_count=1)
    monkeypatch.setattr(ray_compat, "worker_devices", lambda: [torch.device("cuda:1")])
    assert "Ray was told of more GPUs than there are: device 1 of 1" in probe._devices(True)[1]


def test_visible_devices_that_do_not_fit(cuda, monkeypatch):
    """A user's own CUDA_VISIBLE_DEVICES that lacks Ray's id is named with its value."""
    cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")

    def fail():
        raise ValueError("'0' is not in list")

    monkeypatch.setattr(ray_compat, "worker_devices", fail)
    assert "CUDA_VISIBLE_DEVICES='7' does not fit Ray's GPU ids" in probe._devices(True)[1]


@pytest.mark.parametrize(
    ("cuda_build", "count", "expected"),
    [
        (None, 1, "is a CPU-only build"),
        ("13.0", None, "finds no NVIDIA driver"),
        ("13.0", 0, "finds no GPU"),
        ("13.0", 2, "leaves torch none of the node's 2 GPUs"),
    ],
)
def test_why_there_is_no_cuda(monkeypatch, cuda, cuda_build, count, expected):
    """CPU build, no driver, no GPU and nothing visible are told apart."""
    cuda(count=count, device_count=0)
    monkeypatch.setattr(torch.version, "cuda", cuda_build)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    if count is None:
        nvml = __import__("sys").modules["pynvml"]

        def fail():
            raise nvml.NVMLError

        monkeypatch.setattr(nvml, "nvmlInit", fail, raising=False)
    assert expected in probe._devices(True)[1]


def test_cpu_worker_has_no_devices():
    """A worker without GPUs is not told that CUDA is missing."""
    assert probe._devices(False) == ([], None)


def test_mps_needs_a_daemon_that_reads(monkeypatch, tmp_path):
    """The control pipe without a reader is a dead daemon's; with one it is alive."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_reachable()
    os.mkfifo(tmp_path / "control")
    assert not mps_reachable()
    reader = os.open(tmp_path / "control", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert mps_reachable()
    finally:
        os.close(reader)


def test_boot_id_is_the_kernels():
    """Equal in all containers of a host, so it is read from the kernel."""
    assert uuid.UUID(probe.boot_id())


def test_device_memory_of_a_worker_without_a_device():
    """ipc on device memory is asked of the worker's own device, and of nothing where it has none."""
    assert probe._no_device_ipc([]) == "the worker has no CUDA device"


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_device_memory_of_a_torch_without_cuda():
    """The reason comes from the ipc backend itself."""
    assert "was built without CUDA" in probe._no_device_ipc([torch.device("cuda:0")])
