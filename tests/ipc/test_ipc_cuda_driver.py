"""Calls of the CUDA driver and checks of the platform; the driver's library is replaced."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_fracbackend.ipc import device_memory_support
from ray_fracbackend.ipc.device import driver as cuda_driver
from ray_fracbackend.ipc.device import runtime as cuda_runtime
from ray_fracbackend.ipc.device.runtime import CudaRuntime


class Driver:
    """Replaces libcuda: records the calls, returns the code that a test sets for a name, and fills in results."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.codes: dict[str, int] = {}
        self.missing: set[str] = set()
        self.results: dict[str, int] = {"cuMemAlloc_v2": 1 << 40, "cuIpcOpenMemHandle_v2": 1 << 41}

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self.missing:
            raise AttributeError(name)

        def function(*args: Any) -> int:
            self.calls.append((name, args))
            if name == "cuGetErrorName":
                args[1]._obj.value = f"CUDA_ERROR_{args[0]}".encode()
            elif name in self.results:
                args[0]._obj.value = self.results[name]
            elif name.startswith("cuDeviceGetUuid"):
                args[0][:] = range(16)
            elif name == "cuIpcGetMemHandle":
                ctypes.memmove(ctypes.addressof(args[0]._obj), bytes(range(64)), 64)
            return self.codes.get(name, 0)

        return function

    def names(self) -> list[str]:
        """Return the names of the calls, in order."""
        return [name for name, _ in self.calls]


def device(index: int) -> CudaRuntime:
    """One device with the replaced library."""
    return CudaRuntime(torch.device("cuda", index))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """The replaced library; tensors over its memory are created elsewhere."""
    fake = Driver()
    monkeypatch.setattr(cuda_driver, "_library", lambda: fake)
    monkeypatch.setattr(cuda_runtime, "tensor_at", lambda pointer, num_bytes, index: torch.empty(num_bytes // 4096))
    cuda_driver._primary_context.cache_clear()
    yield fake
    cuda_driver._primary_context.cache_clear()


def test_blocks_are_whole_granules_in_the_primary_context(driver: Driver) -> None:
    """A handle opens the whole granule, so it may contain no other data; the thread's own context is restored."""
    block = device(1).allocate((2 << 20) + 1)
    assert (block.pointer, block.imported) == (1 << 40, False)
    assert dict(driver.calls)["cuDeviceGet"][1] == 1
    names = driver.names()
    assert names[-3:] == ["cuCtxPushCurrent_v2", "cuMemAlloc_v2", "cuCtxPopCurrent_v2"]
    assert dict(driver.calls)["cuMemAlloc_v2"][1].value == 4 << 20
    device(1).release(block)
    assert driver.names()[-2] == "cuMemFree_v2"
    # Retained once and never released, because it is torch's own.
    assert driver.names().count("cuDevicePrimaryCtxRetain") == 1


def test_handles_are_passed_completely(driver: Driver) -> None:
    """Another process opens what one process exports, and releases it by closing it."""
    handle = device(0).export(device(0).allocate(1))
    assert handle == bytes(range(64))
    block = device(0).open(handle, 4096)
    args = dict(driver.calls)["cuIpcOpenMemHandle_v2"]
    assert (bytes(args[1].reserved), args[2]) == (handle, 1)
    device(0).release(block)
    assert driver.names()[-2] == "cuIpcCloseMemHandle"


def test_a_full_device_is_a_memory_error_and_others_have_the_drivers_name(driver: Driver) -> None:
    """Set-up requests less after the former and stops after the latter; the context is popped after both."""
    driver.codes = {"cuMemAlloc_v2": 2, "cuIpcOpenMemHandle_v2": 201}
    with pytest.raises(MemoryError, match="cuMemAlloc_v2"):
        device(0).allocate(1)
    with pytest.raises(cuda_driver.DriverError, match="cuIpcOpenMemHandle_v2: CUDA_ERROR_201"):
        device(0).open(bytes(64), 1)
    names = driver.names()
    assert names.count("cuCtxPushCurrent_v2") == names.count("cuCtxPopCurrent_v2") == 2


@pytest.mark.parametrize("name", ["cuDeviceGetUuid_v2", "cuDeviceGetUuid"])
def test_the_identity_is_the_slices_own_where_the_driver_knows_slices(driver: Driver, name: str) -> None:
    """The older function returns the UUID of a MIG slice's parent: two slices would count as one device."""
    driver.missing = {"cuDeviceGetUuid_v2"} - {name}
    assert device(1).uuid() == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert driver.names()[-1] == name
    assert driver.calls[-1][1][1].value == 0
    assert "cuDevicePrimaryCtxRetain" not in driver.names()


@pytest.mark.parametrize(("code", "value", "expected"), [(0, 1, True), (0, 0, False), (1, 1, False)])
def test_a_driver_that_does_not_know_the_question_has_no_timelines(
    driver: Driver, code: int, value: int, expected: bool
) -> None:
    """The attribute was added with the calls; if a device denies it, the words are not used."""
    driver.codes, driver.results["cuDeviceGetAttribute"] = {"cuDeviceGetAttribute": code}, value
    assert cuda_driver.has_timelines(0) == expected
    assert dict(driver.calls)["cuDeviceGetAttribute"][1] == 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    assert "cuDevicePrimaryCtxRetain" not in driver.names()


def test_words_of_the_host_are_written_and_waited_for_by_streams(driver: Driver) -> None:
    """By the device's address for them, in the device's context, as 64-bit numbers; a wait is for "at least"."""
    driver.results["cuMemHostGetDevicePointer_v2"] = 1 << 42
    stream = SimpleNamespace(cuda_stream=77)
    pointer = device(1).register(4096, 8192)
    assert pointer == 1 << 42
    address, num_bytes, flags = dict(driver.calls)["cuMemHostRegister_v2"]
    assert (address.value, num_bytes.value, flags) == (4096, 8192, 3)  # portable, mapped
    device(1).write_word(stream, pointer, 1 << 40)
    device(1).wait_for_word(stream, pointer, 1 << 40)
    for name in ("cuStreamWriteValue64_v2", "cuStreamWaitValue64_v2"):
        handle, at, value, mode = dict(driver.calls)[name]
        assert (handle.value, at.value, value.value, mode) == (77, pointer, 1 << 40, 0)  # 0: GEQ
        before, _, after = (driver.names()[driver.names().index(name) + i] for i in (-1, 0, 1))
        assert (before, after) == ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2")
    device(1).unregister(4096)
    assert dict(driver.calls)["cuMemHostUnregister"][0].value == 4096


@pytest.mark.parametrize(
    ("release", "expected"),
    [("5.15.153.1-microsoft-standard-WSL2", None), ("5.10.120-tegra", "Tegra"), ("6.8.0", None)],
)
def test_support_names_the_platform(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, release: str, expected: str | None
) -> None:
    """A platform without shared CUDA memory has its own reason; on others, including WSL, the device and the set-up decide."""
    monkeypatch.setattr(cuda_driver.platform, "release", lambda: release)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    driver.results["cuDeviceGetAttribute"] = 1
    reason = device_memory_support(0)
    assert (reason is None) if expected is None else (expected in str(reason))
    if expected is None:
        assert "no device 1" in str(device_memory_support(1))
        driver.results["cuDeviceGetAttribute"] = 0
        assert "cannot wait for memory" in str(device_memory_support(0))
        driver.codes = {"cuInit": 100}
        assert "cuInit: CUDA_ERROR_100" in str(device_memory_support(0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA device" in str(device_memory_support(0))
