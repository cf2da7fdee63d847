"""The probe without a GPU: simulated answers of a GPU's libraries."""

import os
import socket
import subprocess
import sys
import types
import uuid
from dataclasses import asdict
from unittest.mock import MagicMock, Mock

import pytest
import ray
import torch

from ray_fracbackend import IncompatibleWorkersError, __version__, _ray
from ray_fracbackend.decide.plain import workers_of
from ray_fracbackend.decide.worker_info import NOT_PROBED
from ray_fracbackend.ipc import host_memory_support
from ray_fracbackend.worker import devices as devices_module
from ray_fracbackend.worker import probe
from ray_fracbackend.worker.cuda_driver import DriverFacts
from ray_fracbackend.worker.devices import boot_id, described, mps_reachable, worker_devices
from tests.unit.builders import worker

_UUID, _OTHER = (f"ab12cd34-0000-0000-0000-00000000000{number}" for number in (1, 2))
_BUS = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
_BUS_ID = "00000000:3b:00.0"
NO_GPUS = RuntimeError("No CUDA GPUs are available")


@pytest.fixture
def cuda(monkeypatch):
    """Simulate one CUDA device in torch, without NVML and without the driver's library unless facts are given."""

    def install(device_count=1, error=NO_GPUS, facts=None, **properties):
        described = {"uuid": uuid.UUID(_UUID), "name": "NVIDIA H200", "total_memory": 1 << 30, **properties}

        def init():
            if not device_count:
                raise error

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: device_count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: device_count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**described))
        monkeypatch.setattr(devices_module, "driver_facts", lambda index: facts)
        monkeypatch.setitem(sys.modules, "pynvml", None)

    return install


def facts_on(*devices, **own):
    return probe.collect_info(
        [torch.device(device) for device in devices], rank=0, node_id="", node_ip="127.0.0.1", **own
    )


def describe():
    (found,), missing = described([torch.device("cuda:0")])
    assert missing is None
    return found


_WHOLE = DriverFacts(uuid=_UUID, pci_bus_id=_BUS_ID, compute_mode=3)
_SLICE = DriverFacts(uuid=_OTHER, pci_bus_id=_BUS_ID, compute_mode=0)


@pytest.mark.parametrize(
    ("facts", "properties", "expected"),
    [
        (_WHOLE, {}, (f"GPU-{_UUID}", None, _BUS_ID, "exclusive_process")),
        (_SLICE, {}, (f"MIG-{_OTHER}", f"GPU-{_UUID}", _BUS_ID, "default")),
        (_WHOLE, {"name": "NVIDIA H200 MIG 1g.18gb"}, (f"MIG-{_UUID}", None, _BUS_ID, "exclusive_process")),
        (_WHOLE, {"uuid": uuid.UUID(int=0)}, (f"GPU-{_UUID}", None, _BUS_ID, "exclusive_process")),
        (DriverFacts(uuid=_UUID), _BUS, (f"GPU-{_UUID}", None, _BUS_ID, "unknown")),
        (None, {}, (f"GPU-{_UUID}", None, None, "unknown")),
        (None, _BUS, (f"GPU-{_UUID}", None, _BUS_ID, "unknown")),
    ],
    ids=["whole", "slice", "slice by its name", "torch has zeros", "bus id of torch", "no driver", "no driver, bus id"],
)
def test_identity_of_a_device(cuda, facts, properties, expected):
    """The driver's UUID; torch's properties may have that of the GPU, so its slices would count as one device."""
    cuda(facts=facts, **properties)
    found = describe()
    assert (found.uuid, found.parent_uuid, found.pci_bus_id, found.compute_mode) == expected
    assert found.is_mig == expected[0].startswith("MIG")


PROBE_A_DEVICE = """
import sys, types, torch, torch.distributed as dist
from ray_fracbackend.worker import probe
from ray_fracbackend.worker.devices import described
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(name="a GPU", total_memory=1, uuid="UUID")
assert described([torch.device("cuda:0")])[1] is None
probe.collect_info([], rank=0, node_id="", node_ip="127.0.0.1")
print([name for name in (*sys.modules, *dist.Backend.backend_list) if name.startswith(("ray_fracbackend.ipc", "ipc"))])
"""


