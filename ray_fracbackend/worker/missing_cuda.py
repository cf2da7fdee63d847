"""Find out why torch cannot use a CUDA device, and what to do about it. Runs on the worker.

CUDA's own error comes first; NVML and the environment variables only distinguish causes of the same error. NVML is
always optional. torch is imported only by the functions that need it, because the doctor uses NVML even if torch cannot
be imported.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

# nvmlComputeMode_t, without the mode for one thread at a time, which drivers no longer have.
COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive_process"}
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VARIABLES = (_VISIBLE, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_QUOTED_CHARS = 160

# c10/cuda/CUDAFunctions.cpp puts this before the number and name of an error for which it has no message.
_PREAMBLE = r"Unexpected error from \w+\(\)\..*?\? (?=Error \d)"

# Patterns for the error message in lower case.
_NO_DRIVER = "no nvidia driver on your system"
_LOST = "gpu is lost|fallen off the bus"
_BUSY = "busy or unavailable"  # CUDA's error 46, raised for the first context
_FAILED_KERNEL = "launch failure|hardware stack error|illegal memory access|device-side assert|illegal instruction|misaligned address"
_NO_GPUS = "no cuda gpus are available|no cuda-capable device is detected"
# Errors with their own text: pattern, cause, advice.
_OWN_ERRORS = (
    (
        "driver on your system is too old",
        "the NVIDIA driver of the node is too old for {torch}",
        "update the driver, or install a torch build for an older CUDA",
    ),
    (
        r"error \(?802\b|system not yet initialized",
        "the NVIDIA Fabric Manager, or another daemon of the driver, is not running on the node",
        "start nvidia-fabricmanager in the version of the driver",
    ),
    (
        r"error \(?803\b|unsupported display driver / cuda driver combination",
        "libcuda and the NVIDIA kernel driver of the node have different versions",
        "reboot the node after an update of its driver, or remove the container's own libcuda",
    ),
    (
        r"error \(?804\b|forward compatibility was attempted",
        "the CUDA compat libraries do not support the node's GPUs",
        "remove them from LD_LIBRARY_PATH and update the driver, or install a torch build for an older CUDA",
    ),
    (
        "required to (?:create|support) mps client|required to support device connections",
        "the MPS server has no room for this process",
        "let fewer ranks share the GPU, or end other processes that use MPS there (see nvidia-smi)",
    ),
    (
        r"\bmps\b",
        "the MPS daemon of the node does not serve this process",
        "restart it there: `echo quit | nvidia-cuda-mps-control`, then `nvidia-cuda-mps-control -d`",
    ),
    (
        "in forked subprocess|^cuda error: initialization error",
        "this process was forked from one that uses CUDA",
        "start it with the spawn method of multiprocessing",
    ),
    (
        "out of memory",
        "the GPU has no memory left for this process",
        "end other processes on it (see nvidia-smi), or let fewer ranks share it",
    ),
    (
        "no kernel image",
        "{torch} has no kernels for this GPU",
        "install a torch build for the GPU's compute capability",
    ),
    (
        "uncorrectable",
        "the GPU reports a hardware error",
        "see dmesg of the node for its Xid, and reset the GPU with nvidia-smi --gpu-reset",
    ),
    (
        "device < num_gpus",
        "torch counts more GPUs than CUDA shows this process, for example if several are in MIG mode",
        "set CUDA_VISIBLE_DEVICES to the UUID of one slice (see nvidia-smi -L), or update torch",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaFindings:
    """Findings of a process whose torch cannot use a CUDA device.

    Attributes:
        build: Platform of the torch build: ``cpu``, ``cuda``, ``rocm`` or ``xpu``.
        platform: ``sys.platform``.
        torch_version: ``torch.__version__``.
        cuda_version: CUDA version of the torch build, None for other builds.
        error: First line of torch.cuda's error, None if CUDA was initialized.
        num_gpus: Number of GPUs that NVML reports on the node, None if NVML does not answer.
        num_lost_gpus: Number of these GPUs that NVML reports as lost.
        compute_modes: Compute modes of the other GPUs, as in `COMPUTE_MODES`; ``unknown`` for other modes.
        driver_version: Version of the NVIDIA driver from NVML, None if unknown.
        variables: Environment variables that are set and hide GPUs from torch.
    """

    build: str = "cuda"
    platform: str = "linux"
    torch_version: str = ""
    cuda_version: str | None = None
    error: str | None = None
    num_gpus: int | None = None
    num_lost_gpus: int = 0
    compute_modes: tuple[str, ...] = ()
    driver_version: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def why_no_cuda(error: Exception | None = None) -> str:
    """Find out why torch cannot use a CUDA device in this process. Initializes CUDA but creates no context.

    Args:
        error: Error of a torch.cuda call; None to initialize CUDA and use that error.

    Returns:
        Cause and advice in one line, without a full stop.
    """
    import torch

    if error is None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        except Exception as failed:  # AssertionError of a CPU build, RuntimeError, DeferredCudaCallError
            error = failed
    with nvml_session() as nvml:
        found = CudaFindings(
            build=_build(),
            platform=sys.platform,
            torch_version=torch.__version__,
            cuda_version=torch.version.cuda,
            error=None if error is None else next(iter(str(error).strip().splitlines()), type(error).__name__),
            variables={name: os.environ[name] for name in _VARIABLES if name in os.environ},
            **(_nvml_findings(nvml) if nvml else {}),
        )
    return cause_text(found)


def cause_text(found: CudaFindings) -> str:
    """Return why torch cannot use a CUDA device, and what to do. Pure.

    Args:
        found: Findings of the process.

    Returns:
        One line without a full stop.
    """
    name, evidence, error = f"torch {found.torch_version}", _evidence(found), (found.error or "").lower()
    if found.build == "cpu" and found.platform == "darwin":
        return f"{name} for macOS has no CUDA; ask Ray for no GPUs there (on Apple silicon Ray counts one)"
    if found.build == "cpu":
        return f"{name} is a CPU-only build; install a CUDA build of torch to use GPUs"
    if found.build == "xpu":
        return f"{name} is a build for Intel GPUs (XPU), which Ray Train does not use; install a CUDA build of torch"
    if found.build == "rocm":
        return _rocm_cause(found, f"{name} is a ROCm build and finds no usable AMD GPU {evidence}")
    if found.error is None:
        return f"CUDA starts now, but torch had found no GPU before {evidence}; start the worker in a new process"
    for pattern, cause, advice in _OWN_ERRORS:
        if re.search(pattern, error):
            built_for = f"{name} with CUDA {found.cuda_version}" if found.cuda_version else name
            return f"{cause.format(torch=built_for)} {evidence}; {advice}"
    if _NO_DRIVER in error:
        return _driver_cause(found, name, evidence)
    if found.num_lost_gpus or re.search(_LOST, error):
        return f"a GPU of the node is lost {evidence}; reset it with nvidia-smi --gpu-reset, or reboot the node"
    if re.search(_FAILED_KERNEL, error):
        return (
            f"a kernel of this process or the GPU itself failed, and CUDA refuses every later call {evidence}; see dmesg of the "
            "node for an Xid, run the failing call with CUDA_LAUNCH_BLOCKING=1, and restart the worker's process"
        )
    no_gpus = re.search(_NO_GPUS, error)
    if re.search(_BUSY, error) or (no_gpus and set(found.compute_modes) == {"prohibited"}):
        return _busy_cause(found, evidence)
    if no_gpus:
        return _no_gpu_cause(found, evidence)
    return f"{name} cannot use CUDA {evidence}; check the driver with nvidia-smi, then restart the worker's process"


def _rocm_cause(found: CudaFindings, cause: str) -> str:
    if found.num_gpus:
        return f"{cause}; install a CUDA build of torch for the node's NVIDIA GPUs"
    variables = f", and {', '.join(found.variables)}" if found.variables else ""
    return f"{cause}; check rocminfo, the rights to /dev/kfd and /dev/dri{variables}"


def _driver_cause(found: CudaFindings, name: str, evidence: str) -> str:
    if found.num_gpus is None:
        return f"{name} finds no NVIDIA driver on the node; install one, or start the container with the node's GPUs"
    # A container with only the driver's utilities.
    return (
        f"{name} finds no libcuda {evidence}; install the driver's libcuda, or start the container with "
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )


def _busy_cause(found: CudaFindings, evidence: str) -> str:
    if "prohibited" in found.compute_modes:
        return f"a GPU of the node is in compute mode PROHIBITED {evidence}; run nvidia-smi -c DEFAULT on the node"
    if "exclusive_process" in found.compute_modes:
        return (
            f"a GPU of the node is in compute mode EXCLUSIVE_PROCESS and busy {evidence}; run nvidia-smi -c DEFAULT on "
            "the node, or start the MPS daemon"
        )
    if found.num_gpus is None:
        return (
            f"the GPU is busy or unavailable {evidence}; run nvidia-smi -c DEFAULT on the node, because another compute "
            "mode causes this error too, or end the process that uses the GPU"
        )
    return f"the GPU is busy or unavailable {evidence}; end the process that uses it (see nvidia-smi), or reset the GPU"


def _no_gpu_cause(found: CudaFindings, evidence: str) -> str:
    """Return the cause if CUDA was initialized but reports no GPU."""
    visible = found.variables.get(_VISIBLE)
    if found.num_gpus == 0:
        return f"the driver finds no GPU on the node {evidence}; start the container with GPUs, or correct its num_gpus"
    if visible is not None and not _names_gpu(visible, found.num_gpus):
        evidence = _evidence(replace(found, variables={}))
        return (
            f"{_VISIBLE}={visible!r} names none of the node's GPUs {evidence}; num_gpus of the node may be too high: correct "
            "it, or the variable"
        )
    if visible is not None and _repeats(visible):
        return (
            f"{_VISIBLE}={visible!r} names a GPU twice, and CUDA then uses none "
            f"{_evidence(replace(found, variables={}))}; correct it"
        )
    return (
        f"CUDA finds no GPU that it can use {evidence}; compare nvidia-smi -L with the variables: a GPU in MIG mode needs "
        "instances, and a container needs the GPU's device files"
    )


def _names_gpu(visible: str, num_gpus: int | None) -> bool:
    """Return whether the first entry is, or may be, the index of a GPU: CUDA stops at the first invalid entry."""
    first = visible.split(",")[0].strip()
    if num_gpus is None:
        return first.isdecimal() or first.startswith(("GPU-", "MIG-"))
    return first.isdecimal() and int(first) < num_gpus


def _repeats(visible: str) -> bool:
    names = [name.strip() for name in visible.split(",")]
    return len(set(names)) < len(names)


def _evidence(found: CudaFindings) -> str:
    parts = []
    if found.error:
        parts.append(f'{"HIP" if found.build == "rocm" else "CUDA"} says "{_quoted(found.error)}"')
    if found.num_gpus is not None:
        driver = f" with driver {found.driver_version}" if found.driver_version else ""
        lost = f", {found.num_lost_gpus} of them lost" if found.num_lost_gpus else ""
        parts.append(f"NVML counts {found.num_gpus} GPU{'s' * (found.num_gpus != 1)}{driver}{lost}")
    elif found.build == "cuda":
        parts.append("NVML does not answer")
    parts += [f"{name}={value!r}" for name, value in found.variables.items()]
    return f"({', '.join(parts)})"


def _quoted(text: str) -> str:
    """Return the first sentence, without torch's prefix of CUDA errors."""
    sentence = re.split(r"\.\s+(?=[A-Z])", re.sub(_PREAMBLE, "", text))[0]
    return textwrap.shorten(sentence.rstrip("."), _QUOTED_CHARS, placeholder=" ...")


