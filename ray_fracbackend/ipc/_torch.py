"""Names of torch that are private, or whose types differ between releases.

Checked on torch 2.13; the names are those of 2.7 to 2.15 as far as the published
sources show. They are declared as Any here, once, instead of in every module.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _autograd, _distributed_c10d
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

# Device types to register the backend for: torch uses CUDA for a group that claims CUDA, even without a CUDA device.
DEVICES: tuple[str, ...] = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)  # type: ignore[no-untyped-call]
# Before 2.7, torch's C++ loses the Python part of a Work when Python drops its last reference, and then waits for ever.
HAS_PYTHON_GROUPS: bool = torch.__version__ >= "2.7"
# Device types whose tensors can be staged: the CPU, and the accelerator that this torch was built for. torch 2.6 raises if there is none.
_accelerator: Any = torch.accelerator.current_accelerator() if HAS_PYTHON_GROUPS else None
STAGED_DEVICES: tuple[str, ...] = tuple(dict.fromkeys((*DEVICES, *([_accelerator.type] if _accelerator else []))))
# The option classes of the collectives (AllreduceOptions and so on) have no public name.
c10d: Any = _distributed_c10d
Backend: Any = dist.Backend
ProcessGroup: Any = dist.ProcessGroup
# None where torch was built without Gloo (Windows on ARM, some custom builds).
ProcessGroupGloo: Any = getattr(dist, "ProcessGroupGloo", None)
ReduceOp: Any = dist.ReduceOp
RedOpType: Any = dist.ReduceOp.RedOpType
Reducer: Any = _distributed_c10d.Reducer
Work: Any = dist.Work
PrefixStore: Any = _distributed_c10d.PrefixStore
TCPStore: Any = _distributed_c10d.TCPStore
# Storage over memory that torch does not own: pointer, device, bytes. torch's CUDA graph trees use it, since 2.4.
storage_at: Any = torch._C._construct_storage_from_data_pointer
# Number of dispatch modes that are active in the calling thread, and a context manager that disables them.
dispatch_modes: Any = torch._C._len_torch_dispatch_stack
no_dispatch_modes: Any = _disable_current_modes
# Value of __torch_dispatch__ in tensor classes that do not intercept operations.
no_torch_dispatch: Any = torch._C._disabled_torch_dispatch_impl
# The innermost transform of torch.func that is active in the calling thread or None, and a context manager without any.
active_transform: Any = torch._C._functorch.peek_interpreter_stack
no_transforms: Any = temporarily_clear_interpreter_stack
# Tensors of such a transform, and the tensor in one.
functorch: Any = torch._C._functorch
profiler_enabled: Any = _autograd._profiler_enabled
# Start and end of a profiler record. The start has a name and arguments; the end may come from another thread.
start_record: Any = _autograd._record_function_with_args_enter
end_record: Any = _autograd._record_function_with_args_exit


def never_trace(code: CodeType) -> None:
    """Make ``torch.compile`` skip frames of this code and, if this torch supports it, the frames that they call."""
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # older torch
        frames.skip_code(code)
    else:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the default timeout of a Gloo group, with the method name of the installed torch."""
    for name in ("set_timeout", "_set_default_timeout"):
        if hasattr(group, name):
            getattr(group, name)(timeout)
            break


def stop(group: Any, verb: str) -> None:
    """Call ``abort`` or ``shutdown`` of a Gloo group if this torch release has it."""
    with suppress(RuntimeError, AttributeError):
        getattr(group, verb)()


def is_registered(name: str) -> bool:
    """Return whether a backend of this name is registered with torch."""
    return name.upper() in Backend._plugins
