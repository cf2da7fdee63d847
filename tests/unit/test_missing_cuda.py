"""Why torch cannot use a CUDA device: each cause from torch's message, and the collected findings.

The messages of ``recorded`` come from real CUDA builds of torch on the emulated runtime: ci/cuda_texts.py. Messages that it cannot produce
(ROCm and other builds, CUDA's unknown error, errors of broken hardware) are typed in and marked.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch

from ray_fracbackend.decide.error_texts import is_cuda_error
from ray_fracbackend.worker.missing_cuda import CudaFindings, cause_text, why_no_cuda

RECORD = json.loads(Path(__file__).with_name("cuda_texts.json").read_text())
RELEASES = tuple(RECORD)


def recorded(name, release=RELEASES[0]):
    """Return the recorded message of this torch release for this case."""
    return RECORD[release]["errors"][name]["text"]


NO_DRIVER, TOO_OLD, NO_GPUS = recorded("no_driver"), recorded("old_driver"), recorded("no_device")
_UNEXPECTED = recorded("not_initialized").partition("802")[0]
BUSY = recorded("exclusive")
# Typed in: c10/cuda/CUDAFunctions.cpp, for an error that the emulated runtime does not produce.
UNKNOWN = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)


def found(error=None, **own):
    """Return findings on a node with one GPU, which Ray assigned to the worker."""
    return CudaFindings(
        **{
            "torch_version": "2.13.0+cu130",
            "cuda_version": "13.0",
            "error": error and error.splitlines()[0],
            "num_gpus": 1,
            "driver_version": "580.65",
            "variables": {"CUDA_VISIBLE_DEVICES": "0"},
            **own,
        }
    )


_SEEN = "NVML counts 1 GPU with driver 580.65, CUDA_VISIBLE_DEVICES='0'"

CASES = {
    # Typed in: another build; so are XPU and ROCm below.
    "CPU-only build": (
        found("Torch not compiled with CUDA enabled", build="cpu", torch_version="2.13.0+cpu"),
        "torch 2.13.0+cpu is a CPU-only build",
        "install a CUDA build of torch to use GPUs",
    ),
    "macOS": (
        found("Torch not compiled with CUDA enabled", build="cpu", platform="darwin", torch_version="2.13.0"),
        "torch 2.13.0 for macOS has no CUDA",
        "ask Ray for no GPUs there",
    ),
    "XPU build": (
        found("Torch not compiled with CUDA enabled", build="xpu", torch_version="2.13.0+xpu"),
        "torch 2.13.0+xpu is a build for Intel GPUs (XPU)",
        "install a CUDA build of torch",
    ),
    "no driver": (
        found(NO_DRIVER, num_gpus=None, driver_version=None),
        "torch 2.13.0+cu130 finds no NVIDIA driver on the node",
        "install one, or start the container with the node's GPUs",
    ),
    "container without libcuda": (
        found(NO_DRIVER),
        f'finds no libcuda (CUDA says "Found no NVIDIA driver on your system", {_SEEN})',
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ),
    "driver too old": (
        found(TOO_OLD, driver_version="470.82"),
        "the NVIDIA driver of the node is too old for torch 2.13.0+cu130 with CUDA 13.0 "
        '(CUDA says "The NVIDIA driver on your system is too old (found version 11040)", NVML counts 1 GPU with driver 470.82',
        "update the driver, or install a torch build for an older CUDA",
    ),
    "802": (
        found(recorded("not_initialized"), num_gpus=8),
        'Fabric Manager, or another daemon of the driver, is not running on the node (CUDA says "Error 802: system not yet '
        'initialized", NVML counts 8 GPUs with driver 580.65',
        "start nvidia-fabricmanager in the version of the driver",
    ),
    "803": (
        found(recorded("driver_mismatch"), num_gpus=None),
        'libcuda and the NVIDIA kernel driver of the node have different versions (CUDA says "Error 803: system has '
        'unsupported display driver / cuda driver combination", NVML does not answer',
        "reboot the node after an update of its driver",
    ),
    "804": (
        found(recorded("no_forward_compatibility")),
        "the CUDA compat libraries do not support the node's GPUs (CUDA says \"Error 804: forward compatibility was "
        f'attempted on non supported HW", {_SEEN})',
        "remove them from LD_LIBRARY_PATH",
    ),
    # Typed in, like the next one: broken hardware.
    "GPU lost by NVML": (
        found(UNKNOWN, num_gpus=2, num_lost_gpus=1),
        'a GPU of the node is lost (CUDA says "CUDA unknown error - this may be due to an incorrectly set up environment, '
        'e.g. changing env variable CUDA_VISIBLE_DEVICES after program start", NVML counts 2 GPUs with driver 580.65, 1 of '
        "them lost",
        "reset it with nvidia-smi --gpu-reset, or reboot the node",
    ),
    "GPU lost by CUDA": (
        found("CUDA error: GPU is lost"),
        f'a GPU of the node is lost (CUDA says "CUDA error: GPU is lost", {_SEEN})',
        "reboot the node",
    ),
    "busy": (
        found(BUSY, compute_modes=("default",)),
        'the GPU is busy or unavailable (CUDA says "CUDA error: CUDA-capable device(s) is/are busy or unavailable"',
        "end the process that uses it (see nvidia-smi)",
    ),
    "exclusive mode": (
        found(BUSY, compute_modes=("exclusive_process",)),
        "a GPU of the node is in compute mode EXCLUSIVE_PROCESS and busy (CUDA says",
        "run nvidia-smi -c DEFAULT on the node, or start the MPS daemon",
    ),
    "busy, and no NVML to ask for the mode": (
        found(BUSY, num_gpus=None, driver_version=None),
        "the GPU is busy or unavailable (CUDA says",
        "run nvidia-smi -c DEFAULT on the node, because another compute mode causes this error too",
    ),
    "prohibited mode": (
        found(recorded("prohibited"), compute_modes=("prohibited",)),
        "a GPU of the node is in compute mode PROHIBITED (CUDA says",
        "run nvidia-smi -c DEFAULT on the node",
    ),
    "MPS has no room": (
        found(recorded("mps_clients")),
        'the MPS server has no room for this process (CUDA says "CUDA error: the hardware resources required to create MPS '
        'client have been exhausted"',
        "let fewer ranks share the GPU",
    ),
    # Typed in: cudaGetErrorString(cudaErrorMpsServerNotReady).
    "MPS does not serve": (
        found("CUDA error: MPS server is not ready to accept new MPS client requests"),
        "the MPS daemon of the node does not serve this process (CUDA says",
        "`nvidia-cuda-mps-control -d`",
    ),
    "no memory for a context": (
        found(recorded("device_full")),
        'the GPU has no memory left for this process (CUDA says "CUDA error: out of memory"',
        "let fewer ranks share it",
    ),
    "no memory for a tensor": (
        found(recorded("out_of_memory")),
        'the GPU has no memory left for this process (CUDA says "CUDA out of memory"',
        "let fewer ranks share it",
    ),
    "forked": (
        found(recorded("forked_child")),
        'this process was forked from one that uses CUDA (CUDA says "Cannot re-initialize CUDA in forked subprocess"',
        "the spawn method of multiprocessing",
    ),
    "a kernel failed": (
        found(recorded("device_lost")),
        "a kernel of this process or the GPU itself failed, and CUDA refuses every later call "
        '(CUDA says "CUDA error: unspecified launch failure"',
        "see dmesg of the node for an Xid",
    ),
    "a kernel failed, and NVML says why": (
        found(recorded("device_lost"), num_lost_gpus=1),
        'a GPU of the node is lost (CUDA says "CUDA error: unspecified launch failure"',
        "reboot the node",
    ),
    # Typed in: cudaGetErrorString(cudaErrorNoKernelImageForDevice).
    "a GPU that torch was not built for": (
        found("CUDA error: no kernel image is available for execution on the device"),
        "torch 2.13.0+cu130 with CUDA 13.0 has no kernels for this GPU (CUDA says",
        "for the GPU's compute capability",
    ),
    # Typed in: cudaGetErrorString(cudaErrorECCUncorrectable).
    "broken memory": (
        found("CUDA error: uncorrectable ECC error encountered"),
        "the GPU reports a hardware error (CUDA says",
        "reset the GPU",
    ),
    # Typed in: an older driver, which then reports no device.
    "prohibited mode, and CUDA counts no device": (
        found(NO_GPUS, compute_modes=("prohibited",)),
        "a GPU of the node is in compute mode PROHIBITED (CUDA says",
        "run nvidia-smi -c DEFAULT on the node",
    ),
    "variable beyond the node's GPUs": (
        found(NO_GPUS, variables={"CUDA_VISIBLE_DEVICES": "3"}),
        "CUDA_VISIBLE_DEVICES='3' names none of the node's GPUs (CUDA says \"No CUDA GPUs are available\", NVML counts 1 GPU "
        "with driver 580.65)",
        "num_gpus of the node may be too high: correct it, or the variable",
    ),
    "variable that names a GPU twice": (
        found(NO_GPUS, num_gpus=2, variables={"CUDA_VISIBLE_DEVICES": "0, 0"}),
        "CUDA_VISIBLE_DEVICES='0, 0' names a GPU twice, and CUDA then uses none (CUDA says",
        "correct it",
    ),
    "driver without a GPU": (
        found(NO_GPUS, num_gpus=0),
        'the driver finds no GPU on the node (CUDA says "No CUDA GPUs are available", NVML counts 0 GPUs',
        "correct its num_gpus",
    ),
    "variable names a GPU that CUDA does not use": (
        found(NO_GPUS),
        f'CUDA finds no GPU that it can use (CUDA says "No CUDA GPUs are available", {_SEEN})',
        "a GPU in MIG mode needs instances",
    ),
    "no variable, a GPU that CUDA does not use": (
        found(NO_GPUS, variables={}),
        "CUDA finds no GPU that it can use",
        "compare nvidia-smi -L",
    ),
    "no NVML to count the GPUs": (
        found(NO_GPUS, num_gpus=None, driver_version=None),
        "NVML does not answer, CUDA_VISIBLE_DEVICES='0')",
        "compare nvidia-smi -L",
    ),
    "ROCm without an AMD GPU": (
        found(
            "No HIP GPUs are available",
            build="rocm",
            torch_version="2.13.0+rocm7.0",
            num_gpus=None,
            variables={"HIP_VISIBLE_DEVICES": "5", "ROCR_VISIBLE_DEVICES": "1"},
        ),
        'torch 2.13.0+rocm7.0 is a ROCm build and finds no usable AMD GPU (HIP says "No HIP GPUs are available", '
        "HIP_VISIBLE_DEVICES='5', ROCR_VISIBLE_DEVICES='1')",
        "the rights to /dev/kfd and /dev/dri, and HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES",
    ),
    "ROCm on a node with NVIDIA GPUs": (
        found("No HIP GPUs are available", build="rocm", torch_version="2.13.0+rocm7.0"),
        "is a ROCm build and finds no usable AMD GPU",
        "install a CUDA build of torch for the node's NVIDIA GPUs",
    ),
    # Typed in.
    "anything else": (
        found("CUDA driver initialization failed, you might not have a CUDA gpu."),
        f'cannot use CUDA (CUDA says "CUDA driver initialization failed, you might not have a CUDA gpu", {_SEEN})',
        "check the driver with nvidia-smi",
    ),
    "CUDA starts by now": (
        found(),
        f"CUDA starts now, but torch had found no GPU before ({_SEEN})",
        "in a new process",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cause_and_what_to_do(case):
    """Each cause has its own sentence with the evidence and the advice."""
    findings, cause, advice = CASES[case]
    text = cause_text(findings)
    assert cause in text
    assert advice in text.rpartition("; ")[2]


@pytest.mark.parametrize("case", CASES)
def test_fits_into_the_error(case):
    """The sentence is one short line without a full stop, because the error continues after it."""
    text = cause_text(CASES[case][0])
    assert text.isprintable()
    assert not text.endswith(".")
    assert len(text) < 450


def test_causes_differ():
    """No two situations have the same sentence, and no failed initialization of CUDA is blamed on the variable."""
    assert len({cause_text(findings) for findings, *_ in CASES.values()}) == len(CASES)
    assert "names none" not in "".join(cause_text(found(case)) for case in (NO_GPUS, TOO_OLD, BUSY, UNKNOWN))


# Cause of each recorded failure, in every release of torch.
CALLED = {
    "no_driver": "finds no libcuda",
    "old_driver": "is too old for torch",
    "no_device": "the driver finds no GPU",
    "not_initialized": "Fabric Manager",
    "driver_mismatch": "have different versions",
    "no_forward_compatibility": "the CUDA compat libraries",
    "prohibited": "busy or unavailable",
    "exclusive": "busy or unavailable",
    "mps_clients": "the MPS server has no room",
    "device_full": "has no memory left",
    "out_of_memory": "has no memory left",
    "device_lost": "a kernel of this process or the GPU itself failed",
    "no_pinned_memory": "has no memory left",  # CUDA's message is that of device memory
    "forked_child": "forked",
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", CALLED)
def test_the_message_of_every_torch(name, release):
    """Releases append different lines to the first one; the cause is the same and quoted without them."""
    text = cause_text(found(recorded(name, release), num_gpus=0 if name == "no_device" else 1))
    assert CALLED[name] in text
    assert "Search for" not in text
    assert "asynchronously" not in text
    assert len(text) < 450


def test_several_gpus_in_mig_mode():
    """torch 2.7 queries each GPU that NVML counts, but CUDA shows a process only one slice."""
    text = cause_text(found(recorded("mig_gpus", "2.7.1"), num_gpus=2))
    assert text.startswith("torch counts more GPUs than CUDA shows this process")
    assert "device < num_gpus" in text
    assert "CUDA_VISIBLE_DEVICES to the UUID of one slice" in text.rpartition("; ")[2]
    assert RECORD["2.14.1"]["errors"]["mig_gpus"]["step"] is None


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("name", "refused"), [("exclusive", True), ("device_full", True), ("no_driver", False)])
def test_errors_of_a_context(name, refused, release):
    """torch's words before CUDA's message show which call failed after CUDA's start; the class differs between releases."""
    assert is_cuda_error(RuntimeError(recorded(name, release))) == refused
    assert not is_cuda_error(ValueError(recorded(name, release)))
    assert not is_cuda_error(None)


