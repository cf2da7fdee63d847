"""Table of every collective, element type, reduce operation and shape, on any device, compared with a reference on the host."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import ipc_reference as ref
import torch
import torch.distributed as dist
from ipc_harness import Job, rank_device
from ipc_reference import Op, make, reduced, same
from torch.torch_version import TorchVersion

import ray_fracbackend.staged  # noqa: F401 (registers both backends)

Group = dist.ProcessGroup
SMALL_CHUNKS = {
    "RAY_FRACBACKEND_IPC_CHUNK_BYTES": "65536",
    "RAY_FRACBACKEND_IPC_ONE_PASS_BYTES": "32768",
    "RAY_FRACBACKEND_IPC_DEVICE_CHUNK_BYTES": "65536",
    "RAY_FRACBACKEND_IPC_DEVICE_ONE_PASS_BYTES": "16384",
}


def own(dtype: torch.dtype, shape: str, salt: str = "") -> torch.Tensor:
    """Return this rank's input, on the device."""
    return make(dtype, shape, dist.get_rank(), salt).to(rank_device())


def finish(work: dist.Work | None) -> None:
    """Wait for an asynchronous call."""
    if work is not None:
        work.wait()


def run_broadcast(group: Group, dtype: torch.dtype, shape: str, root: int, async_op: bool) -> list[torch.Tensor]:
    """Result of broadcast."""
    tensor = own(dtype, shape)
    finish(dist.broadcast(tensor, root, group=group, async_op=async_op))
    return [tensor]


def run_all_gather(group: Group, dtype: torch.dtype, shape: str, root: int, async_op: bool) -> list[torch.Tensor]:
    """Result of all_gather."""
    tensor = own(dtype, shape)
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    finish(dist.all_gather(outputs, tensor, group=group, async_op=async_op))
    return outputs


def run_all_gather_single(
    group: Group, dtype: torch.dtype, shape: str, root: int, async_op: bool
) -> list[torch.Tensor]:
    """Result of all_gather_into_tensor, as a list."""
    tensor = own(dtype, shape)
    output = torch.empty((dist.get_world_size(), *tensor.shape), dtype=dtype, device=rank_device())
    finish(dist.all_gather_into_tensor(output.view(-1), tensor.reshape(-1), group=group, async_op=async_op))
    return list(output)


def run_gather(group: Group, dtype: torch.dtype, shape: str, root: int, async_op: bool) -> list[torch.Tensor]:
    """Result of gather."""
    tensor = own(dtype, shape)
    is_root = dist.get_rank() == root
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if is_root else None
    finish(dist.gather(tensor, outputs, dst=root, group=group, async_op=async_op))
    return outputs or []


def run_scatter(group: Group, dtype: torch.dtype, shape: str, root: int, async_op: bool) -> list[torch.Tensor]:
    """Result of scatter."""
    size = dist.get_world_size()
    inputs = [own(dtype, shape, str(r)) for r in range(size)] if dist.get_rank() == root else None
    output = torch.empty_like(own(dtype, shape))
    finish(dist.scatter(output, inputs, src=root, group=group, async_op=async_op))
    return [output]


def run_all_to_all(group: Group, dtype: torch.dtype, shape: str, root: int, async_op: bool) -> list[torch.Tensor]:
    """Result of all_to_all."""
    size = dist.get_world_size()
    inputs = [own(dtype, shape, str(r)) for r in range(size)]
    outputs = [torch.empty_like(inputs[0]) for _ in range(size)]
    finish(dist.all_to_all(outputs, inputs, group=group, async_op=async_op))
    return outputs


def expect_all(dtype: torch.dtype, shape: str, root: int) -> list[torch.Tensor]:
    """Return every rank's input."""
    return [make(dtype, shape, r) for r in range(dist.get_world_size())]


