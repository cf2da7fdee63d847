"""Start of one worker: environment, device, process group, verification. Runs on the worker."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    PrefixStore,
    TCPStore,
    distributed_c10d,
    get_debug_level,
)

from ray_fracbackend import _ray
from ray_fracbackend.decide.interfaces import IFNAME
from ray_fracbackend.decide.nccl import cause_of
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.rendezvous import AGENT_STORE
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.errors import (
    BackendUnavailableError,
    FracBackendError,
    GroupFormationError,
    MissingDeviceError,
    RendezvousError,
    VerificationError,
)
from ray_fracbackend.timeouts import Deadline, bounded
from ray_fracbackend.verify import VerificationResult, backends_by_device, other_devices, verify_process_group
from ray_fracbackend.worker import environment, memory_cap, store
from ray_fracbackend.worker.checkpoint_copies import copy_checkpoints_in_turn
from ray_fracbackend.worker.gloo_trial import try_gloo_on_cuda
from ray_fracbackend.worker.group_end import destroy_process_groups
from ray_fracbackend.worker.missing_cuda import is_cuda_error, why_no_cuda
from ray_fracbackend.worker.network import check_gloo_device, no_port_left, route_interface
from ray_fracbackend.worker.state import STATE

# Time past the deadline for c10d and Gloo to raise their own timeout; the driver waits longer for the result.
_SILENCE_S = 1.0
# For a failed group of NCCL to be aborted.
ABORT_S = 5.0
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# For the NVML of a broken GPU to answer.
_NVML_S = 2.0


def start_worker(plan: WorkerPlan) -> VerificationResult | None:
    """Initialize this worker's process group. On failure the group is destroyed and os.environ restored.

    Args:
        plan: The worker's plan.

    Returns:
        The verification figures from rank 0 alone, as they have a time for each rank and are equal on all; None from other
        ranks, and where verification was not asked for.

    Raises:
        RendezvousError: The group did not form within ``budget_s``.
        MissingDeviceError: CUDA refused to use the worker's device.
        VerificationError: The group formed and does not work.
        BackendUnavailableError: Gloo cannot carry CUDA tensors here.
    """
    deadline = Deadline(plan.budget_s)
    before = environment.snapshot()
    STATE.report = None
    try:
        stop_worker()  # what a failed attempt in this process may have left
        environment.clear()
        environment.set_always(plan.rendezvous.start_env)
        _prepare(plan)
        _check_network(plan, deadline)
        common = _connect(plan, deadline)
        if plan.verify and plan.is_trial and plan.backends.has_nccl and _HANDLING in os.environ:
            _try_nccl(plan, common, deadline)
        result = _form(plan, common, deadline)
        common.set_timeout(timedelta(seconds=plan.timeout_s))
        environment.clear(plan.rendezvous.start_env)
    except BaseException as error:
        _release_frames(error)
        stop_worker(failed=True)
        memory_cap.set_cap(None)
        environment.restore(before)
        raise
    finally:
        store.release_store()
    STATE.report = (plan.report, result)
    return result if plan.rank == 0 else None


def _release_frames(error: BaseException | None) -> None:
    """Clear the local variables of all calls that an error and its causes went through and that have ended.

    They hold the group, whose peers would go on waiting for this rank. A cleared frame still holds the closure of its
    function: what is in one has to be deleted by its owner.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _form(
    plan: WorkerPlan, common: TCPStore, deadline: Deadline, prefix: str = "default_pg"
) -> VerificationResult | None:
    """Create the default group and verify it."""
    _init_process_group(plan, common, deadline, prefix)
    # NCCL's watchdog ends the process at the timeout: the verification comes to its own end before.
    _set_group_timeout(plan, deadline.left_s + (ABORT_S if plan.backends.has_nccl else 0))
    result = _verify(plan, deadline) if plan.verify else None
    _set_group_timeout(plan, plan.timeout_s)
    return result


