"""Every form of the methods of torch's own process groups, and arguments at and beyond their limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ipc_calls import options
from ipc_harness import Job, on_ranks

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)

LIMIT = timedelta(seconds=20)
MAX = dist.ReduceOp.MAX
# Of a group and a rank: a call's arguments, and the tensors that have its results.
Data = Callable[[Any, int], tuple[list[Any], list[torch.Tensor]]]
Form = Callable[[Any, int], tuple[Any, list[torch.Tensor]]]


def own(rank: int, numel: int = 2) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32) + 10 * rank + 1


def empty(numel: int = 2) -> torch.Tensor:
    return torch.zeros(numel)


# Options of a call that returns at once.
with_options = partial(options, asyncOp=True)


def in_place(pg: Any, rank: int, root: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
    tensor = own(rank)
    return [tensor], [tensor] if root in (None, rank) else []


def gathering(pg: Any, rank: int, root: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
    outs = [empty(), empty()] if root in (None, rank) else []
    return [outs, own(rank)], outs


def scattering(pg: Any, rank: int, root: int | None = None) -> tuple[list[Any], list[torch.Tensor]]:
    out = empty()
    return [out, [own(rank), own(rank + 5)] if root in (None, rank) else []], [out]


def single(numel_out: int, numel_in: int) -> Data:
    def data(pg: Any, rank: int) -> tuple[list[Any], list[torch.Tensor]]:
        out = empty(numel_out)
        return [out, own(rank, numel_in)], [out]

    return data


# By method: the data, names of its arguments, further arguments, and how many of those it needs.
BY_TENSOR: dict[str, tuple[Data, tuple[str, ...], dict[str, Any], int]] = {
    "allreduce": (in_place, ("tensor",), {"op": MAX, "timeout": LIMIT}, 0),
    "broadcast": (in_place, ("tensor",), {"root": 1, "timeout": LIMIT}, 1),
    "reduce": (partial(in_place, root=1), ("tensor",), {"root": 1, "op": MAX, "timeout": LIMIT}, 1),
    "allgather": (gathering, ("output_tensors", "input_tensor"), {"timeout": LIMIT}, 0),
    "gather": (partial(gathering, root=1), ("output_tensors", "input_tensor"), {"root": 1, "timeout": LIMIT}, 1),
    "scatter": (partial(scattering, root=1), ("output_tensor", "input_tensors"), {"root": 1, "timeout": LIMIT}, 1),
    "reduce_scatter": (scattering, (), {"op": MAX, "timeout": LIMIT}, 0),
    "alltoall_base": (
        single(4, 4),
        ("output", "input"),
        {"output_split_sizes": [2, 2], "input_split_sizes": [2, 2], "timeout": LIMIT},
        2,
    ),
    "barrier": (lambda pg, rank: ([], []), (), {"timeout": LIMIT}, 0),
}
# By method: the data, names of its arguments, and options. All arguments are lists.
BY_LISTS: dict[str, tuple[Data, tuple[str, ...], Any]] = {
    "allreduce": (in_place, ("tensors",), with_options("Allreduce", reduceOp=MAX)),
    "allreduce_coalesced": (in_place, ("tensors",), with_options("AllreduceCoalesced", reduceOp=MAX)),
    "broadcast": (in_place, (), with_options("Broadcast", rootRank=1)),
    "reduce": (partial(in_place, root=1), (), with_options("Reduce", rootRank=1, reduceOp=MAX)),
    "allgather": (gathering, ("output_tensors", "input_tensors"), with_options("Allgather")),
    "allgather_into_tensor_coalesced": (single(4, 2), (), with_options("Allgather")),
    "gather": (partial(gathering, root=1), (), with_options("Gather", rootRank=1)),
    "scatter": (partial(scattering, root=1), (), with_options("Scatter", rootRank=1)),
    "reduce_scatter": (scattering, (), with_options("ReduceScatter", reduceOp=MAX)),
    "reduce_scatter_tensor_coalesced": (single(2, 4), (), with_options("ReduceScatter", reduceOp=MAX)),
}


def coalesced_gather(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
    """Use as many tensors as ranks, so that a transposed result would have the correct shape."""
    outs = [[empty(), empty()], [empty(), empty()]]
    return pg.allgather_coalesced(outs, [own(rank), own(rank + 5)]), [out for of_rank in outs for out in of_rank]


def called(method: str, data: Data, names: tuple[str, ...], in_lists: bool, *more: Any, **named: Any) -> Form:
    """Return a call, with the names of the tensors' arguments if there are some and nothing follows by position."""

    def form(pg: Any, rank: int) -> tuple[Any, list[torch.Tensor]]:
        args, results = data(pg, rank)
        if in_lists:  # a rank without a root's list passes none
            args = [[arg] if arg != [] else [] for arg in args]
        if names and not more:
            return getattr(pg, method)(**dict(zip(names, args, strict=True)), **named), results
        return getattr(pg, method)(*args, *more, **named), results

    return form


