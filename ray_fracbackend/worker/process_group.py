"""Start one worker: environment, device, process group, verification. Runs on the worker."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    DebugLevel,
    PrefixStore,
    get_debug_level,
)

from ray_fracbackend import _ray, _torch
from ray_fracbackend.decide.interfaces import BY_ROUTE, IFNAME
from ray_fracbackend.decide.plan import WorkerPlan
from ray_fracbackend.decide.rendezvous import AGENT_STORE
from ray_fracbackend.decide.worker_info import ranks_text
from ray_fracbackend.errors import GroupFormationError, RendezvousError, UnreachableMasterError, VerificationError
from ray_fracbackend.timeouts import Deadline, bounded, ended_by
from ray_fracbackend.verify.collectives import verify_process_group
from ray_fracbackend.verify.result import VerificationResult
from ray_fracbackend.worker import environment, memory_cap, store
from ray_fracbackend.worker.group_end import ABORT_S, end_process_group
from ray_fracbackend.worker.nccl_env import nccl_env
from ray_fracbackend.worker.nccl_library import reason_told
from ray_fracbackend.worker.network import check_gloo_device, route_interface
from ray_fracbackend.worker.peers import Peers
from ray_fracbackend.worker.reach import REACH_S, check_reachable
from ray_fracbackend.worker.start_failure import named_step, refused_by_cuda
from ray_fracbackend.worker.state import STATE

if TYPE_CHECKING:
    import ray

    from ray_fracbackend.report.start_report import StartReport

# Time past the deadline in which c10d and Gloo raise their own timeout; the driver waits longer for the result.
_SILENCE_S = 1.0
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def start_worker(plan: WorkerPlan, report: list[ray.ObjectRef[StartReport]] | None = None) -> VerificationResult | None:
    """Initialize this worker's process group. On failure the group is destroyed and its variables are removed.

    Args:
        plan: The worker's plan.
        report: Ray's reference to the start report, which the train function fetches on request; None for a start without Ray.

    Returns:
        The verification result on rank 0, which contains the times of all ranks. None on other ranks, and without
        verification.

    Raises:
        RendezvousError: The group did not form within ``budget_s``.
        MissingDeviceError: CUDA refused to use the worker's device.
        VerificationError: The group formed but failed its verification.
        BackendUnavailableError: Gloo cannot send CUDA tensors here.
    """
    deadline, peers = Deadline(plan.budget_s), Peers(plan)
    STATE.report = None
    try:
        with ended_by(peers.look):
            end_process_group()  # a failed attempt in this process may have left one
            if dist.is_initialized():
                raise GroupFormationError(
                    f"an earlier process group of this process did not end: its abort failed, or hangs for more than {ABORT_S:g} s. "
                    "Restart the worker; with NCCL_DEBUG=INFO its log shows where NCCL hangs."
                )
            environment.clear()
            _prepare(plan)
            _check_network(plan, deadline)
            common = _connect(plan, deadline)
            if plan.verify and plan.is_trial and plan.backends.has_nccl and _HANDLING in os.environ:
                _try_nccl(plan, common, deadline)
            result = _form(plan, common, deadline)
        common.set_timeout(timedelta(seconds=plan.timeout_s))
        environment.clear([IFNAME] if plan.drop_interface else [])
    except BaseException as error:
        # At the deadline all ranks end by themselves.
        if deadline.left_s > _SILENCE_S and not isinstance(error, UnreachableMasterError):
            peers.tell_failure()
        _torch.release_frames(error)
        end_process_group(failed=True)
        memory_cap.set_cap(None)
        environment.clear()
        # Rank 0's store stays open: the other ranks look there for the failure.
        raise
    store.release_store()
    STATE.report = (report[0], result) if report else None
    has_communicator = plan.rank == 0 and plan.verify and plan.backends.has_nccl
    STATE.nccl_env = nccl_env() if has_communicator else None
    return result if plan.rank == 0 else None


def _form(
    plan: WorkerPlan, common: PrefixStore, deadline: Deadline, prefix: str = "default_pg"
) -> VerificationResult | None:
    """Create the default group and verify it."""
    _init_process_group(plan, common, deadline, prefix)
    # NCCL's watchdog ends the process at the group's timeout, so the verification must end before that.
    _set_group_timeout(plan, deadline.left_s + (ABORT_S if plan.backends.has_nccl else 0))
    result = _verify(plan, deadline)
    _set_group_timeout(plan, plan.timeout_s)
    if plan.bind_device:
        _torch.default_group().bound_device_id = torch.device(plan.device)
    return result


def _try_nccl(plan: WorkerPlan, common: PrefixStore, deadline: Deadline) -> None:
    """Verify an NCCL group that has a fallback, and destroy it; if one rank fails, all ranks raise an error.

    torch's watchdog ends the process of a failed group up to a minute later, even if the group was aborted: during the
    training on the fallback. It does not if its error handling is off. Therefore this group is not used for training.
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
    with named_step(f"waiting for the other ranks' check of {plan.backend}", plan, GroupFormationError):
        failed = [rank for rank in range(plan.world_size) if common.get(f"{key}/{rank}") != passed.encode()]
    if failed:
        raise VerificationError(f"the check of {plan.backend} failed on {ranks_text(failed)}.", ranks=failed)
    end_process_group()


