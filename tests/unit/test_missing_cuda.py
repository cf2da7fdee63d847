"""Why torch cannot use a CUDA device: each cause from torch's message, and what NVML and the environment add.

The messages of ``recorded`` come from real CUDA builds of torch on the emulated runtime: ci/cuda_texts.py.
"""

import json
import re
import sys
import types
from pathlib import Path

import pytest
import torch

from ray_fracbackend.decide.advice import _ADVICE
from ray_fracbackend.decide.error_texts import is_cuda_error
from ray_fracbackend.worker.missing_cuda import why_no_cuda

RECORD = json.loads(Path(__file__).with_name("cuda_texts.json").read_text())
RELEASES = tuple(RECORD)


def recorded(name, release=RELEASES[0]):
    return RECORD[release]["errors"][name]["text"]


class Nvml(types.SimpleNamespace):
    """A driver with GPUs in these compute modes; functions that are refused raise an error."""

    class NVMLError(Exception):
        """Same name as in pynvml."""

    def __init__(self, modes=(0,), refused=()):
        super().__init__(nvmlInit=int, nvmlShutdown=int, nvmlDeviceGetHandleByIndex=int)
        self.nvmlDeviceGetCount = lambda: len(modes)
        self.nvmlDeviceGetComputeMode = lambda handle: modes[handle]
        self.nvmlSystemGetDriverVersion = lambda: b"580.65"
        vars(self).update(dict.fromkeys(refused, self.refuse))

    def refuse(self, *arguments):
        raise self.NVMLError


@pytest.fixture
def why(monkeypatch):
    """Return the text of a CUDA build of torch whose CUDA does not start with this message."""

    def told(message, nvml=None, visible="0"):
        def init():
            raise RuntimeError(message)

        monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        text = why_no_cuda()
        assert text.isprintable()
        assert not text.endswith(".")
        assert len(text) < 550
        return text

    return told


_NONE, _BUSY, _RUN = "names none of the node's GPUs", "the GPU is busy or unavailable", "nvidia-smi -c DEFAULT"
_MODE = "a GPU of the node is in compute mode"
# Recorded message, NVML, CUDA_VISIBLE_DEVICES; cause and a part of the advice.
CASES = [
    ("no_driver", None, "0", "torch 2.13.0+cu130 finds no NVIDIA driver on the node", "install one"),
    ("no_driver", Nvml(), "0", "torch 2.13.0+cu130 finds no NVIDIA driver on the node", "compute,utility"),
    ("old_driver", Nvml(), "0", "the NVIDIA driver of the node is too old for torch 2.13.0+cu130", "update it"),
    ("exclusive", Nvml(), "0", _BUSY, "end the process"),
    ("exclusive", None, "0", _BUSY, _RUN),
    ("exclusive", Nvml([0, 3]), "0", f"{_MODE} EXCLUSIVE_PROCESS", _RUN),
    ("prohibited", Nvml([2]), "0", f"{_MODE} PROHIBITED", _RUN),
    ("no_device", Nvml(), "3", f"CUDA_VISIBLE_DEVICES='3' {_NONE}", "num_gpus"),
    ("no_device", Nvml(), "GPU-0123abcd", f"CUDA_VISIBLE_DEVICES='GPU-0123abcd' {_NONE}", "correct it"),
    ("no_device", Nvml(), "9,0", f"CUDA_VISIBLE_DEVICES='9,0' {_NONE}", "correct it"),
    ("no_device", None, "", f"CUDA_VISIBLE_DEVICES='' {_NONE}", "correct it"),
    ("no_device", None, "NoDevFiles", f"CUDA_VISIBLE_DEVICES='NoDevFiles' {_NONE}", "correct it"),
    ("no_device", None, "GPU-0123abcd", "CUDA finds no GPU that it can use", "nvidia-smi -L"),
    ("no_device", Nvml(), "0", "CUDA finds no GPU that it can use", "nvidia-smi -L"),
    ("no_device", Nvml([]), "0", "CUDA finds no GPU that it can use", "num_gpus of the node"),
    ("not_initialized", Nvml(), "0", "torch 2.13.0+cu130 cannot use CUDA", "the system's log"),
    ("mps_clients", Nvml(), "0", "torch 2.13.0+cu130 cannot use CUDA", "nvidia-smi"),
    ("device_lost", Nvml([2]), "0", "torch 2.13.0+cu130 cannot use CUDA", "restart the worker's process"),
]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("name", "nvml", "visible", "cause", "advice"), CASES)
def test_cause_and_what_to_do(why, release, name, nvml, visible, cause, advice):
    """The first line of the message of every torch is quoted; releases append different lines to it."""
    text = why(recorded(name, release), nvml, visible)
    found, _, rest = text.partition(" (CUDA says ")
    assert found == cause
    assert " ".join(recorded(name, release).splitlines()[0].split())[:200] in rest
    assert f"CUDA_VISIBLE_DEVICES={visible!r}); " in rest
    assert advice in text.rpartition("; ")[2]


