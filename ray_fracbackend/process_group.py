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

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ray_fracbackend import ray_compat, report
from ray_fracbackend.errors import FracBackendError, RendezvousError
from ray_fracbackend.verify import VerificationResult, verify_process_group


@dataclass(frozen=True, kw_only=True)
class StartInstruction:
    """What one worker has to do; nothing about the others travels with it.

    Attributes:
        rank: The worker's rank.
        world_size: Workers in the job.
        backend: Name for ``init_process_group``.
        device: torch device that the worker trains on and is verified on.
        init_method: ``env`` or ``tcp``.
        master_addr: Address of rank 0's store, a literal IP.
        master_port: Port of rank 0's store.
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
    init_method: str
    master_addr: str
    master_port: int
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
        VerificationError: The group formed and does not work.
    """
    deadline = time.monotonic() + instruction.budget_s
    environment = dict(os.environ)
    try:
        stop_worker()  # what a failed attempt in this process may have left
        _prepare(instruction)
        _init_process_group(instruction)
        result = None
        if instruction.verify:
            left_s = max(deadline - time.monotonic(), 0.001)
            result = verify_process_group(device=instruction.device, timeout_s=left_s)
        _set_group_timeout(instruction)
        report.publish(instruction.report, result)
        return result
    except BaseException as error:
        _release_frames(error)
        stop_worker()
        os.environ.clear()
        os.environ.update(environment)
        raise


def _release_frames(error: BaseException | None) -> None:
    """Lets go of what the failed calls hold: a group that is still referenced keeps its peers waiting."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def stop_worker() -> None:
    """Takes the default process group down, whatever state it is in; peers that wait in it get an error at once."""
    if not dist.is_initialized():
        return
    try:
        dist.destroy_process_group()
    except RuntimeError as error:
        ray_compat.logger.debug("the failed process group did not close cleanly: %s", error)


def _prepare(instruction: StartInstruction) -> None:
    for name, value in instruction.env_defaults.items():
        os.environ.setdefault(name, value)
    if instruction.init_method == "env":
        os.environ["MASTER_ADDR"] = instruction.master_addr
        os.environ["MASTER_PORT"] = str(instruction.master_port)
    if instruction.train_on_cpu:
        ray_compat.train_on_cpu()
    if instruction.set_distributed_env:
        ray_compat.set_torch_distributed_env()
    if "nccl" in instruction.backend and "TORCH_NCCL_BLOCKING_WAIT" not in os.environ:
        # As stock: a collective that times out must end the process instead of hanging it.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if instruction.memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(instruction.memory_fraction, torch.device(instruction.device))


def _init_process_group(instruction: StartInstruction) -> None:
    budget = timedelta(seconds=instruction.budget_s)
    with _named("meeting the other ranks", instruction):
        store, _, _ = next(
            iter(rendezvous(_init_url(instruction), instruction.rank, instruction.world_size, timeout=budget))
        )
    with _named(f"creating the {instruction.backend} process group", instruction):
        dist.init_process_group(
            instruction.backend,
            # The same prefix as init_process_group puts before a store that it makes itself.
            store=PrefixStore("default_pg", store),
            rank=instruction.rank,
            world_size=instruction.world_size,
            timeout=budget if _connects_at_init(instruction) else timedelta(seconds=instruction.timeout_s),
        )
    store.set_timeout(timedelta(seconds=instruction.timeout_s))


def _init_url(instruction: StartInstruction) -> str:
    if instruction.init_method == "env":
        return "env://"
    host = f"[{instruction.master_addr}]" if ":" in instruction.master_addr else instruction.master_addr
    return f"tcp://{host}:{instruction.master_port}"


def _connects_at_init(instruction: StartInstruction) -> bool:
    """Gloo connects all ranks when the group is made; NCCL does it in the first collective, with a bound of its own."""
    return "nccl" not in instruction.backend


def _set_group_timeout(instruction: StartInstruction) -> None:
    if _connects_at_init(instruction):
        distributed_c10d._set_pg_timeout(timedelta(seconds=instruction.timeout_s))


@contextmanager
def _named(step: str, instruction: StartInstruction) -> Iterator[None]:
    try:
        yield
    except FracBackendError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"{instruction.master_addr}:{instruction.master_port}"
        raise RendezvousError(
            f"{step} at {where} failed ({cause}). Check that every node reaches that address and port.",
            ranks=(instruction.rank,),
        ) from error
