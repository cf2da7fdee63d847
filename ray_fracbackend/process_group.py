"""Starts this worker's part of the job: environment, device, process group, verification. Runs on the worker."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    PrefixStore,
    distributed_c10d,
    get_debug_level,
)
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from ray_fracbackend import environment, memory_cap, ray_compat, report, store
from ray_fracbackend.errors import (
    FracBackendError,
    GroupFormationError,
    RendezvousError,
    SharedDeviceError,
    VerificationError,
)
from ray_fracbackend.interfaces import IFNAME
from ray_fracbackend.nccl_words import cause_of, refusal_in, refused_ranks
from ray_fracbackend.network import bounded, check_gloo_device, route_interface
from ray_fracbackend.rendezvous import WorkerRendezvous
from ray_fracbackend.store_limit import limited
from ray_fracbackend.verify import VerificationResult, backends_by_device, other_devices, verify_process_group

# After a start's time is over, for c10d and Gloo to end by themselves; the driver waits longer for the answer.
_SILENCE_S = 1.0
# For a failed group to be aborted.
_ABORT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class StartInstruction:
    """What one worker has to do; nothing about the others travels with it.

    Attributes:
        rank: The worker's rank.
        world_size: Workers in the job.
        backend: Name for ``init_process_group``.
        device: torch device that the worker trains on and is verified on.
        rendezvous: How the worker meets the other ranks.
        timeout_s: Timeout of the group's collectives once training runs, in seconds.
        budget_s: Bound on this worker's start, in seconds.
        verify: Run the collective check.
        train_on_cpu: Ray reserved GPUs that are not there: ``get_device()`` must say cpu.
        set_distributed_env: Set RANK and its kin before the group exists, as Ray Train V2 does.
        memory_fraction: Cap on the process's share of its device's memory, None for no cap.
        env_defaults: Variables to set where the user did not.
        report: The start report without verification figures, or what ``ray.get`` makes it of.
    """

    rank: int
    world_size: int
    backend: str
    device: str
    rendezvous: WorkerRendezvous
    timeout_s: float
    budget_s: float
    verify: bool
    train_on_cpu: bool = False
    set_distributed_env: bool = False
    memory_fraction: float | None = None
    env_defaults: Mapping[str, str] = field(default_factory=dict)
    report: Any = None


def start_worker(instruction: StartInstruction) -> VerificationResult | None:
    """Carries out one instruction. When it fails, the group is gone and the environment variables are as before.

    Returns:
        The verification figures, None where verification was not asked for.

    Raises:
        RendezvousError: The group did not form within ``budget_s``.
        VerificationError: The group formed and does not work, or not by the memory that it was chosen for.
    """
    deadline = time.monotonic() + instruction.budget_s
    before = environment.snapshot()
    meeting = instruction.rendezvous
    try:
        stop_worker()  # what a failed attempt in this process may have left
        environment.clear()
        with (
            limited(meeting.master_addr, meeting.master_port, instruction.budget_s + _SILENCE_S),
            environment.during(meeting.start_env),
        ):
            _prepare(instruction)
            _check_network(instruction, deadline)
            _init_process_group(instruction, deadline)
            result = _verify(instruction, deadline) if instruction.verify else None
            _set_group_timeout(instruction)
        report.publish(instruction.report, result)
        return result
    except BaseException as error:
        _release_frames(error)
        stop_worker(failed=True)
        memory_cap.set_cap(None)
        environment.restore(before)
        raise
    finally:
        store.release_store()


def start_worker_of_many(instruction: StartInstruction) -> VerificationResult | None:
    """``start_worker`` for a driver of many: the figures, equal on all ranks, come from rank 0 alone.

    They hold a time for each rank, so that from N ranks they would be N * N.
    """
    result = start_worker(instruction)
    return result if instruction.rank == 0 else None


def _verify(instruction: StartInstruction, deadline: float) -> VerificationResult:
    """Figures of the device that the worker trains on; a pair such as ``cpu:gloo,cuda:nccl`` is verified in both halves."""
    for device in other_devices(instruction.device):
        verify_process_group(device=device, timeout_s=_left_s(deadline))
    result = verify_process_group(device=instruction.device, timeout_s=_left_s(deadline))
    _check_memory(instruction)
    return result


def _check_memory(instruction: StartInstruction) -> None:
    """An ipc group whose ranks cannot map each other's device memory works, over Gloo: not what was planned and told."""
    if instruction.backend != "ipc" or instruction.device == "cpu":
        return
    group: Any = distributed_c10d._get_default_group()
    reason = group.gloo_reason
    if reason is not None:
        raise VerificationError(
            f"the ipc backend cannot use the memory of {instruction.device}: {reason}. Fix this, or use "
            "on_shared_device='gloo'."
        )