@pytest.mark.parametrize(
    ("nvml", "says"),
    [
        (None, "NVML does not answer"),
        (Nvml(refused=["nvmlInit"]), "NVML does not answer"),
        (Nvml(refused=["nvmlDeviceGetCount"]), "NVML does not answer"),
        (Nvml(refused=["nvmlSystemGetDriverVersion"]), "NVML counts 1 GPU"),
        (Nvml(refused=["nvmlDeviceGetHandleByIndex"]), "NVML counts 1 GPU with driver 580.65"),
        (Nvml([0, 0], refused=["nvmlDeviceGetComputeMode", "nvmlShutdown"]), "NVML counts 2 GPUs with driver 580.65"),
    ],
)
def test_nvml_is_optional(why, nvml, says):
    """What NVML refuses is unknown; the cause is reported anyway."""
    assert f"{says}, CUDA_VISIBLE_DEVICES='0'); " in why(recorded("exclusive"), nvml)


def test_an_error_that_came_earlier(why):
    """It is used, without another start of CUDA; a long one is shortened, and one without a message has its class."""
    why("started again")
    assert 'CUDA says "it failed"' in why_no_cuda(RuntimeError("it failed\nsomewhere"))
    assert 'CUDA says "RuntimeError"' in why_no_cuda(RuntimeError())
    assert ' ..."' in why_no_cuda(RuntimeError("x " * 500))


def test_advice_for_windows(why):
    """No advice names what only other systems have, unless it names the system; MPS is advised only where NCCL is used."""
    elsewhere = re.compile(r"ulimit|dmesg|libcuda|/etc/|/dev/|LD_LIBRARY_PATH|container")
    texts = [*_ADVICE.values(), *(why(recorded(name), nvml, visible) for name, nvml, visible, *_ in CASES)]
    assert [text for text in texts if elsewhere.search(text) and "on Linux" not in text] == []


def test_a_kernel_that_the_display_driver_ended(why):
    """Windows resets a GPU whose kernel runs for longer than two seconds."""
    why("started again")
    assert "(TDR)" in why_no_cuda(RuntimeError("CUDA error: the launch timed out and was terminated"))


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(("name", "refused"), [("exclusive", True), ("device_full", True), ("no_driver", False)])
def test_errors_of_a_context(name, refused, release):
    """torch's words before CUDA's message show which call failed after CUDA's start; the class differs between releases."""
    assert is_cuda_error(RuntimeError(recorded(name, release))) == refused
    assert not is_cuda_error(ValueError(recorded(name, release)))
    assert not is_cuda_error(None)


def test_cpu_build(monkeypatch):
    """A build without CUDA is reported before anything that only a CUDA build can lack."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(sys, "platform", "linux")
    cause = f"torch {torch.__version__} is a CPU-only build; install a CUDA build of torch to use GPUs"
    assert why_no_cuda() == cause
    monkeypatch.setattr(sys, "platform", "win32")  # pip's default index has no other build there
    assert why_no_cuda().startswith(f"{cause}: pip install --force-reinstall torch --index-url https://")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "cannot use CUDA" in why_no_cuda(RuntimeError("No HIP device"))