MOVERS: dict[str, tuple[Callable[..., list[torch.Tensor]], Callable[..., list[torch.Tensor]]]] = {
    "broadcast": (run_broadcast, lambda d, s, root: [make(d, s, root)]),
    "all_gather": (run_all_gather, expect_all),
    "all_gather_into_tensor": (run_all_gather_single, expect_all),
    "gather": (run_gather, lambda d, s, root: expect_all(d, s, root) if dist.get_rank() == root else []),
    "scatter": (run_scatter, lambda d, s, root: [make(d, s, root, str(dist.get_rank()))]),
    "all_to_all": (
        run_all_to_all,
        lambda d, s, root: [make(d, s, r, str(dist.get_rank())) for r in range(dist.get_world_size())],
    ),
}


def run_all_reduce(group: Group, dtype: torch.dtype, op: Op, shape: str, root: int, async_op: bool) -> torch.Tensor:
    """Result of all_reduce."""
    tensor = own(dtype, shape)
    finish(dist.all_reduce(tensor, op, group=group, async_op=async_op))
    return tensor


def run_reduce(group: Group, dtype: torch.dtype, op: Op, shape: str, root: int, async_op: bool) -> torch.Tensor | None:
    """Result of reduce on the root."""
    tensor = own(dtype, shape)
    finish(dist.reduce(tensor, root, op, group=group, async_op=async_op))
    return tensor if dist.get_rank() == root else None


def run_reduce_scatter(group: Group, dtype: torch.dtype, op: Op, shape: str, root: int, async_op: bool) -> torch.Tensor:
    """Result of reduce_scatter in which every rank's parts are its input, each for another rank."""
    inputs = [own(dtype, shape, str(r)) for r in range(dist.get_world_size())]
    output = torch.empty_like(inputs[0])
    finish(dist.reduce_scatter(output, inputs, op, group=group, async_op=async_op))
    return output


def run_reduce_scatter_single(
    group: Group, dtype: torch.dtype, op: Op, shape: str, root: int, async_op: bool
) -> torch.Tensor:
    """Result of reduce_scatter_tensor on the same data."""
    inputs = [own(dtype, shape, str(r)) for r in range(dist.get_world_size())]
    output = torch.empty(inputs[0].shape, dtype=dtype, device=rank_device())
    whole = torch.cat([tensor.reshape(-1) for tensor in inputs])
    finish(dist.reduce_scatter_tensor(output.view(-1), whole, op, group=group, async_op=async_op))
    return output


def expect_reduced(dtype: torch.dtype, op: Op, shape: str, root: int) -> torch.Tensor | None:
    """Return all ranks' inputs, reduced."""
    return reduced([make(dtype, shape, r) for r in range(dist.get_world_size())], op)


def expect_scattered(dtype: torch.dtype, op: Op, shape: str, root: int) -> torch.Tensor:
    """Return all ranks' parts for this rank, reduced."""
    return reduced([make(dtype, shape, r, str(dist.get_rank())) for r in range(dist.get_world_size())], op)


REDUCERS: dict[str, tuple[Callable[..., torch.Tensor | None], Callable[..., torch.Tensor | None]]] = {
    "all_reduce": (run_all_reduce, expect_reduced),
    "reduce": (run_reduce, lambda d, o, s, root: expect_reduced(d, o, s, root) if dist.get_rank() == root else None),
    "reduce_scatter": (run_reduce_scatter, expect_scattered),
    "reduce_scatter_tensor": (run_reduce_scatter_single, expect_scattered),
}


class Case(NamedTuple):
    """One row of the table; ``op`` is None for a collective that only copies."""

    name: str
    dtype: torch.dtype
    op: Op | None
    shape: str
    async_op: bool
    root: int

    def __str__(self) -> str:
        op = f" {self.op.name}" if self.op is not None else ""
        return f"{self.name} {self.dtype}{op} {self.shape} root {self.root} async {self.async_op}"


def ways(size: int, number: int) -> list[bool]:
    """Return values of async_op: both for small world sizes, alternating between cases for large ones, which are slow here."""
    return [False, True] if size < 4 else [bool(number % 2)]