def _build() -> str:
    import torch

    if torch.version.cuda is not None:
        return "cuda"
    if getattr(torch.version, "hip", None) is not None:
        return "rocm"
    # torch 2.4 and 2.5 do not have torch.version.xpu.
    return "xpu" if getattr(torch.version, "xpu", None) is not None or torch.xpu.is_available() else "cpu"


def _nvml_findings(nvml: Any) -> dict[str, Any]:
    count, lost, modes = nvml_answer(nvml, nvml.nvmlDeviceGetCount), 0, []
    for index in range(count or 0):
        try:
            mode = nvml.nvmlDeviceGetComputeMode(nvml.nvmlDeviceGetHandleByIndex(index))
            modes.append(COMPUTE_MODES.get(mode, "unknown"))
        except nvml.NVMLError as error:
            lost += getattr(error, "value", None) == nvml.NVML_ERROR_GPU_IS_LOST
    return {
        "num_gpus": count,
        "num_lost_gpus": lost,
        "compute_modes": tuple(modes),
        "driver_version": nvml_answer(nvml, nvml.nvmlSystemGetDriverVersion),
    }


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Initialize NVML for the duration of the block.

    Yields:
        The module ``pynvml``, None if it cannot be imported or NVML cannot be initialized.
    """
    pynvml = _started_nvml()
    try:
        yield pynvml
    finally:
        if pynvml:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()


def _started_nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # NVMLError, or any error while importing an optional library
        return None
    return pynvml


def nvml_answer(nvml: Any, function: Any, *arguments: Any) -> Any:
    """Call an NVML function for an optional detail.

    Args:
        nvml: The module from `nvml_session`.
        function: Function of the module.
        *arguments: Its arguments.

    Returns:
        The function's result, text as str; None if it raises an NVMLError.
    """
    try:
        result = function(*arguments)
    except nvml.NVMLError:
        return None
    return result.decode() if isinstance(result, bytes) else result