def _try_nccl(plan: WorkerPlan, common: TCPStore, deadline: Deadline) -> None:
    """Verify a group of NCCL that another backend may replace, and destroy it; all ranks fail where one does.

    torch's watchdog ends the process of a group that has failed, up to a minute later and although it was aborted: in the
    training on the fallback. Without its handling of errors it does not, so this group is not the one that trains.
    """
    handling = os.environ[_HANDLING]
    os.environ[_HANDLING] = "0"
    key, passed = "ray_fracbackend/tried", "passed"
    try:
        _form(plan, common, deadline, prefix="tried")
    except BaseException:
        with suppress(RuntimeError):
            common.set(f"{key}/{plan.rank}", "failed")
        raise
    finally:
        os.environ[_HANDLING] = handling
    common.set(f"{key}/{plan.rank}", passed)
    with _named(f"waiting for the other ranks' check of {plan.backend}", plan, GroupFormationError):
        failed = [rank for rank in range(plan.world_size) if common.get(f"{key}/{rank}") != passed.encode()]
    if failed:
        raise VerificationError(f"the check of {plan.backend} failed on {ranks_text(failed)}.", ranks=failed)
    stop_worker()


def _verify(plan: WorkerPlan, deadline: Deadline) -> VerificationResult | None:
    """Verify the group with tensors of the device that the worker trains on, and both halves of ``cpu:gloo,cuda:nccl``.

    Of a group that is for CUDA alone, on a worker without CUDA, nothing can be verified; nor where Ray assigned no device: the
    script has yet to choose one, and on the current one all ranks of a node would meet.
    """
    device = torch.device(plan.device)
    is_assigned = device.type != "cuda" or device.index is not None
    own = [device] if is_assigned and device.type in backends_by_device() else []
    if device.type == "cuda" and sys.platform == "win32" and plan.backends.by_device.get("cuda") == "gloo":
        try_gloo_on_cuda(plan.device, deadline.left_s)
    results = []
    for each in (*other_devices(device), *own):
        try:
            results.append(verify_process_group(device=each, timeout_s=deadline.left_s))
        except VerificationError as failed:
            if is_cuda_error(failed.__cause__):
                raise _refused(plan, failed) from failed.__cause__
            raise
    return results[-1] if results else None


def _refused(plan: WorkerPlan, failed: VerificationError) -> FracBackendError:
    """Return the error of what CUDA refused, which is no failure of the group: the first context is made in the verification."""
    error = failed.__cause__
    assert isinstance(error, Exception)
    if "out of memory" in str(error):  # a full device is torch's OutOfMemoryError by now: what is left is host memory
        return BackendUnavailableError(str(failed), ranks=(plan.rank,))
    try:
        why = bounded(partial(why_no_cuda, error), _NVML_S)
    except TimeoutError:
        why = str(failed).rstrip(".")
    return MissingDeviceError(f"{plan.device} cannot be used: {why}.", ranks=(plan.rank,))


def stop_worker(*, failed: bool = False) -> None:
    """Destroy the default process group in any state; peers that wait in it get an error at once.

    Args:
        failed: A collective may still be running, for which destroying a group would wait: all but Gloo is aborted instead. NCCL
            always is: it waits for the other ranks of the node to destroy theirs (ncclCommDestroy), and they may have failed.
    """
    if not dist.is_initialized():
        # torch puts its count of groups into the store's keys and does not decrease it after a failure: the ranks of the
        # next start would wait under different keys.
        distributed_c10d._world.group_count = 0
        return
    try:
        backends = set(backends_by_device().values())
        if "nccl" in backends or (failed and backends != {"gloo"}):
            bounded(_abort_process_group, ABORT_S)
        else:
            destroy_process_groups()
    except (RuntimeError, TimeoutError) as error:
        _ray.logger.debug("the failed process group did not close cleanly: %s", error)


def _abort_process_group() -> None:
    # torch before 2.6 has no such function; destroying aborts NCCL there.
    abort = getattr(distributed_c10d, "_abort_process_group", destroy_process_groups)
    try:
        abort()
    except RuntimeError:  # a backend that cannot be aborted, such as the Gloo of a pair
        destroy_process_groups()


def _prepare(plan: WorkerPlan) -> None:
    environment.set_default(plan.env_defaults)
    environment.set_always(plan.rendezvous.env)
    # With it torch takes every rank, of later groups too, for the client of a store that torchrun's agent holds.
    os.environ.pop(AGENT_STORE, None)
    if plan.rendezvous.interface_by_route:
        interface = route_interface(plan.rendezvous.master_addr)
        environment.set_default({IFNAME: interface} if interface else {})
    if plan.train_on_cpu:
        _ray.train_on_cpu()
    if sys.platform == "win32":
        copy_checkpoints_in_turn()
    if plan.set_distributed_env:
        _ray.set_torch_distributed_env()
    if plan.backends.has_nccl and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        # As stock: a collective that times out must end the process instead of hanging it.
        os.environ.setdefault(_HANDLING, "1")
    memory_cap.set_cap(plan.memory_fraction, plan.device)