@pytest.mark.parametrize("release", RELEASES)
def test_variables_under_which_torch_counts_no_gpu(release):
    """On a machine with two GPUs; the variable is the cause in each case."""
    hidden = {value for value, told in RECORD[release]["visible"].items() if told["error"]}
    assert hidden == {"", "-1", "2", "0,0", "9,0", "NoDevFiles", "GPU-0123abcd"}
    for value in hidden:
        error = RECORD[release]["visible"][value]["error"]
        text = cause_text(found(error, num_gpus=2, variables={"CUDA_VISIBLE_DEVICES": value}))
        assert text.startswith(f"CUDA_VISIBLE_DEVICES={value!r} names ")


@pytest.mark.parametrize("visible", ["", "-1", "1", "NoDevFiles", "GPU-0123abcd", "9,0"])
def test_variable_that_names_none(visible):
    """CUDA stops at the first invalid entry, so an index beyond the GPUs hides the following ones."""
    text = cause_text(found(NO_GPUS, variables={"CUDA_VISIBLE_DEVICES": visible}))
    assert text.startswith(f"CUDA_VISIBLE_DEVICES={visible!r} names none of the node's GPUs")


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_variable_that_can_name_none(visible):
    """This is known without NVML, too."""
    variables = {"CUDA_VISIBLE_DEVICES": visible}
    text = cause_text(found(NO_GPUS, num_gpus=None, driver_version=None, variables=variables))
    assert text.startswith(f"CUDA_VISIBLE_DEVICES={visible!r} names none of the node's GPUs")


