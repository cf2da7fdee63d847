"""Environment variables of the backends ipc and staged, and their defaults. Imports the standard library only.

The values may differ between ranks. The rank that creates a host's memory decides its layout and how to reduce there;
the first rank of a device decides how to reduce on the device. Device memory uses the smallest chunk of all ranks.
Polling is per rank.
"""

from __future__ import annotations

import os

# Bytes of one slot. A collective moves its tensor in chunks of this size; each chunk costs a rank its waits for the others.
CHUNK_BYTES_ENV_VAR = "RAY_FRACBACKEND_IPC_CHUNK_BYTES"
DEFAULT_CHUNK_BYTES = 1 << 22
MIN_CHUNK_BYTES = 64 * 1024
MAX_CHUNK_BYTES = 1 << 28
# Slots of each rank: the number of chunks by which a rank may be ahead of a slower one.
SLOTS_ENV_VAR = "RAY_FRACBACKEND_IPC_SLOTS"
DEFAULT_SLOTS, MIN_SLOTS, MAX_SLOTS = 2, 2, 64

# Microseconds that a rank polls a peer's counter before it sleeps in the kernel.
SPIN_US_ENV_VAR = "RAY_FRACBACKEND_IPC_SPIN_US"
DEFAULT_SPIN_US = 200

# Up to this size one pass is faster than two, with three ranks: it reads N slots, and two passes read 2, but wait twice.
ONE_PASS_BYTES_ENV_VAR = "RAY_FRACBACKEND_IPC_ONE_PASS_BYTES"
DEFAULT_ONE_PASS_BYTES = 192 * 1024

# How CUDA tensors travel: "auto" (device memory if the ranks can share it, else staged), "memory" (an error if they
# cannot share it) or "staged". For tests and benchmarks.
DEVICE_PATH_ENV_VAR = "RAY_FRACBACKEND_IPC_DEVICE_PATH"

# The same sizes for device memory. The defaults are to be adjusted after measurements on a GPU.
DEVICE_CHUNK_BYTES_ENV_VAR = "RAY_FRACBACKEND_IPC_DEVICE_CHUNK_BYTES"
DEFAULT_DEVICE_CHUNK_BYTES = 1 << 25
MAX_DEVICE_CHUNK_BYTES = 1 << 32
DEVICE_ONE_PASS_BYTES_ENV_VAR = "RAY_FRACBACKEND_IPC_DEVICE_ONE_PASS_BYTES"
DEFAULT_DEVICE_ONE_PASS_BYTES = 256 * 1024

# Bytes of a pinned buffer, which holds one chunk of a CUDA tensor on the host. The smallest value of all ranks is used.
STAGED_CHUNK_BYTES_ENV_VAR = "RAY_FRACBACKEND_STAGED_CHUNK_BYTES"
DEFAULT_STAGED_CHUNK_BYTES = 1 << 22
# How staged tensors travel between the ranks: "auto" (shared host memory if all ranks have it) or "gloo".
STAGED_INNER_ENV_VAR = "RAY_FRACBACKEND_STAGED_INNER"


def _int_in(name: str, default: int, low: int, high: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ValueError(f"{name}={text!r} must be an integer from {low} to {high}; unset it for {default}")
    return value


def _one_of(name: str, default: str, *others: str) -> str:
    text = os.environ.get(name, default)
    if text not in (default, *others):
        allowed = ", ".join(map(repr, (default, *others[:-1])))
        raise ValueError(f"{name}={text!r} must be {allowed} or {others[-1]!r}; unset it for {default!r}")
    return text


def chunk_bytes() -> int:
    """Return the bytes of one slot, a multiple of 4096.

    Raises:
        ValueError: The variable is not an integer in range.
    """
    value = _int_in(CHUNK_BYTES_ENV_VAR, DEFAULT_CHUNK_BYTES, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
    return value // 4096 * 4096


def num_slots() -> int:
    """Return the number of slots of each rank.

    Raises:
        ValueError: The variable is not an integer in range.
    """
    return _int_in(SLOTS_ENV_VAR, DEFAULT_SLOTS, MIN_SLOTS, MAX_SLOTS)


def one_pass_bytes(num_ranks: int) -> int:
    """Return the size in bytes up to which an all_reduce of three or more ranks in host memory runs in one pass.

    Raises:
        ValueError: The variable is not an integer in range.
    """
    return _int_in(ONE_PASS_BYTES_ENV_VAR, DEFAULT_ONE_PASS_BYTES // max(1, num_ranks - 2), 0, 1 << 62)


def spin_us() -> int:
    """Return the upper bound, in microseconds, on polling before sleeping."""
    return _int_in(SPIN_US_ENV_VAR, DEFAULT_SPIN_US, 0, 1_000_000)


def device_chunk_bytes() -> int:
    """Return the bytes of one slot in device memory, a multiple of 4096."""
    value = _int_in(DEVICE_CHUNK_BYTES_ENV_VAR, DEFAULT_DEVICE_CHUNK_BYTES, MIN_CHUNK_BYTES, MAX_DEVICE_CHUNK_BYTES)
    return value // 4096 * 4096


def device_one_pass_bytes() -> int:
    """Return the size in bytes up to which an all_reduce on device memory runs in one pass."""
    return _int_in(DEVICE_ONE_PASS_BYTES_ENV_VAR, DEFAULT_DEVICE_ONE_PASS_BYTES, 0, 1 << 62)


def device_path() -> str:
    """Return how the tensors of a CUDA device are to travel: "auto", "memory" or "staged".

    Raises:
        ValueError: The variable has another value.
    """
    return _one_of(DEVICE_PATH_ENV_VAR, "auto", "memory", "staged")


def staged_chunk_bytes() -> int:
    """Return the bytes of a pinned buffer, a multiple of 4096."""
    value = _int_in(STAGED_CHUNK_BYTES_ENV_VAR, DEFAULT_STAGED_CHUNK_BYTES, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES)
    return value // 4096 * 4096


def staged_may_use_shared_memory() -> bool:
    """Return whether staged tensors may go through shared host memory.

    Raises:
        ValueError: The variable is neither "auto" nor "gloo".
    """
    return _one_of(STAGED_INNER_ENV_VAR, "auto", "gloo") == "auto"


def invalid_value() -> str | None:
    """Return what is wrong with the first variable whose value is invalid, None if all values are valid."""
    try:
        chunk_bytes(), num_slots(), one_pass_bytes(2), spin_us()
        device_path(), device_chunk_bytes(), device_one_pass_bytes()
        staged_chunk_bytes(), staged_may_use_shared_memory()
    except ValueError as error:
        return str(error)
    return None
