"""Failures of CUDA, each made by a fault of the emulated runtime, and a program that says with which text torch fails then.

usage: python -m tests.cuda.cuda_steps CASE        prints the first step that fails, and its error, as JSON

ci/cuda_texts.py records these texts for tests/unit; tests/cuda/test_errors.py holds the record to the torch that runs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEMORY_MIB = 256
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """How one failure is made.

    Attributes:
        fault: As CUDA_RIG_FAULT takes it.
        steps: Names of `_STEPS`, in order.
        others_bytes: Device memory of another process that is there before; 0 for none, 1 for little more than its context.
        mig_gpus: GPUs of the machine, all in MIG mode; 0 for one that is not.
    """

    fault: str = ""
    steps: tuple[str, ...] = ("init", "properties", "allocation", "pinned", "kernel")
    others_bytes: int = 0
    mig_gpus: int = 0

    @property
    def env(self) -> dict[str, str]:
        """Variables of the emulated runtime for it."""
        shape = {"CUDA_RIG_DEVICES": str(self.mig_gpus), "CUDA_RIG_MIG": "2"} if self.mig_gpus else {}
        return {"CUDA_RIG_FAULT": self.fault, "CUDA_RIG_MEMORY_MIB": str(MEMORY_MIB), **shape}


_START = ("no_driver", "old_driver", "no_device", "not_initialized", "driver_mismatch", "no_forward_compatibility")
CASES = {
    **{name: Case(name) for name in _START},
    "prohibited": Case("prohibited"),
    "exclusive": Case("exclusive", others_bytes=1),
    "mps_clients": Case("mps_clients=0"),
    "device_full": Case(others_bytes=MEMORY_MIB << 20),
    "out_of_memory": Case("out_of_memory=1"),
    "device_lost": Case("device_lost=1"),
    "no_pinned_memory": Case("no_pinned_memory"),
    "forked_child": Case(steps=("allocation", "fork")),
    "no_ipc": Case("no_ipc", ("support", "export")),
    "no_ipc_import": Case("no_ipc_import", ("support", "import")),
    "no_stream_words": Case("no_stream_words", ("support",)),
    "no_stream_words_unasked": Case("no_stream_words", ("word",)),
    # Fails in torch 2.7.1 and 2.11.0.
    "mig_gpus": Case(steps=("init",), mig_gpus=2),
}


def _init() -> None:
    import torch

    torch.cuda.init()


def _properties() -> None:
    import torch

    torch.cuda.get_device_properties(0)


def _allocation() -> None:
    import torch

    torch.empty(1, device="cuda")


def _pinned() -> None:
    import torch

    torch.empty(1, pin_memory=True)


def _kernel() -> None:
    import torch

    torch.ones(1, device="cuda").add_(1).item()


def _fork() -> None:
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(first_failure(("allocation",))).encode())
        os._exit(0)
    os.wait()
    raise _Told(**json.loads(os.read(read, 1 << 16)))


def _support() -> None:
    from ray_fracbackend.ipc import device_memory_support

    if text := device_memory_support():
        raise _Told(type="str", text=text)


def _runtime() -> Any:
    import torch

    from ray_fracbackend.ipc.device.driver import CudaRuntime

    torch.zeros(1, device="cuda")
    return CudaRuntime(torch.device("cuda", 0))


def _export() -> None:
    runtime = _runtime()
    runtime.export(runtime.allocate(1))


def _word() -> None:
    runtime = _runtime()
    runtime.write_words(runtime.current_stream(), {runtime.allocate(8).pointer: 1})


def _import() -> None:
    runtime = _runtime()
    own = runtime.allocate(1)
    raise _Told(**_other_process("open", runtime.export(own).hex()))


_STEPS = {
    "init": _init,
    "properties": _properties,
    "allocation": _allocation,
    "pinned": _pinned,
    "kernel": _kernel,
    "fork": _fork,
    "support": _support,
    "export": _export,
    "word": _word,
    "import": _import,
}


class _Told(Exception):
    """An error that is known as type and text."""

    def __init__(self, **told: Any) -> None:
        super().__init__(told)
        self.told = {name: told[name] for name in ("type", "text")}


def first_failure(steps: tuple[str, ...]) -> dict[str, Any]:
    """Run the steps; the first that fails, and type and text of its error."""
    for step in steps:
        try:
            _STEPS[step]()
        except _Told as error:
            return {"step": step, **error.told}
        except Exception as error:
            # Process ids are others in every run.
            text = re.sub(r"\bProcess \d+", "Process 4711", str(error))
            # Of a stack of calls the files are.
            text = re.sub(r"(originally invoked at:\n).*", r"\1...", text, flags=re.DOTALL)
            return {"step": step, "type": type(error).__name__, "text": text}
    return {"step": None}


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tests.cuda.cuda_steps", *arguments]


def _other_process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(_command(*arguments), stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _open(handle: str) -> dict[str, Any]:
    """Map another process's memory."""
    try:
        _runtime().open(bytes.fromhex(handle), 1)
    except RuntimeError as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": None, "text": None}


def _hold(num_bytes: int) -> None:
    """Keep a context and memory of the device until stdin ends."""
    import torch

    torch.cuda.init()
    blocks = []
    try:
        while sum(block.numel() for block in blocks) < num_bytes:
            blocks.append(torch.empty(min(num_bytes, 1 << 20), dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        pass
    print("there", flush=True)
    sys.stdin.read()


@contextmanager
def holding(num_bytes: int, **env: str) -> Iterator[None]:
    """Have another process keep memory of the device."""
    command = _command("hold", str(num_bytes))
    pipe = subprocess.PIPE
    other = subprocess.Popen(command, cwd=_ROOT, env={**os.environ, **env}, stdin=pipe, stdout=pipe)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"there\n"
        yield
    finally:
        other.communicate()


def run_case(case: Case) -> dict[str, Any]:
    """Make the failure in this process."""
    import torch

    with holding(case.others_bytes) if case.others_bytes else nullcontext():
        return {"torch": torch.__version__, **first_failure(case.steps), "count": torch.cuda.device_count()}


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        _hold(int(sys.argv[2]))
    elif sys.argv[1] == "open":
        print(json.dumps(_open(sys.argv[2])))
    else:
        print(json.dumps(run_case(CASES[sys.argv[1]])))
