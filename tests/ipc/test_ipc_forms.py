"""Every form of the methods of torch's own process groups, and arguments at and beyond their limits."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_harness import Job, run_ranks, values
from torch._C import _distributed_c10d as c10d

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)

LIMIT = timedelta(seconds=20)
MAX = dist.ReduceOp.MAX
Form = Callable[[Any, int], tuple[Any, list[torch.Tensor]]]


def own(rank: int, numel: int = 2) -> torch.Tensor:
    """Return the contribution of a rank."""
    return torch.arange(numel, dtype=torch.float32) + 10 * rank + 1


def empty(numel: int = 2) -> torch.Tensor:
    """Return memory for a result."""
    return torch.zeros(numel)


def with_options(kind: str, **fields: Any) -> Any:
    """Return options of a call that returns at once."""
    made = getattr(c10d, f"{kind}Options")()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def in_place(call: Callable[[Any, torch.Tensor], Any]) -> Form:
    """Return a form of a call on one tensor."""

    def form(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
        tensor = own(rank)
        return call(pg, tensor), [tensor]

    return form


def reducing(root: int, call: Callable[[Any, torch.Tensor], Any]) -> Form:
    """Return a form of a call whose result only the root has."""

    def form(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
        tensor = own(rank)
        return call(pg, tensor), [tensor] if rank == root else []

    return form


def gathering(call: Callable[[Any, list[torch.Tensor], torch.Tensor], Any]) -> Form:
    """Return a form of a call that fills a tensor for each of two ranks."""

    def form(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
        outs = [empty(), empty()]
        return call(pg, outs, own(rank)), outs

    return form


def scattering(call: Callable[[Any, torch.Tensor, list[torch.Tensor]], Any]) -> Form:
    """Return a form of a call with a tensor for each of two ranks and one result."""

    def form(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
        out = empty()
        return call(pg, out, [own(rank), own(rank + 5)]), [out]

    return form


def single(call: Callable[[Any, torch.Tensor, torch.Tensor], Any], out: int, numel: int) -> Form:
    """Return a form of a call from one tensor to another."""

    def form(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
        result = empty(out)
        return call(pg, result, own(rank, numel)), [result]

    return form


def coalesced_gather(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
    """Use as many tensors as ranks, so that a transposed result would have the correct shape."""
    outs = [[empty(), empty()], [empty(), empty()]]
    return pg.allgather_coalesced(outs, [own(rank), own(rank + 5)]), [out for of_rank in outs for out in of_rank]


FORMS: dict[str, Form] = {
    "allreduce, list": in_place(lambda pg, t: pg.allreduce([t])),
    "allreduce, list, options": in_place(lambda pg, t: pg.allreduce([t], with_options("Allreduce", reduceOp=MAX))),
    "allreduce, list, opts=": in_place(lambda pg, t: pg.allreduce([t], opts=with_options("Allreduce", reduceOp=MAX))),
    "allreduce, list, op": in_place(lambda pg, t: pg.allreduce([t], MAX)),
    "allreduce, list, op, timeout": in_place(lambda pg, t: pg.allreduce([t], MAX, LIMIT)),
    "allreduce, tensor": in_place(lambda pg, t: pg.allreduce(t)),
    "allreduce, tensor, op=": in_place(lambda pg, t: pg.allreduce(t, op=MAX)),
    "allreduce, tensor=, op=, timeout=": in_place(lambda pg, t: pg.allreduce(tensor=t, op=MAX, timeout=LIMIT)),
    "allreduce, tensors=, timeout=": in_place(lambda pg, t: pg.allreduce(tensors=[t], timeout=LIMIT)),
    "allreduce_coalesced": in_place(lambda pg, t: pg.allreduce_coalesced([t])),
    "allreduce_coalesced, options": in_place(
        lambda pg, t: pg.allreduce_coalesced(tensors=[t], opts=with_options("AllreduceCoalesced", reduceOp=MAX))
    ),
    "broadcast, list": in_place(lambda pg, t: pg.broadcast([t])),
    "broadcast, list, options": in_place(lambda pg, t: pg.broadcast([t], with_options("Broadcast", rootRank=1))),
    "broadcast, tensor, root": in_place(lambda pg, t: pg.broadcast(t, 1)),
    "broadcast, tensor, root=": in_place(lambda pg, t: pg.broadcast(t, root=1)),
    "broadcast, tensor=, root, timeout": in_place(lambda pg, t: pg.broadcast(t, 1, LIMIT)),
    "broadcast, tensor=, root=, timeout=": in_place(lambda pg, t: pg.broadcast(tensor=t, root=1, timeout=LIMIT)),
    "reduce, list": reducing(0, lambda pg, t: pg.reduce([t])),
    "reduce, list, options": reducing(
        1, lambda pg, t: pg.reduce([t], with_options("Reduce", rootRank=1, reduceOp=MAX))
    ),
    "reduce, tensor, root": reducing(1, lambda pg, t: pg.reduce(t, 1)),
    "reduce, tensor, root, op": reducing(0, lambda pg, t: pg.reduce(t, 0, MAX)),
    "reduce, tensor, root, op, timeout": reducing(0, lambda pg, t: pg.reduce(t, 0, MAX, LIMIT)),
    "reduce, tensor, root=, op=": reducing(0, lambda pg, t: pg.reduce(t, root=0, op=MAX)),
    "reduce, tensor, root, op=": reducing(0, lambda pg, t: pg.reduce(t, 0, op=MAX)),
    "allgather, lists": gathering(lambda pg, outs, t: pg.allgather([outs], [t])),
    "allgather, names": gathering(lambda pg, outs, t: pg.allgather(output_tensors=[outs], input_tensors=[t])),
    "allgather, tensor": gathering(lambda pg, outs, t: pg.allgather(outs, t)),
    "allgather, tensor, timeout": gathering(lambda pg, outs, t: pg.allgather(outs, t, LIMIT)),
    "allgather, input_tensor=, timeout=": gathering(
        lambda pg, outs, t: pg.allgather(outs, input_tensor=t, timeout=LIMIT)
    ),
    "allgather_coalesced": coalesced_gather,
    "_allgather_base": single(lambda pg, out, t: pg._allgather_base(out, t), 4, 2),
    "_allgather_base, names": single(lambda pg, out, t: pg._allgather_base(output=out, input=t), 4, 2),
    "allgather_into_tensor_coalesced": single(lambda pg, out, t: pg.allgather_into_tensor_coalesced([out], [t]), 4, 2),
    "gather, lists": gathering(
        lambda pg, outs, t: pg.gather([outs] if pg.rank() == 1 else [], [t], with_options("Gather", rootRank=1))
    ),
    "gather, tensor, root": gathering(lambda pg, outs, t: pg.gather(outs if pg.rank() == 1 else [], t, 1)),
    "gather, tensor, root=, timeout=": gathering(
        lambda pg, outs, t: pg.gather(outs if pg.rank() == 1 else [], t, root=1, timeout=LIMIT)
    ),
    "scatter, lists": scattering(
        lambda pg, out, ts: pg.scatter([out], [ts] if pg.rank() == 1 else [], with_options("Scatter", rootRank=1))
    ),
    "scatter, tensor, root": scattering(lambda pg, out, ts: pg.scatter(out, ts if pg.rank() == 1 else [], 1)),
    "scatter, output_tensor=, root=": scattering(
        lambda pg, out, ts: pg.scatter(output_tensor=out, input_tensors=ts if pg.rank() == 1 else [], root=1)
    ),
    "reduce_scatter, lists": scattering(lambda pg, out, ts: pg.reduce_scatter([out], [ts])),
    "reduce_scatter, tensor, op": scattering(lambda pg, out, ts: pg.reduce_scatter(out, ts, MAX)),
    "reduce_scatter, tensor, op=, timeout=": scattering(
        lambda pg, out, ts: pg.reduce_scatter(out, ts, op=MAX, timeout=LIMIT)
    ),
    "_reduce_scatter_base, options": single(
        lambda pg, out, t: pg._reduce_scatter_base(out, t, with_options("ReduceScatter", reduceOp=MAX)), 2, 4
    ),
    "_reduce_scatter_base, names": single(
        lambda pg, out, t: pg._reduce_scatter_base(outputTensor=out, inputTensor=t), 2, 4
    ),
    "reduce_scatter_tensor_coalesced": single(lambda pg, out, t: pg.reduce_scatter_tensor_coalesced([out], [t]), 2, 4),
    "alltoall_base": single(lambda pg, out, t: pg.alltoall_base(out, t, [], []), 4, 4),
    "alltoall_base, splits, timeout": single(lambda pg, out, t: pg.alltoall_base(out, t, [2, 2], [2, 2], LIMIT), 4, 4),
    "alltoall_base, names": single(
        lambda pg, out, t: pg.alltoall_base(
            output=out, input=t, output_split_sizes=[2, 2], input_split_sizes=[2, 2], timeout=LIMIT
        ),
        4,
        4,
    ),
    "barrier": lambda pg, rank: (pg.barrier(), []),
    "barrier, timeout": lambda pg, rank: (pg.barrier(LIMIT), []),
    "barrier, timeout=": lambda pg, rank: (pg.barrier(timeout=LIMIT), []),
    "barrier, opts=": lambda pg, rank: (pg.barrier(opts=with_options("Barrier")), []),
}


def other_results(job: Job) -> list[str]:
    """Return forms whose results on ipc differ from those on Gloo."""
    job.init()
    gloo = dist.new_group(backend="gloo")
    different = []
    for name, form in FORMS.items():
        found = []
        for group in (dist.group.WORLD, gloo):
            work, results = form(group, job.rank)
            work.wait()
            found.append(results)
        if not all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True)):
            different.append(f"{name}: {found}")
    return different


def test_every_form_has_the_results_of_gloo() -> None:
    """By position, by name, with options and without: a given root or operation is never ignored."""
    for different in values(run_ranks(other_results, 2)):
        assert different == []


ROOTS: dict[str, Callable[[Any, int], Any]] = {
    "broadcast": lambda pg, root: pg.broadcast(empty(), root),
    "reduce": lambda pg, root: pg.reduce(empty(), root),
    "gather": lambda pg, root: pg.gather([empty(), empty()], empty(), root),
    "scatter": lambda pg, root: pg.scatter(empty(), [empty(), empty()], root),
}
WRONG: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    **{
        f"{name}, root {root}": (
            ValueError,
            f"{name} got an invalid root rank: {root}",
            lambda pg, c=call, r=root: c(pg, r),
        )
        for name, call in ROOTS.items()
        for root in (-1, 2)
    },
    "root tensor": (
        ValueError,
        "invalid root tensor: 1",
        lambda pg: pg.broadcast([empty()], with_options("Broadcast", rootTensor=1)),
    ),
    "none to reduce": (ValueError, "got no tensors", lambda pg: pg.allreduce_coalesced([])),
    "none to gather": (ValueError, "got no tensors", lambda pg: pg.allgather_coalesced([[], []], [])),
    "reduced twice": (
        ValueError,
        "all_reduce_coalesced got two tensors that share memory",
        lambda pg: [pg.allreduce_coalesced([tensor[:3], tensor[2:]]) for tensor in (empty(4),)],
    ),
    "no tensor": (TypeError, "needs tensors or tensor", lambda pg: pg.allreduce()),
    "unknown name": (TypeError, "allreduce.* got root; ", lambda pg: pg.allreduce(empty(), root=0)),
    "too many": (TypeError, "got 3 arguments after the tensors", lambda pg: pg.allreduce(empty(), MAX, LIMIT, 0)),
    "twice": (TypeError, "got 1 arguments", lambda pg: pg.allreduce(empty(), MAX, op=MAX)),
    "op and options": (
        TypeError,
        "without further arguments",
        lambda pg: pg.allreduce([empty()], with_options("Allreduce"), op=MAX),
    ),
    "other options": (
        TypeError,
        "class AllreduceOptions",
        lambda pg: pg.allreduce([empty()], opts=with_options("Reduce")),
    ),
    "op that is none": (TypeError, "op must be a", lambda pg: pg.allreduce(empty(), "MAX")),
    "root that is none": (TypeError, "integer", lambda pg: pg.broadcast(empty(), "0")),
    "no root": (TypeError, "needs root", lambda pg: pg.reduce(empty(), op=MAX)),
    "timeout that is none": (TypeError, "timeout must be", lambda pg: pg.broadcast(empty(), 0, "1 s")),
    "all_gather_coalesced by tensor": (
        ValueError,
        "one list for each of the 2 ranks",
        lambda pg: pg.allgather_coalesced([[empty()] * 2] * 3, [empty()] * 3),
    ),
    "all_to_all of two types": (
        ValueError,
        "torch.float32 and torch.int32",
        lambda pg: pg.alltoall([empty(), empty().int()], [empty(), empty()]),
    ),
    "all_to_all_single of two types": (
        ValueError,
        "torch.int32 and torch.float32",
        lambda pg: pg.alltoall_base(empty(4).int(), empty(4), [], []),
    ),
    "all_reduce_coalesced with AVG of bool": (
        ValueError,
        "cannot reduce torch.bool with AVG",
        lambda pg: pg.allreduce_coalesced(
            [empty(), empty().bool()], with_options("AllreduceCoalesced", reduceOp=dist.ReduceOp.AVG)
        ),
    ),
    "all_gather_into_tensor_coalesced, second too small": (
        ValueError,
        "all parts must have the same dtype and size",
        lambda pg: pg.allgather_into_tensor_coalesced([empty(4), empty(3)], [empty(), empty()]),
    ),
    "all_gather_into_tensor_coalesced of unequal lists": (
        ValueError,
        "got 2 outputs for 1 inputs",
        lambda pg: pg.allgather_into_tensor_coalesced([empty(4), empty(4)], [empty()]),
    ),
    "reduce_scatter_tensor_coalesced of unequal lists": (
        ValueError,
        "got 1 outputs for 2 inputs",
        lambda pg: pg.reduce_scatter_tensor_coalesced([empty()], [empty(4), empty(4)]),
    ),
    "negative split": (ValueError, "splits", lambda pg: pg.alltoall_base(empty(4), empty(4), [-1, 5], [2, 2]).wait()),
}


def refusals(job: Job) -> tuple[list[str], float]:
    """Return wrong calls that were not refused as they should be, and the group's results afterwards."""
    job.init()
    missed = []
    for name, (error_type, text, call) in WRONG.items():
        try:
            with pytest.raises(error_type, match=text):
                call(dist.group.WORLD)
        except BaseException as error:
            missed.append(f"{name}: {error!r}")
        # A call that is refused when it runs has been counted.
        if dist.group.WORLD._get_sequence_number_for_group() != ("negative" in name):
            missed.append(f"{name}: something was called")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return missed, tensor.item()


def test_wrong_arguments_are_refused_and_the_group_goes_on() -> None:
    """Nothing is sent for an invalid call."""
    assert values(run_ranks(refusals, 2)) == [([], 2.0)] * 2