def _verify(plan: WorkerPlan, deadline: Deadline) -> VerificationResult | None:
    """Verify the group on the devices of the plan; return the result of the device that the worker trains on."""
    if not plan.verify:
        return None
    result, total_s = None, 0.0
    for device in plan.verify_on:
        try:
            result = verify_process_group(device=device, timeout_s=deadline.left_s)
        except VerificationError as failed:
            if (refused := refused_by_cuda(plan, failed)) is not None:
                raise refused from failed.__cause__
            raise
        total_s += result.total_s
    return replace(result, total_s=total_s) if result else None


def _prepare(plan: WorkerPlan) -> None:
    environment.set_default(plan.env_defaults)
    environment.set_always(plan.env)
    # With this variable torch treats every rank, also in later groups, as a client of a store that torchrun's agent
    # holds.
    os.environ.pop(AGENT_STORE, None)
    interface = route_interface(plan.master_addr) if plan.interface == BY_ROUTE else plan.interface
    environment.set_default({IFNAME: interface} if interface else {})
    if plan.train_on_cpu:
        _ray.train_on_cpu()
    if plan.set_distributed_env:
        _ray.set_torch_distributed_env()
    if plan.backends.has_nccl and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        # As in stock Ray: a collective that times out must end the process instead of hanging.
        os.environ.setdefault(_HANDLING, "1")
    memory_cap.set_cap(plan.memory_fraction, plan.device)


def _check_network(plan: WorkerPlan, deadline: Deadline) -> None:
    """Check Gloo's device and rank 0's store within seconds; torch would detect a fault after half an hour or never."""
    if plan.backends.connects_with_gloo:
        check_gloo_device(os.environ.get(IFNAME))
    if plan.rank > 0:  # rank 0 may not be able to reach its own address from inside
        check_reachable(plan.master_addr, plan.master_port, min(REACH_S, deadline.left_s))


def _connect(plan: WorkerPlan, deadline: Deadline) -> PrefixStore:
    """Connect to rank 0's store, in a thread: torch's store client may wait for an answer without a timeout."""
    left_s, where = deadline.left_s, (plan.master_addr, plan.master_port)
    with named_step("rendezvous", plan, RendezvousError):
        connect = partial(store.connect_store, plan.rank, plan.world_size, *where, left_s, plan.attempt)
        return bounded(connect, left_s + _SILENCE_S)


def _init_process_group(plan: WorkerPlan, common: PrefixStore, deadline: Deadline, prefix: str) -> None:
    """Create the group on rank 0's store, in a thread for the same reason."""
    if plan.backends.has_ipc:
        import ray_fracbackend.ipc  # registers the backend
    if plan.backends.has_staged:
        import ray_fracbackend.staged  # noqa: F401  registers the backend
    with named_step(f"creating the {plan.backend} process group", plan, GroupFormationError), reason_told():
        left_s = deadline.left_s
        common.set_timeout(timedelta(seconds=left_s))
        bounded(partial(_create, plan, common, prefix), left_s + _SILENCE_S)


def _create(plan: WorkerPlan, common: PrefixStore, prefix: str) -> None:
    connects_at_once = plan.backends.has_nccl and _torch.CONNECTS_NCCL_AT_ONCE
    dist.init_process_group(
        plan.backend,
        # init_process_group puts "default_pg" before the keys of a store that it creates itself.
        store=PrefixStore(prefix, common),
        rank=plan.rank,
        world_size=plan.world_size,
        # The timeout for training: Gloo's send and recv keep the timeout with which the group was created.
        timeout=timedelta(seconds=plan.timeout_s),
        device_id=torch.device(plan.device) if connects_at_once and ":" in plan.device else None,
    )


def _set_group_timeout(plan: WorkerPlan, timeout_s: float) -> None:
    """Set the timeout of the group's collectives, except under DETAIL, where torch's wrapper of Gloo and NCCL does not allow it."""
    in_python = plan.backends.has_ipc or plan.backends.has_staged
    if in_python or get_debug_level() != DebugLevel.DETAIL:
        _torch.set_group_timeout(timedelta(seconds=timeout_s))
