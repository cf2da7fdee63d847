"""The memory cap, with simulated answers of CUDA."""

import contextlib
import types

import pytest
import torch

from ray_fracbackend import FracTorchConfig
from ray_fracbackend.worker import memory_cap
from ray_fracbackend.worker.state import STATE

_GIB = 1 << 30


@pytest.fixture
def fractions(monkeypatch):
    """Record calls of set_per_process_memory_fraction on a device with 80 GiB, of which 39.5 are in use."""
    told = []
    # Otherwise Ray's own context would query the worker's device.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, device: told.append((fraction, str(device)))
    )
    memory = types.SimpleNamespace(total_memory=80 * _GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(39.5 * _GIB))
    yield told
    STATE.memory_cap = None


def test_set_and_remove(fractions):
    """A later start with another cap or without one removes the earlier cap; without any cap nothing is called."""
    memory_cap.set_cap(None)
    assert fractions == []
    memory_cap.set_cap(0.5, "cuda:1")
    memory_cap.set_cap(0.25, "cuda:0")
    memory_cap.set_cap(None)
    memory_cap.set_cap(None)
    assert fractions == [(0.5, "cuda:1"), (1.0, "cuda:1"), (0.25, "cuda:0"), (1.0, "cuda:0")]


def train(context, error):
    with context():
        raise error


def test_out_of_memory_names_the_cap(fractions):
    """torch's error leaves the train function with the cap, the fraction and the advice, and keeps its class."""
    memory_cap.set_cap(0.5, "cuda:0")
    context = FracTorchConfig(limit_gpu_memory=True).train_func_context
    original = torch.cuda.OutOfMemoryError("Tried to allocate 2.00 GiB.")
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate") as caught:
        train(context, original)
    assert "caps this worker at its fraction 0.5 of cuda:0: 40.00 of 80.00 GiB" in str(caught.value)
    assert "torch holds 39.50" in str(caught.value)
    assert caught.value.__cause__ is original


def test_out_of_memory_under_v1(fractions):
    """V1 raises its own error from the train function's error before the context is left."""
    from ray.air._internal.util import StartTraceback
    from ray.train._internal.utils import construct_train_func

    def run_out():
        raise torch.cuda.OutOfMemoryError("Tried to allocate 2.00 GiB.")

    memory_cap.set_cap(0.5, "cuda:0")
    context = FracTorchConfig(limit_gpu_memory=True).train_func_context
    with pytest.raises(StartTraceback) as caught:
        construct_train_func(run_out, None, context, discard_returns=True)()
    told = caught.value.__cause__
    assert isinstance(told, torch.cuda.OutOfMemoryError)
    assert str(told).startswith("Tried to allocate 2.00 GiB.\nlimit_gpu_memory=True caps")


def test_other_errors_pass(fractions):
    """Any other error, and out of memory without a cap, leaves the train function unchanged."""
    context = FracTorchConfig(limit_gpu_memory=True).train_func_context
    for error in (torch.cuda.OutOfMemoryError("full"), RuntimeError("mine")):
        with pytest.raises(type(error)) as caught:
            train(context, error)
        assert caught.value is error


def test_stock_context_inside():
    seen = []

    @contextlib.contextmanager
    def stock():
        seen.append("enter")
        yield
        seen.append("leave")

    with memory_cap.explain_out_of_memory(stock):
        seen.append("train")
    assert seen == ["enter", "train", "leave"]