@pytest.mark.parametrize("error", [_UNEXPECTED + "460: unheard of", "CUDA error 8021", "x " * 500])
def test_unknown_errors_are_quoted(error):
    """A number that only starts like a known one is unknown, and a long message is shortened."""
    text = cause_text(found(error))
    assert "cannot use CUDA (CUDA says" in text
    assert len(text) < 450


class Nvml(types.SimpleNamespace):
    """A driver with GPUs, some of which return NVML's error GPU_IS_LOST."""

    NVML_COMPUTEMODE_DEFAULT, NVML_COMPUTEMODE_PROHIBITED, NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 0, 2, 3
    NVML_ERROR_GPU_IS_LOST = 15

    class NVMLError(Exception):
        """Same name as in pynvml."""

        def __init__(self, value):
            super().__init__(value)
            self.value = value

    def __init__(self, modes=(0,), lost=(), refused=()):
        super().__init__()
        self.modes, self.lost, self.refused = modes, lost, refused

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in self.refused:
            raise_error = self.NVMLError(999)

            def fail(*arguments):
                raise raise_error

            return fail
        return super().__getattribute__(name)

    def nvmlInit(self):
        pass

    def nvmlShutdown(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return b"580.65"

    def nvmlDeviceGetCount(self):
        return len(self.modes)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.lost:
            raise self.NVMLError(self.NVML_ERROR_GPU_IS_LOST)
        return index

    def nvmlDeviceGetComputeMode(self, handle):
        return self.modes[handle]


@pytest.fixture
def cuda_build(monkeypatch):
    """Simulate a CUDA build of torch whose initialization fails, with NVML."""

    def install(error, nvml):
        def init():
            if error:
                raise error

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    return install


def test_cuda_is_asked_first(cuda_build):
    """The error of torch.cuda.init() decides, not the variable."""
    cuda_build(RuntimeError(recorded("not_initialized")), Nvml())
    text = why_no_cuda()
    assert "Fabric Manager" in text
    assert f'CUDA says "Error 802: system not yet initialized", {_SEEN}' in text


def test_lost_gpu_is_found_by_nvml(cuda_build):
    """If NVML reports a GPU as lost, this is the cause of an unspecific error."""
    cuda_build(RuntimeError(UNKNOWN), Nvml((0, 0), lost=(1,)))
    text = why_no_cuda()
    assert text.startswith("a GPU of the node is lost")
    assert "NVML counts 2 GPUs with driver 580.65, 1 of them lost" in text


def test_compute_mode_is_found_by_nvml(cuda_build):
    """A busy GPU in exclusive mode is reported as such."""
    cuda_build(RuntimeError(BUSY), Nvml((3,)))
    assert "EXCLUSIVE_PROCESS" in why_no_cuda()


def test_error_that_came_earlier(cuda_build):
    """The error of an earlier torch.cuda call is used, without another initialization of CUDA."""
    cuda_build(AssertionError("initialized again"), Nvml())
    text = why_no_cuda(RuntimeError(recorded("device_lost")))
    assert 'CUDA says "CUDA error: unspecified launch failure", NVML' in text


def test_error_without_text(cuda_build):
    """An exception without a message is reported by its class."""
    cuda_build(RuntimeError(), Nvml())
    assert 'CUDA says "RuntimeError"' in why_no_cuda()


@pytest.mark.parametrize(
    ("nvml", "says"),
    [
        (None, "NVML does not answer"),
        (Nvml(refused=("nvmlInit",)), "NVML does not answer"),
        (Nvml(refused=("nvmlDeviceGetCount",)), "NVML does not answer"),
        (Nvml(refused=("nvmlSystemGetDriverVersion",)), "NVML counts 1 GPU, CUDA_VISIBLE"),
        (Nvml(refused=("nvmlDeviceGetHandleByIndex",)), _SEEN),
        (Nvml(refused=("nvmlDeviceGetComputeMode", "nvmlShutdown")), _SEEN),
    ],
    ids=["no pynvml", "init", "count", "driver", "handle", "mode and shutdown"],
)
def test_nvml_is_optional(cuda_build, nvml, says):
    """Details that NVML refuses are unknown; the cause is still reported."""
    cuda_build(RuntimeError(recorded("no_forward_compatibility")), nvml)
    text = why_no_cuda()
    assert text.startswith("the CUDA compat libraries do not support the node's GPUs")
    assert says in text


@pytest.mark.parametrize(
    ("versions", "xpu", "expected"),
    [
        ({"cuda": None, "hip": None, "xpu": None}, False, "is a CPU-only build"),
        ({"cuda": None, "hip": "7.0", "xpu": None}, False, "is a ROCm build"),
        ({"cuda": None, "hip": None, "xpu": "20250302"}, False, "is a build for Intel GPUs"),
        ({"cuda": None, "hip": None, "xpu": None}, True, "is a build for Intel GPUs"),
    ],
)
def test_builds(monkeypatch, cuda_build, versions, xpu, expected):
    """The build is reported before anything that only a CUDA build can lack."""
    cuda_build(AssertionError("Torch not compiled with CUDA enabled"), None)
    for name, value in versions.items():
        monkeypatch.setattr(torch.version, name, value, raising=False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
    assert expected in why_no_cuda()


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_this_torch():
    """The error of the installed CPU-only torch is known."""
    assert why_no_cuda() == f"torch {torch.__version__} is a CPU-only build; install a CUDA build of torch to use GPUs"
