"""What the package says of every failure of CUDA, on the real torch: with NVML, without it, and with each function of it failing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.cuda.cuda_steps import CASES
from tests.cuda.emulated import run_program

RECORD = json.loads((Path(__file__).parents[1] / "unit" / "cuda_texts.json").read_text())
GPU = "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
SLICE = "MIG-11a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf"
BUS_ID = "00000000:1b:00.0"

# What the probe and the doctor's look at the driver find, once for each set of faults that stdin names: a JSON line each. The last line
# tells which one crashed.
PROBE = """
import json, os, sys
import torch
from dataclasses import asdict
from ray_fracbackend.cli.doctor.facts import _devices, nvidia_driver
from ray_fracbackend.worker import missing_cuda, probe
base = os.environ.get("CUDA_RIG_FAULT", "")
for line in sys.stdin:
    os.environ["CUDA_RIG_FAULT"] = ",".join(filter(None, [base, line.strip()]))
    print(line.strip(), end="\\t", flush=True)
    machine = _devices("127.0.0.1")["worker"]
    devices = [torch.device("cuda", i) for i in range(machine["num_visible_devices"])]
    own = {} if devices else {"cuda_missing": machine["cuda_missing"]}
    info = probe.collect_info(devices, rank=0, node_id="", node_ip="127.0.0.1", resources={"GPU": 1.0}, **own)
    found = {"missing": info.cuda_missing, "node": nvidia_driver().get("num_driver_gpus") or None}
    found["contexts"] = torch.cuda.memory_allocated() if devices else 0
    for device in info.devices[:1]:
        found |= {name: getattr(device, name) for name in ("uuid", "parent_uuid", "pci_bus_id", "compute_mode", "name")}
    assert "ray_fracbackend.ipc" not in sys.modules
    assert machine["devices"] == asdict(info)["devices"] and machine["cuda_missing"] == info.cuda_missing
    print(json.dumps(found), flush=True)
"""


def state(tmp_path, **env):
    """Variables of an emulated machine of its own."""
    return {"CUDA_RIG_STATE": str(tmp_path), **env}


def probed(tmp_path, *faults, base="", **env):
    """What the probe finds under each of these faults, in one process."""
    done = run_program(
        PROBE,
        input="".join(f"{fault}\n" for fault in faults),
        limit_s=90,
        **state(tmp_path, CUDA_RIG_FAULT=base, **env),
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    answers = [line.partition("\t") for line in done.stdout.splitlines()]
    assert [fault for fault, _, _ in answers] == list(faults)
    return {fault: json.loads(found) for fault, _, found in answers}


def without_nvml_library():
    """The search path of libraries, without the folder of NVML's."""
    folders = os.environ["LD_LIBRARY_PATH"].split(":")
    left = [folder for folder in folders if not folder.endswith("/nvml")]
    assert len(left) < len(folders)
    return ":".join(left)


@pytest.mark.parametrize("name", CASES)
def test_the_record_is_what_this_torch_says(tmp_path, name):
    """The unit tests' texts are this torch's own, word for word."""
    case, release = CASES[name], torch.__version__.partition("+")[0]
    if release not in RECORD:
        pytest.skip(f"torch {release} has no record")
    run = (
        f"import json; from tests.cuda.cuda_steps import CASES, run_case; print(json.dumps(run_case(CASES[{name!r}])))"
    )
    done = run_program(run, **state(tmp_path, **case.env))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("torch") == RECORD[release]["version"]
    assert found == RECORD[release]["errors"][name], done.stderr[-3000:]


# Fault, and cause and advice in the text; with NVML, without it.
STARTS = {
    "no_driver": ("finds no NVIDIA driver on the node", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    "old_driver": ("the NVIDIA driver of the node is too old for torch", "update it"),
    "no_device": ("finds no GPU", "num_gpus of the node"),
    "not_initialized": ("Error 802: system not yet initialized", "nvidia-smi"),
    "driver_mismatch": ("Error 803: system has unsupported display driver", "nvidia-smi"),
    "no_forward_compatibility": ("Error 804: forward compatibility was attempted", "nvidia-smi"),
}


@pytest.mark.parametrize("fault", STARTS)
def test_why_cuda_does_not_start(tmp_path, fault):
    """Cause and advice are the same without NVML, which only adds what it counts."""
    cause, advice = STARTS[fault]
    for nvml, found in probed(tmp_path, "", "no_nvml", base=fault).items():
        text = found["missing"]
        assert cause in text
        assert advice in text.rpartition("; ")[2]
        assert "uuid" not in found
        if fault not in ("no_driver", "driver_mismatch"):  # these have no NVML
            assert ("NVML does not answer" in text) == (nvml == "no_nvml")


@pytest.mark.parametrize(("visible", "needs_nvml"), [("3", True), ("GPU-0123abcd", True), ("", False), ("-1", False)])
def test_a_variable_that_hides_the_gpus(tmp_path, visible, needs_nvml):
    """Ray's num_gpus is more than there are, or somebody set the variable by hand."""
    found = probed(tmp_path, "", "no_nvml", CUDA_VISIBLE_DEVICES=visible)
    names = f"CUDA_VISIBLE_DEVICES={visible!r} names "
    assert found[""]["missing"].startswith(names)
    text = found["no_nvml"]["missing"]
    assert text.startswith("CUDA finds no GPU that it can use" if needs_nvml else names)
    assert f"CUDA_VISIBLE_DEVICES={visible!r}" in text


FUNCTIONS = (
    "Init",
    "Shutdown",
    "SystemGetDriverVersion",
    "DeviceGetCount",
    "DeviceGetHandleByIndex",
    "DeviceGetHandleByUUID",
    "DeviceGetUUID",
    "DeviceGetPciInfo",
    "DeviceGetComputeMode",
    "DeviceGetDeviceHandleFromMigDeviceHandle",
)
NVML_FAULTS = ("", "no_nvml", *(f"nvml_{name}" for name in FUNCTIONS))


@pytest.mark.parametrize(
    ("env", "uuid"), [({"base": "exclusive"}, GPU), ({"CUDA_RIG_MIG": "2", "CUDA_VISIBLE_DEVICES": SLICE}, SLICE)]
)
def test_a_device_whatever_nvml_refuses(tmp_path, env, uuid):
    """UUID, bus id and compute mode are CUDA's own, also of a MIG slice; only what NVML alone knows is missing."""
    for fault, found in probed(tmp_path, *NVML_FAULTS, **env).items():
        assert (found["uuid"], found["pci_bus_id"], found["missing"]) == (uuid, BUS_ID, None), fault
        if uuid == GPU:
            counts = fault not in ("no_nvml", "nvml_Init", "nvml_DeviceGetCount")
            assert (found["node"], found["parent_uuid"]) == (1 if counts else None, None), fault
            assert found["compute_mode"] == "exclusive_process", fault
        else:
            assert found["parent_uuid"] == GPU, fault


@pytest.mark.parametrize("visible", [None, SLICE])
def test_no_library_of_nvml(tmp_path, visible):
    """As in a container with the driver's compute part alone."""
    env = {"LD_LIBRARY_PATH": without_nvml_library()}
    env |= {"CUDA_RIG_MIG": "2", "CUDA_VISIBLE_DEVICES": visible} if visible else {}
    (found,) = probed(tmp_path, "", **env).values()
    assert (found["uuid"], found["node"], found["compute_mode"]) == (visible or GPU, None, "default")
    assert found["pci_bus_id"] == BUS_ID
