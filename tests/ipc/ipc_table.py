"""Table of every collective, element type, reduce operation and shape, on any device, compared with a reference on the host."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ipc_reference as ref
import torch
import torch.distributed as dist
from ipc_harness import Job, rank_device, run_ranks, values
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


@dataclass
class Run:
    """A case in progress on this rank, on a group."""

    case: Case
    group: Group
    # Inputs that the collective may still read.
    held: list[torch.Tensor] = field(default_factory=list)

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.case.async_op}

    def own(self, salt: str = "") -> torch.Tensor:
        self.held.append(make(self.case.dtype, self.case.shape, dist.get_rank(), salt).to(rank_device()))
        return self.held[-1]

    def owns(self) -> list[torch.Tensor]:
        return [self.own(str(r)) for r in range(dist.get_world_size())]

    def outputs(self) -> list[torch.Tensor]:
        """Return memory for a result of each rank."""
        return [torch.empty_like(self.own()) for _ in range(dist.get_world_size())]

    def is_root(self) -> bool:
        return dist.get_rank() == self.case.root

    def results(self) -> list[torch.Tensor]:
        work, results = STARTS[self.case.name](self)
        if work is not None:
            work.wait()
        return results


# What a collective returns, and this rank's results.
Started = tuple[Any, list[torch.Tensor]]


def broadcast(run: Run) -> Started:
    tensor = run.own()
    return dist.broadcast(tensor, run.case.root, **run.how), [tensor]


def all_gather(run: Run) -> Started:
    outputs = run.outputs()
    return dist.all_gather(outputs, run.own(), **run.how), outputs


def all_gather_into_tensor(run: Run) -> Started:
    output = torch.empty((dist.get_world_size(), *run.own().shape), dtype=run.case.dtype, device=rank_device())
    return dist.all_gather_into_tensor(output.view(-1), run.own().reshape(-1), **run.how), list(output)


def gather(run: Run) -> Started:
    outputs = run.outputs() if run.is_root() else None
    return dist.gather(run.own(), outputs, dst=run.case.root, **run.how), outputs or []


def scatter(run: Run) -> Started:
    inputs, output = run.owns() if run.is_root() else None, torch.empty_like(run.own())
    return dist.scatter(output, inputs, src=run.case.root, **run.how), [output]


def all_to_all(run: Run) -> Started:
    outputs = run.outputs()
    return dist.all_to_all(outputs, run.owns(), **run.how), outputs


def all_reduce(run: Run) -> Started:
    tensor = run.own()
    return dist.all_reduce(tensor, run.case.op, **run.how), [tensor]


def reduce(run: Run) -> Started:
    tensor = run.own()
    return dist.reduce(tensor, run.case.root, run.case.op, **run.how), [tensor] if run.is_root() else []


def reduce_scatter(run: Run) -> Started:
    output = torch.empty_like(run.own())
    return dist.reduce_scatter(output, run.owns(), run.case.op, **run.how), [output]


def reduce_scatter_tensor(run: Run) -> Started:
    output = torch.empty(run.own().shape, dtype=run.case.dtype, device=rank_device())
    run.held.append(torch.cat([tensor.reshape(-1) for tensor in run.owns()]))
    return dist.reduce_scatter_tensor(output.view(-1), run.held[-1], run.case.op, **run.how), [output]


_FUNCTIONS = (
    broadcast,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    all_to_all,
    all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
)
STARTS: dict[str, Callable[[Run], Started]] = {function.__name__: function for function in _FUNCTIONS}


def expected(case: Case) -> list[torch.Tensor]:
    name, dtype, op, shape, _, root = case
    rank, ranks = dist.get_rank(), range(dist.get_world_size())
    if name in ("reduce", "gather") and rank != root:
        return []
    # The ranks' inputs for this rank, or for all.
    salt = str(rank) if "scatter" in name or name == "all_to_all" else ""
    inputs = [make(dtype, shape, r, salt) for r in ranks]
    if op is not None:
        return [reduced(inputs, op)]
    return [inputs[root]] if name in ("broadcast", "scatter") else inputs


def ways(size: int, number: int) -> list[bool]:
    """Return values of async_op: both for small world sizes, alternating between cases for large ones, which are slow here."""
    return [False, True] if size < 4 else [bool(number % 2)]


def cases_of(size: int, dtypes: list[torch.dtype]) -> list[Case]:
    """Return the whole table for a world size: collectives by element type, operation, shape and kind of call."""
    cases = []
    for place, name in enumerate(STARTS):
        for dtype in dtypes:
            # torch allows complex numbers only for all_reduce.
            if "reduce" in name and dtype.is_complex and name != "all_reduce":
                continue
            for op in ref.ops_of(dtype) if "reduce" in name else [None]:
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


def gloo_has(case: Case) -> bool:
    """Return whether Gloo can give a second opinion, soon: it refuses or misreads some strided tensors, and has no all_to_all of lists."""
    if case.op is None:
        return case.dtype in (torch.float32, torch.int64) and case.shape == "small" and case.name != "all_to_all"
    # Before pytorch#149869 it sums in a reduce_scatter_tensor, whatever the operation; older torch has no reduce_scatter.
    if case.name.startswith("reduce_scatter") and TorchVersion(torch.__version__) < "2.8":
        return False
    return case.dtype in ref.GLOO_DTYPES and case.op in ref.GLOO_OPS and case.shape in ("scalar", "small")


def failures_of(case: Case, gloo: Group | None) -> list[str]:
    """Compare a case with the reference, and with Gloo if Gloo supports it."""
    wanted, bad = expected(case), []
    for group in (dist.group.WORLD, *([gloo] if gloo and gloo_has(case) else [])):
        found = Run(case if group is not gloo else case._replace(async_op=False), group).results()
        if len(found) != len(wanted) or not all(map(same, found, wanted)):
            bad.append(f"{case} on {group.name()}")
    return bad


def whole_table(job: Job, dtypes: list[torch.dtype], full: bool = True) -> None:
    """Run every case, or only pairs of values, on this rank; all must be right and take the expected path."""
    job.init()
    gloo = dist.new_group(backend="gloo") if rank_device().type == "cpu" else None
    cases = cases_of(job.size, dtypes)
    assert [text for case in (cases if full else pairwise(cases, job.size)) for text in failures_of(case, gloo)] == []
    how, wanted = dist.group.WORLD.staged_reason, os.environ.get("IPC_TEST_STAGED")
    assert how is wanted or (how and wanted and how.startswith(wanted)), f"staged: {how}"
    dist.barrier()
    dist.destroy_process_group()


def check_table(size: int, dtypes: list[torch.dtype], full: bool, env: Any) -> None:
    values(run_ranks(whole_table, size, dtypes, full, limit_s=280, env=env))
