"""Find out why torch cannot use a CUDA device, and what to do about it. Runs on the worker.

CUDA's own error comes first and is quoted; NVML and CUDA_VISIBLE_DEVICES only distinguish causes of the same error. NVML is
always optional. torch is imported only by the functions that need it, because the doctor uses NVML even if torch cannot
be imported.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ray_fracbackend.worker.cuda_driver import COMPUTE_MODES

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUOTED_CHARS = 250
# The index of PyPI has no CUDA build for Windows. Other CUDA releases: pytorch.org.
_CUDA_WHEELS = "https://download.pytorch.org/whl/cu130"
_DEFAULT_MODE = "run nvidia-smi -c DEFAULT on the node"


def why_no_cuda(error: Exception | None = None) -> str:
    """Find out why torch cannot use a CUDA device in this process. Initializes CUDA but creates no context.

    Args:
        error: Error of a torch.cuda call; None to initialize CUDA and use that error.

    Returns:
        Cause and advice in one line, without a full stop.
    """
    import torch

    name = f"torch {torch.__version__}"
    if torch.version.cuda is None and torch.version.hip is None:
        index = "" if sys.platform != "win32" else f": pip install --force-reinstall torch --index-url {_CUDA_WHEELS}"
        return f"{name} is a CPU-only build; install a CUDA build of torch to use GPUs{index}"
    if error is None:
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]  # torch has no annotation for it
        except Exception as failed:  # AssertionError, RuntimeError, or DeferredCudaCallError, which is neither
            error = failed
    said = "" if error is None else next(iter(str(error).strip().splitlines()), type(error).__name__)
    with nvml_session() as nvml:
        num_gpus, counted, modes = _nvml_findings(nvml)
    visible = os.environ.get(_VISIBLE)
    evidence = [f'CUDA says "{textwrap.shorten(said, _QUOTED_CHARS, placeholder=" ...")}"'] if said else []
    evidence += [counted, *([f"{_VISIBLE}={visible!r}"] if visible is not None else [])]
    cause, advice = _cause(said.lower(), name, num_gpus, modes, visible)
    return f"{cause} ({', '.join(evidence)}); {advice}"


def _cause(said: str, name: str, num_gpus: int | None, modes: set[str | None], visible: str | None) -> tuple[str, str]:
    """Return cause and advice, from CUDA's error in lower case and the GPUs that NVML counts, None if unknown."""
    if "no nvidia driver on your system" in said:
        container = "start a container with the node's GPUs and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return f"{name} finds no NVIDIA driver on the node", f"install one, or on Linux {container}"
    if "driver on your system is too old" in said:
        return (
            f"the NVIDIA driver of the node is too old for {name}",
            "update it, or install an older CUDA build of torch",
        )
    if "busy or unavailable" in said:
        for mode in ("prohibited", "exclusive_process"):
            if mode in modes:
                return f"a GPU of the node is in compute mode {mode.upper()}", _DEFAULT_MODE
        return "the GPU is busy or unavailable", f"end the process that uses it (see nvidia-smi), or {_DEFAULT_MODE}"
    if "no cuda gpus are available" in said or "no cuda-capable device is detected" in said:
        if num_gpus != 0 and visible is not None and not _names_gpu(visible, num_gpus):
            return f"{_VISIBLE}={visible!r} names none of the node's GPUs", "correct it, or num_gpus of the node"
        return "CUDA finds no GPU that it can use", f"compare nvidia-smi -L with num_gpus of the node and {_VISIBLE}"
    if "launch timed out" in said:
        return "the display driver ended a kernel at its time limit (TDR)", "use a smaller batch, or raise TdrDelay"
    return f"{name} cannot use CUDA", "see nvidia-smi and the system's log, then restart the worker's process"


def _names_gpu(visible: str, num_gpus: int | None) -> bool:
    """Return whether the first entry is, or may be, the index of a GPU: CUDA stops at the first invalid entry."""
    first = visible.split(",")[0].strip()
    if num_gpus is None:
        return first.isdecimal() or first.startswith(("GPU-", "MIG-"))
    return first.isdecimal() and int(first) < num_gpus


def _nvml_findings(nvml: Any) -> tuple[int | None, str, set[str | None]]:
    """Return the number of the node's GPUs, the same as a text with the driver, and their compute modes."""
    count = nvml_answer(nvml, nvml.nvmlDeviceGetCount) if nvml else None
    if count is None:
        return None, "NVML does not answer", set()
    driver = nvml_answer(nvml, nvml.nvmlSystemGetDriverVersion)
    handles = [nvml_answer(nvml, nvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    modes = [nvml_answer(nvml, nvml.nvmlDeviceGetComputeMode, handle) for handle in handles if handle is not None]
    counted = f"NVML counts {count} GPU{'s' * (count != 1)}{f' with driver {driver}' if driver else ''}"
    return count, counted, {COMPUTE_MODES.get(mode) for mode in modes}


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
    """Return the result of an NVML function of `nvml_session`, text as str; None if it raises an NVMLError."""
    try:
        result = function(*arguments)
    except nvml.NVMLError:
        return None
    return result.decode() if isinstance(result, bytes) else result