def forms() -> Iterator[tuple[str, Form]]:
    """Yield each method with every number of its further arguments, of which some are passed by name."""
    for method, (data, names, optional, num_needed) in BY_TENSOR.items():
        for count in range(num_needed, len(optional) + 1):
            for num_named in range(count + 1):
                more, named = [*optional.items()][: count - num_named], [*optional.items()][count - num_named : count]
                for given in dict.fromkeys([names, ()]):
                    form = called(method, data, given, False, *(value for _, value in more), **dict(named))
                    yield f"{method}, by name {given}, {more}, {named}", form
    for method, (data, names, opts) in BY_LISTS.items():
        yield f"{method}, options", called(method, data, (), True, opts)
        yield f"{method}, opts=", called(method, data, names, True, opts=opts)
        if method == "broadcast" or not hasattr(opts, "rootRank"):
            yield f"{method}, lists", called(method, data, names, True)
    yield "_allgather_base", called("_allgather_base", single(4, 2), ("output", "input"), False)
    scatter = with_options("ReduceScatter", reduceOp=MAX)
    yield "_reduce_scatter_base", called("_reduce_scatter_base", single(2, 4), ("outputTensor", "inputTensor"), False)
    yield "_reduce_scatter_base, options", called("_reduce_scatter_base", single(2, 4), (), False, scatter)
    yield "barrier, opts=", called("barrier", lambda pg, rank: ([], []), (), False, opts=with_options("Barrier"))
    yield "allgather_coalesced", coalesced_gather


@on_ranks(2)
def test_every_form_has_the_results_of_gloo(job: Job) -> None:
    """By position, by name, with options and without: a given root or operation is never ignored."""
    job.init()
    gloo = dist.new_group(backend="gloo")
    for name, form in forms():
        found = []
        for group in (gloo, dist.group.WORLD):
            try:
                work, results = form(group, job.rank)
            except Exception as error:
                raise AssertionError(f"{name} on {group.name()}") from error
            work.wait()
            found.append(results)
        assert all(map(torch.equal, *found)), f"{name}: {found}"