def _release_frames(error: BaseException | None) -> None:
    """Lets go of what the failed calls hold: a group that is still referenced keeps its peers waiting."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def stop_worker(*, failed: bool = False) -> None:
    """Take the default process group down, whatever state it is in; peers that wait in it get an error at once.

    Args:
        failed: A collective may still be running. To destroy an NCCL group then waits for it, so that anything but Gloo is
            aborted instead.
    """
    if not dist.is_initialized():
        # torch puts the number of the groups it has begun into the store's keys, and does not take a failed one back: the
        # ranks of the next start would wait under different keys.
        distributed_c10d._world.group_count = 0
        return
    try:
        if failed and set(backends_by_device().values()) != {"gloo"}:
            bounded(_abort_process_group, _ABORT_S)
        else:
            dist.destroy_process_group()
    except (RuntimeError, TimeoutError) as error:
        ray_compat.logger.debug("the failed process group did not close cleanly: %s", error)


def _abort_process_group() -> None:
    # torch before 2.6 has no such function; destroying aborts NCCL there.
    abort = getattr(distributed_c10d, "_abort_process_group", dist.destroy_process_group)
    try:
        abort()
    except RuntimeError:  # a backend that cannot be aborted, such as the Gloo of a pair
        dist.destroy_process_group()


def _prepare(instruction: StartInstruction) -> None:
    environment.set_default(instruction.env_defaults)
    # An elastic agent's store would be waited for in vain: no agent runs Ray's workers.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    environment.set_always(instruction.rendezvous.env)
    if instruction.rendezvous.interface_by_route:
        interface = route_interface(instruction.rendezvous.master_addr)
        environment.set_default({IFNAME: interface} if interface else {})
    if instruction.train_on_cpu:
        ray_compat.train_on_cpu()
    if instruction.set_distributed_env:
        ray_compat.set_torch_distributed_env()
    if "nccl" in instruction.backend and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        # As stock: a collective that times out must end the process instead of hanging it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    memory_cap.set_cap(instruction.memory_fraction, instruction.device)


def _check_network(instruction: StartInstruction, deadline: float) -> None:
    """What torch itself would find out after half an hour, or not at all, has a name within seconds."""
    rendezvous = instruction.rendezvous
    if rendezvous.check_device:
        check_gloo_device(os.environ.get(IFNAME))
    if rendezvous.check_reachable:
        store.check_reachable(rendezvous.master_addr, rendezvous.master_port, min(store.REACH_S, _left_s(deadline)))


def _left_s(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _init_process_group(instruction: StartInstruction, deadline: float) -> None:
    if instruction.backend == "ipc":
        import ray_fracbackend.ipc  # noqa: F401  registers the backend
    with _named("rendezvous", instruction):
        url, left = instruction.rendezvous.init_url, timedelta(seconds=_left_s(deadline))
        common, _, _ = next(iter(torch_rendezvous(url, instruction.rank, instruction.world_size, timeout=left)))
    with _named(f"creating the {instruction.backend} process group", instruction, GroupFormationError):
        dist.init_process_group(
            instruction.backend,
            # The same prefix as init_process_group puts before a store that it makes itself.
            store=PrefixStore("default_pg", common),
            rank=instruction.rank,
            world_size=instruction.world_size,
            timeout=timedelta(seconds=_left_s(deadline) if _connects_at_init(instruction) else instruction.timeout_s),
        )
    common.set_timeout(timedelta(seconds=instruction.timeout_s))


def _connects_at_init(instruction: StartInstruction) -> bool:
    """Whether the group is made with the start's time limit, and gets its own afterwards.

    Gloo connects all ranks when the group is made; NCCL does it in the first collective, where the verification is the bound.
    Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps Gloo and NCCL in a group whose limit cannot be changed later.
    """
    if instruction.backend == "ipc":
        return True
    return "gloo" in instruction.backend and get_debug_level() != DebugLevel.DETAIL


def _set_group_timeout(instruction: StartInstruction) -> None:
    timeout = timedelta(seconds=instruction.timeout_s)
    if instruction.backend == "ipc":
        distributed_c10d._get_default_group().set_timeout(timeout)
    elif _connects_at_init(instruction):
        distributed_c10d._set_pg_timeout(timeout)


def _advice(instruction: StartInstruction) -> str:
    if not instruction.rendezvous.uses_gloo:
        return "Check that every node reaches that address and port."
    interface = os.environ.get(IFNAME)
    over = f"over {interface}" if interface else "over the address of its host name"
    return (
        f"Gloo connects every pair of ranks on random ports, on this node {over}: check that all nodes pass them, or set "
        f"{IFNAME} to an interface that the others reach."
    )


@contextmanager
def _named(step: str, instruction: StartInstruction, kind: type[RendezvousError] = RendezvousError) -> Iterator[None]:
    try:
        yield
    except FracBackendError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        sentence = refusal_in(str(error))
        if sentence:
            raise SharedDeviceError(
                f"NCCL refused ranks that share a GPU: {sentence}", ranks=refused_ranks(sentence)
            ) from error
        where = f"{instruction.rendezvous.master_addr}:{instruction.rendezvous.master_port}"
        raise kind(
            f"{step} at {where} failed ({cause_of(error)}). {_advice(instruction)}",
            ranks=(instruction.rank,),
        ) from error
