"""A group with tools that watch or replace torch's operations: the profiler, dispatch modes, transforms, tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ipc_calls import Watching, bare_group
from ipc_harness import Job, on_ranks, run_ranks, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)


def check_sum(job: Job) -> None:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == job.size


@on_ranks(2)
def test_a_profile_has_the_collectives(job: Job) -> None:
    """Each is a record under its name, with the shapes of its tensors, whichever thread and memory it uses."""
    job.init()
    with torch.profiler.profile(record_shapes=True) as profile:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(6), tensor)
        dist.all_reduce(torch.ones(2).to_sparse())
        dist.barrier()
    found = [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("ipc:")]
    assert found == [
        ("ipc:all_reduce", [[3]]),
        ("ipc:all_reduce", [[3]]),
        ("ipc:all_gather_into_tensor", [[6], [3]]),
        ("ipc:all_reduce", [[2]]),
        ("ipc:barrier", []),
    ]


@on_ranks(2)
def test_a_dispatch_mode_does_not_see_the_parts_of_a_collective(job: Job) -> None:
    """A counter of operations counts the model's, not the backend's copies and additions."""
    job.init()
    tensor, gathered, received = (torch.ones(numel, dtype=torch.bfloat16) for numel in (2, 4, 4))
    with Watching() as mode:
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered, tensor)
        dist.all_to_all_single(received, gathered)
    assert mode.seen == []
    assert gathered.tolist() == received.tolist() == [2.0] * 4


@on_ranks(1)
def test_coalesced_calls_on_fake_cuda_tensors_touch_no_device(job: Job) -> None:
    """Like each of the calls by itself: the device need not exist."""
    pg = bare_group(job, "fakes", job.rank, job.size, 20.0)
    with FakeTensorMode():
        first, second = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
    works = [pg.allreduce_coalesced([first, second]), pg.reduce_scatter_tensor_coalesced([first], [second])]
    for work in works:
        work.wait()
    assert [len(work.result()) for work in works] == [2, 1]


@on_ranks(2)
def test_the_default_device_does_not_matter(job: Job) -> None:
    """Tensors that a collective creates have the device of its tensors."""
    job.init()
    sent, received = torch.arange(4.0) + 10 * job.rank, torch.zeros(4)
    with torch.device("meta"):
        dist.all_to_all_single(received, sent)
    assert received.tolist() == [2.0 * job.rank + x for x in (0, 1, 10, 11)]


def in_transforms(job: Job, backend: str) -> list[Any]:
    """Return the results of collectives inside transforms of torch.func, several times."""
    job.init(backend)

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = x * (job.rank + 2)
        dist.all_reduce(y)
        dist.all_reduce(y, async_op=True).wait()
        parts = [torch.zeros_like(y) for _ in range(job.size)]
        dist.all_gather(parts, y)
        dist.broadcast(y[0], src=1)
        return ((y + parts[0]) * x).sum()

    x, results = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), []
    for _ in range(10):
        results += torch.func.grad_and_value(loss)(x)
        results += torch.func.jvp(loss, (x,), (torch.ones(2, 2),))
        results.append(torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x))
        dist.all_reduce(results[-1])
    return results


def test_collectives_in_transforms_are_those_of_gloo() -> None:
    """A transform sees neither the call nor its result, and the call keeps no tensor of a transform."""
    on_ipc, on_gloo = (values(run_ranks(in_transforms, 2, backend, limit_s=60)) for backend in ("ipc", "gloo"))
    torch.testing.assert_close(on_ipc, on_gloo, rtol=0, atol=0)


@on_ranks(2)
def test_tensors_without_data_are_unchanged(job: Job) -> None:
    """Meta and fake tensors are returned unchanged without waiting for a peer, and the group continues."""
    job.init()
    if job.rank == 0:
        with FakeTensorMode():
            fake = torch.ones(3)
        for tensor in (torch.ones(3, device="meta"), fake):
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 1)
            work = dist.all_gather([tensor] * job.size, tensor, async_op=True)
            work.wait()
            assert work.result()[0].shape == (3,)
    check_sum(job)


def _expanded(*shape: int) -> torch.Tensor:
    return torch.ones(1).expand(*shape)


def _transformed(transform: Callable[..., Any], **how: Any) -> Any:
    def total(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        dist.all_reduce(tensor=y, **how)
        return y.sum()

    return transform(total)(torch.ones(3, 2))


def _sharded() -> torch.Tensor:
    return distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])


REFUSED: dict[str, Callable[[], Any]] = {
    "elements that share memory": lambda: dist.all_reduce(_expanded(5)),
    "the same, asynchronous": lambda: dist.all_reduce(_expanded(5, 2), async_op=True),
    "the same, one of several": lambda: dist.all_gather([torch.empty(3), _expanded(3)], torch.ones(3)),
    "the same, all_to_all": lambda: dist.all_to_all_single(_expanded(2), torch.ones(2)),
    "a meta tensor beside a real one": lambda: dist.all_gather_into_tensor(
        torch.empty(6), torch.ones(3, device="meta")
    ),
    "vmap": lambda: _transformed(torch.vmap),
    "vmap, asynchronous": lambda: _transformed(torch.vmap, async_op=True),
    "functionalize": lambda: _transformed(torch.func.functionalize),
    "functionalize, asynchronous": lambda: _transformed(torch.func.functionalize, async_op=True),
    "a DTensor": lambda: dist.all_reduce(_sharded()),
}


@on_ranks(2)
def test_what_cannot_be_reduced_is_refused(job: Job) -> None:
    """Before anything is sent, so the group remains usable."""
    job.init()
    for call in REFUSED.values():
        with pytest.raises((TypeError, ValueError)):
            call()
        check_sum(job)


@on_ranks(2)
def test_overlapping_inputs_are_read(job: Job) -> None:
    """A root broadcasts, and the others reduce and gather, from memory that several elements share."""
    job.init()
    one, other = _expanded(3), torch.zeros(3)
    gathered = torch.zeros(6)
    dist.all_gather_into_tensor(gathered, one)
    dist.broadcast(one if job.rank == 0 else other, 0)
    summed = torch.ones(3) if job.rank == 0 else one
    dist.reduce(summed, 0)
    outputs = [torch.zeros(3), torch.zeros(3)] if job.rank == 0 else None
    dist.gather(one, outputs, 0)
    assert gathered.tolist() == [1.0] * 6
    assert other.tolist() == [1.0 * job.rank] * 3
    assert summed.tolist() == [2.0 - job.rank] * 3
    assert all(output.tolist() == [1.0] * 3 for output in outputs or ())


@on_ranks(2)
def test_the_result_of_a_functional_collective_is_awaited(job: Job) -> None:
    """It may be an argument of the next call at once."""
    job.init()
    pending = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    dist.all_reduce(pending)
    assert pending.tolist() == [4.0, 4.0]


@on_ranks(2)
def test_the_sequence_number_counts_calls(job: Job) -> None:
    """torch's ``_get_sequence_number_for_group``; and a tensor that a coalesced call lists twice is summed once, as with Gloo."""
    job.init()
    group: Any = dist.group.WORLD
    group._set_sequence_number_for_group()
    before = group._get_sequence_number_for_group()
    dist.barrier()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    assert group._get_sequence_number_for_group() == before + 2
    tensor = torch.ones(2)
    group.allreduce_coalesced([tensor, tensor]).wait()
    assert tensor.tolist() == [2.0, 2.0]