ROOTS: dict[str, Callable[[Any, int], Any]] = {
    "broadcast": lambda pg, root: pg.broadcast(empty(), root),
    "reduce": lambda pg, root: pg.reduce(empty(), root),
    "gather": lambda pg, root: pg.gather([empty(), empty()], empty(), root),
    "scatter": lambda pg, root: pg.scatter(empty(), [empty(), empty()], root),
}
AVG_COALESCED = with_options("AllreduceCoalesced", reduceOp=dist.ReduceOp.AVG)
WRONG_VALUES: dict[str, Callable[[Any], Any]] = {
    **{f"{name}, root {r}": lambda pg, c=c, r=r: c(pg, r) for name, c in ROOTS.items() for r in (-1, 2)},
    "root tensor": lambda pg: pg.broadcast([empty()], with_options("Broadcast", rootTensor=1)),
    "none to reduce": lambda pg: pg.allreduce_coalesced([]),
    "none to gather": lambda pg: pg.allgather_coalesced([[], []], []),
    "reduced twice": lambda pg: [pg.allreduce_coalesced([t[:3], t[2:]]) for t in (empty(4),)],
    "by tensor, not by rank": lambda pg: pg.allgather_coalesced([[empty()] * 2] * 3, [empty()] * 3),
    "all_to_all of two types": lambda pg: pg.alltoall([empty(), empty().int()], [empty(), empty()]),
    "all_to_all_single of two types": lambda pg: pg.alltoall_base(empty(4).int(), empty(4), [], []),
    "AVG of integers": lambda pg: pg.allreduce_coalesced([empty().long()], AVG_COALESCED),
    "AVG of bool": lambda pg: pg.allreduce_coalesced([empty(), empty().bool()], AVG_COALESCED),
    "second too small": lambda pg: pg.allgather_into_tensor_coalesced([empty(4), empty(3)], [empty(), empty()]),
    "two outputs for one input": lambda pg: pg.allgather_into_tensor_coalesced([empty(4), empty(4)], [empty()]),
    "one output for two inputs": lambda pg: pg.reduce_scatter_tensor_coalesced([empty()], [empty(4), empty(4)]),
    "negative split": lambda pg: pg.alltoall_base(empty(4), empty(4), [-1, 5], [2, 2]).wait(),
}
WRONG_TYPES: dict[str, Callable[[Any], Any]] = {
    "op and options": lambda pg: pg.allreduce([empty()], with_options("Allreduce"), op=MAX),
    "no root": lambda pg: pg.reduce(empty(), op=MAX),
}


@on_ranks(2)
def test_wrong_arguments_are_refused_and_the_group_goes_on(job: Job) -> None:
    """Nothing is sent for an invalid call."""
    job.init()
    group: Any = dist.group.WORLD
    for error, table in ((ValueError, WRONG_VALUES), (TypeError, WRONG_TYPES)):
        for name, call in table.items():
            before = group._get_sequence_number_for_group()
            try:
                with pytest.raises(error):
                    call(group)
            except BaseException as other:
                raise AssertionError(name) from other
            # A call that is refused when it runs has been counted.
            assert group._get_sequence_number_for_group() == before + (name == "negative split"), name
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == 2.0


@on_ranks(2)
def test_the_forms_of_a_collective_meet(job: Job) -> None:
    """One rank passes a list of tensors, the other one tensor, as with Gloo."""
    job.init()
    own, parts, whole = torch.arange(4.0) + job.rank, [torch.empty(4) for _ in range(2)], torch.empty(8)
    if job.rank == 0:
        dist.all_gather(parts, own)
        dist.reduce_scatter(first := torch.empty(4), [torch.arange(4.0), torch.arange(4.0, 8.0)])
        dist.all_to_all(swapped := list(torch.empty(4).chunk(2)), list(own.chunk(2)))
    else:
        dist.all_gather_into_tensor(whole, own)
        dist.reduce_scatter_tensor(first := torch.empty(4), torch.arange(8.0))
        swapped = [torch.empty(4)]
        dist.all_to_all_single(swapped[0], own)
    gathered = torch.cat(parts) if job.rank == 0 else whole
    assert torch.equal(gathered, torch.tensor([0.0, 1, 2, 3, 1, 2, 3, 4]))
    assert torch.equal(first, 2 * (torch.arange(4.0) + 4 * job.rank))
    assert torch.equal(torch.cat(swapped), torch.tensor([[0.0, 1, 1, 2], [2, 3, 3, 4]])[job.rank])


@on_ranks(2)
def test_the_options_of_a_call_through_gloo_can_be_used_again(job: Job) -> None:
    """Their time limit is the caller's afterwards, not what was left of it."""
    job.init()
    opts = with_options("Allreduce", timeout=timedelta(seconds=20))
    dist.group.WORLD.allreduce([torch.ones(3).to_sparse()], opts).wait()  # type: ignore[union-attr]
    assert opts.timeout == timedelta(seconds=20)