def cases_of(size: int, dtypes: list[torch.dtype]) -> list[Case]:
    """Return the whole table for a world size: collectives by element type, operation, shape and kind of call."""
    cases = []
    for place, name in enumerate((*MOVERS, *REDUCERS)):
        for dtype in dtypes:
            # torch allows complex numbers only for all_reduce.
            if name in REDUCERS and dtype.is_complex and name != "all_reduce":
                continue
            for op in ref.ops_of(dtype) if name in REDUCERS else [None]:
                for number, shape in enumerate(ref.SHAPES, place + (0 if op is None else op.value)):
                    root = (number + len(shape)) % size
                    cases += [Case(name, dtype, op, shape, async_op, root) for async_op in ways(size, number)]
    return cases


def pairwise(cases: list[Case], seed: int) -> list[Case]:
    """Return cases in which every pair of values of the table occurs; different ones for each seed."""
    kept: list[Case] = []
    seen: set[tuple[Any, ...]] = set()
    for case in random.Random(seed).sample(cases, len(cases)):
        pairs = set(itertools.combinations(enumerate(case[:-1]), 2))
        if not pairs <= seen:
            kept.append(case)
            seen |= pairs
    return kept


def failures_of(case: Case, gloo: Group | None) -> list[str]:
    """Compare a case with the reference, and with Gloo if Gloo supports it."""
    name, dtype, op, shape, async_op, root = case
    if op is None:
        run, expect = MOVERS[name]
        expected = expect(dtype, shape, root)
        actual = run(dist.group.WORLD, dtype, shape, root, async_op)
        bad = [] if len(actual) == len(expected) and all(map(same, actual, expected)) else [str(case)]
        # Gloo has no all_to_all of lists.
        if gloo and dtype in (torch.float32, torch.int64) and shape == "small" and name != "all_to_all":
            second = run(gloo, dtype, shape, root, False)
            if not all(map(same, second, expected)):
                bad.append(f"Gloo disagrees with the reference: {case}")
        return bad
    run_reducer, expect_reducer = REDUCERS[name]
    wanted = expect_reducer(dtype, op, shape, root)
    result = run_reducer(dist.group.WORLD, dtype, op, shape, root, async_op)
    bad = [str(case)] if wanted is not None and (result is None or not same(result, wanted)) else []
    # Shapes that are quick; Gloo refuses or misreads some strided ones, and before pytorch#149869 it sums in a reduce_scatter_tensor,
    # whatever the operation.
    adds = name == "reduce_scatter_tensor" and TorchVersion(torch.__version__) < "2.8"
    ops = [dist.ReduceOp.SUM] if adds else ref.GLOO_OPS
    if gloo and dtype in ref.GLOO_DTYPES and op in ops and shape in ("scalar", "small"):
        try:
            opinion = run_reducer(gloo, dtype, op, shape, root, False)
        except RuntimeError as error:
            # In older torch, which has no reduce_scatter.
            if "does not support" not in str(error):
                raise
            return bad
        if wanted is not None and not same(opinion, wanted):
            bad.append(f"Gloo disagrees with the reference: {case}")
    return bad


def whole_table(job: Job, dtypes: list[torch.dtype], full: bool = True) -> list[str]:
    """Run every case, or only pairs of values, on this rank and return those that failed."""
    job.init()
    gloo = dist.new_group(backend="gloo") if rank_device().type == "cpu" else None
    cases = cases_of(job.size, dtypes)
    bad = [text for case in (cases if full else pairwise(cases, job.size)) for text in failures_of(case, gloo)]
    # The expected path of the tensors, so that another path is detected.
    how, wanted = dist.group.WORLD.staged_reason, os.environ.get("IPC_TEST_STAGED")
    bad += [] if how is wanted or (how and wanted and how.startswith(wanted)) else [f"staged: {how}"]
    dist.barrier()
    dist.destroy_process_group()
    return bad
