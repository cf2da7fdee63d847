"""Try Gloo on a CUDA tensor in a separate process, which may crash. Runs on the worker, on Windows.

On Windows torch's Gloo has no all_reduce of CUDA tensors. The process ends with an access violation, without a Python
error (pytorch#186535). A group of one rank is enough to test this, because the operation is looked up before any
communication.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from ray_fracbackend.errors import BackendUnavailableError, MissingDeviceError

# If a driver hangs, the trial must leave time for the error.
_MAX_S = 120.0
# Exit code if CUDA refused the trial's tensor. On Windows abort() exits with 3.
_REFUSED = 90
_TRIAL = """
import sys
if sys.platform == "win32":
    import ctypes
    ctypes.windll.kernel32.SetErrorMode(0x0003)  # end at once, without a window that waits for somebody
import torch, torch.distributed as dist
try:
    tensor = torch.ones(2, device=sys.argv[1])
except Exception as error:
    print(str(error).splitlines()[0])
    sys.exit(90)
store = dist.TCPStore("127.0.0.1", 0, 1, True, use_libuv=False)  # no Windows wheel has HashStore or libuv
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(tensor)
sys.exit(tensor.tolist() != [1.0, 1.0])
"""


def try_gloo_on_cuda(device: str, timeout_s: float) -> None:
    """Run an all_reduce of a CUDA tensor over Gloo in a separate process.

    Args:
        device: Device of the tensor, such as ``cuda:0``.
        timeout_s: Time limit in seconds; a trial that takes longer counts as failed.

    Raises:
        MissingDeviceError: CUDA refused the device in the trial process, which is not Gloo's fault. The worker does not
            try the device itself: if CUDA accepted it this time, Gloo would crash the worker.
        BackendUnavailableError: The trial process did not produce the correct result.
    """
    try:
        trial = subprocess.run(
            [sys.executable, "-c", _TRIAL, device],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=min(timeout_s / 2, _MAX_S),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        how = f"did not end within {error.timeout:.0f} s"
    else:
        if trial.returncode == 0:
            return
        if trial.returncode == _REFUSED:
            refused = trial.stdout.decode(errors="replace").strip()
            raise MissingDeviceError(f"{device} cannot be used: {refused.rstrip('.')}. Look at nvidia-smi.")
        # Windows returns the code of an exception, such as 0xC0000005.
        how = f"ended with {trial.returncode & 0xFFFFFFFF:#x}"
    from ray_fracbackend.staged import staged_support  # not imported on the good path

    missing = staged_support()
    fix = f"Install a torch build that supports it: {missing}" if missing else "Use backend='auto'"
    raise BackendUnavailableError(
        f"Gloo of torch {torch.__version__} cannot all_reduce a tensor on {device}: a trial process {how} (pytorch#186535). "
        f"backend='auto' would stage CUDA tensors through host memory. {fix}."
    )
