"""Parse error messages of NCCL, CUDA, Gloo and torch's rendezvous. Only this module and missing_cuda.py do this.

torch raises most errors of these libraries as a RuntimeError, so only the message distinguishes them. NCCL logs the
reason of a refusal as a warning and returns only ``ncclInvalidUsage``. torch appends NCCL's message as "Last error" if
it can. tests/unit/test_error_texts.py has the messages of each version.

Sources: NCCL's init.cc, transport/nvls.cc and utils.cc of the release tags; torch's NCCLUtils.cpp, ProcessGroupNCCL.cpp and
socket.cpp; Gloo's transport/tcp.
"""

from __future__ import annotations

import errno
import re

# torch's prefix of CUDA errors.
_CUDA_ERROR = "CUDA error: "
_REFUSALS = re.compile(
    r"Duplicate GPU detected(?:\s*:\s*rank \d+ and rank \d+ both on CUDA device \w+)?"
    r"|Multiple ranks (?:detected|are) using the same GPU[^.\n;)]*"
    r"|NCCL_NVLS_ENABLE has been set to \"1\" and communicator has multiple ranks[^.\n;)]*",
    re.IGNORECASE,
)
_OWN_FAILURES = re.compile(r"(?m)^nccl(?!Remote)(\w+Error|InvalidArgument):|NCCL communicator: (unhandled|internal)")
_LAST_ERROR = re.compile(r"^Last error:\s*\n\s*(\S[^\n]*)", re.MULTILINE)
# Another process holds the memory or the device, or torch has no CUDA. cuBLAS and MPS have their own messages.
_UNTRIED = re.compile(
    r"out of memory|not enough memory|CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|busy or unavailable|\bMPS\b"
    r"|not compiled with CUDA|invalid device (?:ordinal|id)|no CUDA.capable device|no CUDA GPUs|no NVIDIA driver"
    r"|cudaGetDeviceCount|driver version is insufficient|initialization (?:error|failed)|CUDA unknown error",
    re.IGNORECASE,
)
# Address in use: 48 on macOS, 98 on Linux, 10048 on Windows. 10013 is a port that Windows has reserved or that is held
# exclusively.
_IN_USE_ERRNOS = {48, 98, 10048, 10013, errno.EADDRINUSE}
_IN_USE = re.compile(
    r"address already in use|EADDRINUSE|(?:errno|error|code): -?(?:48|98|10048|10013)\b", re.IGNORECASE
)


def cause_of(error: BaseException) -> str:
    """Summarize an error of any library in one line: its first line, and NCCL's last error if torch appended it."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    last = _LAST_ERROR.search(text)
    first = text.splitlines()[0]
    return f"{first}: {last.group(1).strip()}" if last else first


# NCCL


def nccl_kind(error: BaseException) -> str:
    """Return the kind of failure (see errors.py) from NCCL's message in torch's error, ``failed`` if there is none."""
    text = str(error)
    if refusal_in(text):
        return "refused"
    if is_invalid_usage(text):
        return "invalid_usage"
    if is_own_failure(text):
        return "own_failure"
    return "stalled" if is_timeout(text) else "failed"


def refusal_in(text: str) -> str | None:
    """Detect NCCL's duplicate-GPU error in an error message; None if there is none."""
    found = _REFUSALS.search(text)
    return found.group().strip() if found else None


def refused_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks of the communicator that the message names, in ascending order; newer versions name none."""
    return tuple(sorted(map(int, re.findall(r"\brank (\d+)", refusal_in(text) or ""))))


def is_invalid_usage(text: str) -> bool:
    """Return True if NCCL returned ``ncclInvalidUsage``, with or without a reason."""
    return "ncclInvalidUsage" in text or ("NCCL" in text and "invalid usage" in text)


def is_own_failure(text: str) -> bool:
    """Return True if NCCL failed on the rank itself, not because it lost a peer, which is ``ncclRemoteError``."""
    return _OWN_FAILURES.search(text) is not None and "Call to connect" not in text


def is_out_of_memory(text: str) -> bool:
    """Return True if NCCL found no memory on the device for its communicator or a buffer."""
    return "ncclUnhandledCudaError" in text and "out of memory" in text.lower()


def is_timeout(text: str) -> bool:
    """Return True if an NCCL wait timed out; torch's error names the group's timeout, not that of the wait."""
    return "Watchdog caught collective operation timeout" in text


# CUDA


def is_cuda_error(error: BaseException | None) -> bool:
    """Return whether CUDA refused a call of torch: an AcceleratorError since torch 2.8, a RuntimeError before."""
    return isinstance(error, RuntimeError) and str(error).startswith(_CUDA_ERROR)


def is_cuda_out_of_memory(error: BaseException | None) -> bool:
    """Return whether CUDA lacked memory of the device or the host; torch's allocator raises another class."""
    return isinstance(error, RuntimeError) and str(error).startswith(f"{_CUDA_ERROR}out of memory")


def says_nothing_of_device(error: BaseException) -> bool:
    """Return whether the device was not tested: this process has no memory or no device, or torch has no CUDA."""
    # Only the first line: the text that torch appends names other errors.
    return _UNTRIED.search(cause_of(error)) is not None


def without_allocator(text: str) -> str:
    """Return torch's out-of-memory message without its advice on the allocator."""
    return text.partition(" Including non-PyTorch memory")[0].rstrip(".")


# Gloo and the rendezvous


def has_no_transport(error: BaseException) -> bool:
    """Return whether Gloo refused a device because this build has no transport, or not the selected one."""
    return "unsupported gloo device" in str(error)


def has_no_port(error: BaseException) -> bool:
    """Return whether the system had no free port for Gloo."""
    return "bind: Address already in use" in str(error)


def is_lost_connection(text: str) -> bool:
    """Return whether Gloo, NCCL or c10d did not reach a peer, which does not say whose fault it is."""
    return re.search(r"connectFullMesh|timed? ?out|remote process exited", text, re.IGNORECASE) is not None


def awaited_ranks(text: str) -> tuple[int, ...]:
    """Return the rank whose address a rank waited for while Gloo connected the ranks, from the last part of the store's key."""
    found = re.search(r"wait timeout after \d+ms, keys: \S*//cpu//\d+/(\d+)$", text)
    return (int(found[1]),) if found else ()


def is_address_in_use(error: BaseException) -> bool:
    """Return True for c10d's and the system's errors if a port is in use."""
    # Python maps Windows' 10013 to another errno and keeps the original code beside it.
    if isinstance(error, OSError) and {error.errno, getattr(error, "winerror", None)} & _IN_USE_ERRNOS:
        return True
    return _IN_USE.search(str(error)) is not None