def _check_network(plan: WorkerPlan, deadline: Deadline) -> None:
    """Check Gloo's device and rank 0's store within seconds; torch would find a fault after half an hour or never."""
    rendezvous = plan.rendezvous
    if rendezvous.check_device:
        check_gloo_device(os.environ.get(IFNAME))
    if rendezvous.check_reachable:
        store.check_reachable(rendezvous.master_addr, rendezvous.master_port, min(store.REACH_S, deadline.left_s))


def _connect(plan: WorkerPlan, deadline: Deadline) -> TCPStore:
    """Connect to rank 0's store, in a thread: torch's store client waits without a limit for a silent store."""
    address, port = plan.rendezvous.master_addr, plan.rendezvous.master_port
    with _named("rendezvous", plan, RendezvousError):
        left_s = deadline.left_s
        connect = partial(store.connect_store, plan.rank, plan.world_size, address, port, left_s)
        return bounded(connect, left_s + _SILENCE_S)


def _init_process_group(plan: WorkerPlan, common: TCPStore, deadline: Deadline, prefix: str) -> None:
    """Create the group on rank 0's store, in a thread for the same reason."""
    if plan.backends.has_ipc:
        import ray_fracbackend.ipc  # registers the backend
    if plan.backends.has_staged:
        import ray_fracbackend.staged  # noqa: F401  registers the backend
    with _named(f"creating the {plan.backend} process group", plan, GroupFormationError):
        left_s, abandoned = deadline.left_s, threading.Event()
        common.set_timeout(timedelta(seconds=left_s))
        try:
            bounded(partial(_create, plan, common, abandoned, prefix), left_s + _SILENCE_S)
        except TimeoutError:
            abandoned.set()
            raise


def _create(plan: WorkerPlan, common: TCPStore, abandoned: threading.Event, prefix: str) -> None:
    dist.init_process_group(
        plan.backend,
        # "default_pg" is what init_process_group puts before a store that it makes itself.
        store=PrefixStore(prefix, common),
        rank=plan.rank,
        world_size=plan.world_size,
        # That of the training: Gloo's send and recv keep the one with which the group was made.
        timeout=timedelta(seconds=plan.timeout_s),
    )
    if abandoned.is_set():  # a store that fell silent has come back, after this start has failed
        destroy_process_groups()


def _set_group_timeout(plan: WorkerPlan, timeout_s: float) -> None:
    """Set the timeout of the group's collectives: a group could not be destroyed while one of them waits for a peer.

    Under TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps Gloo and NCCL in a group whose timeout cannot be changed.
    """
    in_python = plan.backends.has_ipc or plan.backends.has_staged
    if in_python or get_debug_level() != DebugLevel.DETAIL:
        # torch 2.14 has a public name for it, and a FutureWarning for the old one.
        set_timeout = getattr(dist, "set_timeout", distributed_c10d._set_pg_timeout)
        set_timeout(timedelta(seconds=timeout_s))


def _advice(plan: WorkerPlan, kind: type[RendezvousError], error: Exception) -> str:
    if (text := no_port_left(error)) is not None:
        return text
    if kind is GroupFormationError and plan.backends.connects_with_gloo:
        interface = os.environ.get(IFNAME)
        over = f"over {interface}" if interface else "over the address of its host name"
        return (
            f"Gloo connects every pair of ranks on random ports, on this node {over}: check that all nodes pass them, or set "
            f"{IFNAME} to an interface that the others reach; and that rank 0 and the other ranks do not hang."
        )
    if isinstance(error, TimeoutError):  # of bounded(): c10d's own are of another class
        return "Rank 0 hangs, the network to it is cut, or another rank did not connect: look at that process and at the nodes."
    return "Check that every node reaches that address and port."


@contextmanager
def _named(step: str, plan: WorkerPlan, kind: type[RendezvousError]) -> Iterator[None]:
    """Raise torch's errors in the block as one of ours that names the step."""
    try:
        yield
    except FracBackendError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{plan.rendezvous.master_addr}:{plan.rendezvous.master_port}"
        raise kind(
            f"{step} at {where} failed ({cause_of(error)}). {_advice(plan, kind, error)}", ranks=(plan.rank,)
        ) from error
