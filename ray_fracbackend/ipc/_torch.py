"""The names of torch.distributed that are private, or typed differently from release to release.

Checked on torch 2.13; the names are those of 2.7 to 2.15 as far as the published
sources show. Types are given up here, once, instead of in every module.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _autograd, _distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

# For what tensors torch takes the backend: of a group that claims CUDA it uses CUDA, also where it has none.
DEVICES: tuple[str, ...] = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)  # type: ignore[no-untyped-call]
# Device types whose tensors can be staged: the CPU's own, and the accelerator that this torch was built for.
_accelerator: Any = getattr(getattr(torch, "accelerator", None), "current_accelerator", lambda: None)()
STAGED_DEVICES: tuple[str, ...] = tuple(dict.fromkeys((*DEVICES, *([_accelerator.type] if _accelerator else []))))
# Option classes of the collectives (AllreduceOptions and so on) are public nowhere else.
c10d: Any = _distributed_c10d
Backend: Any = dist.Backend
ProcessGroup: Any = dist.ProcessGroup
# Before that, torch's C++ drops the Python part of a group's Work when Python does, and then waits for ever.
HAS_PYTHON_GROUPS: bool = torch.__version__ >= "2.7"
# None where torch was built without Gloo (Windows on ARM, some custom builds).
ProcessGroupGloo: Any = getattr(dist, "ProcessGroupGloo", None)
ReduceOp: Any = dist.ReduceOp
RedOpType: Any = dist.ReduceOp.RedOpType
Reducer: Any = _distributed_c10d.Reducer
Work: Any = dist.Work
PrefixStore: Any = _distributed_c10d.PrefixStore
TCPStore: Any = _distributed_c10d.TCPStore
# Storage over memory that torch does not own: pointer, device, bytes. As torch's CUDA graph trees use it, in 2.4 already.
storage_at: Any = torch._C._construct_storage_from_data_pointer
# Number of dispatch modes that the calling thread is in, and the context without them.
dispatch_modes: Any = torch._C._len_torch_dispatch_stack
no_dispatch_modes: Any = _disable_current_modes
# What a class of tensors has that does not see each operation.
no_torch_dispatch: Any = torch._C._disabled_torch_dispatch_impl
profiler_enabled: Any = _autograd._profiler_enabled
# A record of the profiler: begins with a name and arguments, may end in another thread.
start_record: Any = _autograd._record_function_with_args_enter
end_record: Any = _autograd._record_function_with_args_exit


def never_trace(code: CodeType) -> None:
    """Mark a function's code so that ``torch.compile`` skips its frames, and where this torch can also those below."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # older torch
        frames.skip_code(code)
    else:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the default timeout of a Gloo group, under the name that this torch has for it."""
    for name in ("set_timeout", "_set_default_timeout"):
        if hasattr(group, name):
            getattr(group, name)(timeout)
            break


def stop(groups: Iterable[Any], verb: str) -> None:
    """Call ``abort`` or ``shutdown`` of Gloo groups, which have neither in every torch release. None is skipped."""
    for group in groups:
        if group is not None:
            with suppress(RuntimeError, AttributeError):
                getattr(group, verb)()


def is_registered(name: str) -> bool:
    """Return whether a backend of this name was registered with torch."""
    return name.upper() in Backend._plugins