def test_devices_are_probed_without_the_ipc_backend():
    """The next release may lack private names of torch that ipc uses, but jobs with NCCL must still start."""
    found = subprocess.run([sys.executable, "-c", PROBE_A_DEVICE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("uuid_of", [None, uuid.UUID(int=0)], ids=["none", "zeros"])
@pytest.mark.parametrize(("bus", "last"), [(_BUS, _BUS_ID), ({}, "0")], ids=["bus id", "index"])
@pytest.mark.parametrize("kernel", ["b0071d", ""], ids=["boot id", "host name"])
def test_device_without_uuid(monkeypatch, cuda, uuid_of, bus, last, kernel):
    """Without a UUID the device is identified by host and PCI bus id, or by its index if the bus id is unknown."""
    cuda(uuid=uuid_of, **bus)
    monkeypatch.setattr(devices_module, "boot_id", lambda: kernel)
    found = describe()
    assert found.uuid == f"BUS-{kernel or socket.gethostname()}/{last}"
    assert (found.pci_bus_id, found.is_mig) == (last if bus else None, False)


@pytest.mark.parametrize(
    "error", [RuntimeError("it is lost\nCUDA kernel errors"), torch.cuda.DeferredCudaCallError("it is lost")]
)
def test_device_that_cannot_be_read(monkeypatch, cuda, error):
    """If torch counts a device but cannot describe it, this is the worker's cause, and none of its devices is used."""
    cuda(device_count=2)
    answers = MagicMock(side_effect=[torch.cuda.get_device_properties(0), error])
    monkeypatch.setattr(torch.cuda, "get_device_properties", answers)
    found = facts_on("cuda:0", "cuda:1", cuda_missing=None)
    assert found.devices == ()
    assert found.cuda_missing.startswith("cuda:1 cannot be used: ")
    assert 'cannot use CUDA (CUDA says "it is lost"' in found.cuda_missing


@pytest.mark.parametrize(
    ("visible", "of_ray", "starts", "ends"),
    [
        ("0", ["cuda:1"], "num_gpus", "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES=0"),
        ("MIG-1,MIG-2", ["cuda:1"], "num_gpus", "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES=0"),
        ("0", ["cpu"], "Ray Train assigned this worker no CUDA device", ""),
        ("0", [], "Ray Train assigned this worker no CUDA device", ""),
        ("7", None, "CUDA_VISIBLE_DEVICES='7' does not fit Ray's GPU ids ('0' is not in list)", "the variable to Ray"),
    ],
    ids=["num_gpus", "slices", "CPU", "none", "not in the variable"],
)
def test_why_a_worker_has_no_device(cuda, monkeypatch, visible, of_ray, starts, ends):
    """num_gpus exceeds the GPUs, or the slices that CUDA shows a process; `train_on_cpu` ran; the user set the variable."""
    cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def assigned():
        if of_ray is None:
            raise ValueError("'0' is not in list")
        return [torch.device(each) for each in of_ray]

    monkeypatch.setattr(_ray, "worker_devices", assigned)
    devices, missing = worker_devices(True)
    assert devices == []
    assert missing.startswith(starts)
    assert missing.endswith(ends)
    if starts == "num_gpus":
        assert f"exceeds the GPUs present: device 1 of 1, CUDA_VISIBLE_DEVICES={visible!r}; correct num_gpus" in missing


def test_the_devices_are_those_of_ray(cuda, monkeypatch):
    cuda(device_count=2)
    monkeypatch.setattr(_ray, "worker_devices", lambda: [torch.device("cuda:1")])
    assert worker_devices(True) == ([torch.device("cuda:1")], None)


def test_cuda_says_first_why_there_is_no_device(monkeypatch, cuda):
    cuda(device_count=0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    devices, missing = worker_devices(True)
    assert devices == []
    assert missing.startswith("CUDA_VISIBLE_DEVICES='NoDevFiles' names none of the node's GPUs")


def test_cpu_worker_has_no_devices():
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
    assert uuid.UUID(boot_id())


@pytest.mark.windows(reason="needs a system without Linux's boot id")
def test_no_boot_id():
    assert boot_id() == ""


@pytest.fixture
def half_a_gpu(monkeypatch, cuda):
    """Simulate a Ray worker with half a GPU, without Ray."""
    cuda()
    resources = {"CPU": 1.0, "GPU": 0.5}
    answers = {"get_node_id": "node", "get_assigned_resources": resources, "get_accelerator_ids": {"GPU": ["0"]}}
    monkeypatch.setattr(
        ray, "get_runtime_context", lambda: Mock(**{f"{name}.return_value": answers[name] for name in answers})
    )
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(_ray, "worker_devices", lambda: [torch.device("cuda:0")])


def test_a_node_known_by_name(monkeypatch, half_a_gpu):
    """The probe returns the address of the node's name, with which the driver decides."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "head")
    monkeypatch.setattr(probe, "node_address", {"head": "10.0.0.1"}.get)
    assert probe.probe_devices(0).node_ip == "10.0.0.1"


def test_ipc_on_demand(half_a_gpu, monkeypatch):
    """Only ask_ipc checks host memory and variables, in probe_worker and probe_devices."""
    asked = host_memory_support()
    found = [probe.probe_devices(0), *workers_of([probe.probe_worker(1)])]
    assert [each.ipc_host_memory_missing for each in found] == [NOT_PROBED] * 2
    assert (found[0].staged_missing == NOT_PROBED) == (sys.platform != "win32")
    found = [probe.probe_devices(0, ask_ipc=True), *workers_of([probe.probe_worker(1, None, None, True, ask_ipc=True)])]
    assert [each.ipc_host_memory_missing for each in found] == [asked] * 2
    monkeypatch.setenv("RAY_FRACBACKEND_IPC_SPIN_US", "1ms")
    wrong = probe.probe_devices(0, ask_ipc=True)
    said = "RAY_FRACBACKEND_IPC_SPIN_US='1ms' must be an integer from 0 to 1000000; unset it for 200"
    assert wrong.ipc_host_memory_missing == wrong.staged_missing == said


@pytest.mark.parametrize(
    ("version", "ranks", "text"),
    [
        ("0.0.9", (1, 2), "ranks 1,2: version 0.0.9 of"),
        (__version__, (), f"a worker: another build of version {__version__} (report is {{'rank': 1"),
    ],
    ids=["version", "fields"],
)
def test_answers_of_other_versions(version, ranks, text):
    """The error names the ranks and both versions, before the report is interpreted."""
    others = [(version, asdict(worker(rank)) | {"cgroup": ""}) for rank in (1, 2)]
    with pytest.raises(IncompatibleWorkersError) as caught:
        workers_of([(__version__, asdict(worker(0))), *others])
    assert caught.value.ranks == ranks
    assert str(caught.value).startswith(text)
    assert f"and the controller has {__version__}. Install one version on every node" in str(caught.value)
