"""A group with tools that watch or replace torch's operations: Dynamo, the profiler, dispatch modes, tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ipc_calls import bare_group
from ipc_harness import Job, run_ranks, values
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)


def compiled_ddp(job: Job, backend: str) -> list[torch.Tensor]:
    """Run some steps of a compiled DDP model, with and without Dynamo's splitting by bucket."""
    job.init(backend)
    results = []
    for split in (True, False):
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = split
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        model = torch.compile(DDP(net), backend="aot_eager")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * job.rank + step))
            model(x).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results += [parameter.detach() for parameter in net.parameters()]
    return results


@pytest.mark.full
def test_a_compiled_ddp_model_ends_with_the_same_weights_as_on_gloo() -> None:
    """Dynamo skips the backend's frames, which the reducer enters inside the compiled region."""
    on_ipc = values(run_ranks(compiled_ddp, 2, "ipc", limit_s=120))
    on_gloo = values(run_ranks(compiled_ddp, 2, "gloo", limit_s=120))
    torch.testing.assert_close(on_ipc, on_gloo, rtol=0, atol=0)


def in_a_profile(job: Job) -> list[tuple[str, list[list[int]]]]:
    """Return the records of collectives in a profile."""
    job.init()
    with torch.profiler.profile(record_shapes=True) as profile:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, async_op=True).wait()
        dist.all_gather_into_tensor(torch.empty(3 * job.size), tensor)
        dist.all_reduce(torch.ones(2).to_sparse())
        dist.barrier()
    return [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("ipc:")]


def test_a_profile_has_the_collectives() -> None:
    """Each is a record under its name, with the shapes of its tensors, whichever thread and memory it uses."""
    expected = [
        ("ipc:all_reduce", [[3]]),
        ("ipc:all_reduce", [[3]]),
        ("ipc:all_gather_into_tensor", [[6], [3]]),
        ("ipc:all_reduce", [[2]]),
        ("ipc:barrier", []),
    ]
    assert values(run_ranks(in_a_profile, 2)) == [expected] * 2


class Watching(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def under_a_mode(job: Job) -> tuple[list[str], list[float]]:
    """Return the operations of collectives that a dispatch mode sees, and their results."""
    job.init()
    tensor, gathered = torch.ones(2, dtype=torch.bfloat16), torch.zeros(2 * job.size, dtype=torch.bfloat16)
    with Watching() as mode:
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(gathered, tensor)
        dist.all_to_all_single(torch.empty_like(gathered), gathered)
    return [name for name in mode.seen if "empty_like" not in name], gathered.tolist()


def test_a_dispatch_mode_does_not_see_the_parts_of_a_collective() -> None:
    """A counter of operations counts the model's, not the backend's copies and additions."""
    assert values(run_ranks(under_a_mode, 2)) == [([], [2.0] * 4)] * 2


def coalesced_fakes(job: Job) -> list[int]:
    """Return the number of results of coalesced calls on fake tensors of a CUDA device, which need not exist."""
    pg = bare_group(job, "fakes", job.rank, job.size, 20.0)
    with FakeTensorMode():
        first, second = torch.empty(4, device="cuda"), torch.empty(4, device="cuda")
    works = [pg.allreduce_coalesced([first, second]), pg.reduce_scatter_tensor_coalesced([first], [second])]
    for work in works:
        work.wait()
    return [len(work.result()) for work in works]


def test_coalesced_calls_on_fake_cuda_tensors_touch_no_device() -> None:
    """Like each of the calls by itself."""
    assert values(run_ranks(coalesced_fakes, 1)) == [[2, 1]]


def on_device_meta(job: Job) -> list[float]:
    """Run an all-to-all of CPU tensors while new tensors are created on the meta device."""
    job.init()
    sent, received = torch.arange(4.0) + 10 * job.rank, torch.zeros(4)
    with torch.device("meta"):
        dist.all_to_all_single(received, sent)
    return received.tolist()


def test_the_default_device_does_not_matter() -> None:
    """Tensors that a collective creates have the device of its tensors."""
    assert values(run_ranks(on_device_meta, 2)) == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]


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


def in_other_transforms(job: Job) -> tuple[list[str], float]:
    """Return the errors of calls inside transforms that cannot be left, and the sum of a call afterwards."""
    job.init()
    found = []

    def total(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        dist.all_reduce(tensor=y, async_op=bool(len(found) % 2))
        return y.sum()

    for transform in (torch.vmap, torch.func.functionalize):
        for _ in range(2):
            with pytest.raises(TypeError) as error:
                transform(total)(torch.ones(3, 2))
            found.append(str(error.value))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    return found, tensor.sum().item()


def test_other_transforms_are_refused() -> None:
    """Before anything is sent, so the group remains usable."""
    for found, total in values(run_ranks(in_other_transforms, 2, limit_s=60)):
        assert ["of torch.vmap," in text for text in found] == [True, True, False, False]
        assert all(text.endswith("call the collective outside of it.") for text in found)
        assert total == 6


def without_data(job: Job) -> tuple[list[tuple[int, ...]], float, str]:
    """Run collectives on tensors without data on rank 0 only; then a real one on all ranks, and one that mixes both."""
    job.init()
    shapes = []
    if job.rank == 0:
        with FakeTensorMode():
            fake = torch.ones(3)
        for tensor in (torch.ones(3, device="meta"), fake):
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 1)
            work = dist.all_gather([tensor] * job.size, tensor, async_op=True)
            work.wait()
            shapes.append(tuple(work.result()[0].shape))
    try:
        dist.all_gather_into_tensor(torch.empty(3 * job.size), torch.ones(3, device="meta"))
        text = "nothing"
    except ValueError as error:
        text = str(error)
    real = torch.ones(1)
    dist.all_reduce(real)
    return shapes, real.item(), text


def test_tensors_without_data_are_unchanged() -> None:
    """Meta and fake tensors are returned unchanged without waiting for a peer, and the group continues."""
    (first, *sums), second = values(run_ranks(without_data, 2))
    assert first == [(3,), (3,)]
    assert sums == list(second[1:])
    assert sums[0] == 2.0
    assert "meta or fake tensors beside real ones" in sums[1]


def refusals(job: Job, calls: list[Callable[[int], Any]]) -> list[str]:
    """Return the errors of calls that are wrong on every rank, with a valid call after each."""
    job.init()
    texts = []
    for call in calls:
        try:
            call(job.size)
            texts.append("nothing")
        except (TypeError, ValueError) as error:
            texts.append(str(error))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == job.size
    return texts


def _expanded(*shape: int) -> torch.Tensor:
    return torch.ones(1).expand(*shape)


def overlap_all_reduce(size: int) -> None:
    dist.all_reduce(_expanded(5))


def overlap_async(size: int) -> None:
    dist.all_reduce(_expanded(5, 2), async_op=True)


def overlap_all_gather(size: int) -> None:
    dist.all_gather([torch.empty(3), *[_expanded(3)] * (size - 1)], torch.ones(3))


def overlap_all_to_all(size: int) -> None:
    dist.all_to_all_single(_expanded(size), torch.ones(size))


def test_overlapping_outputs_are_refused() -> None:
    """An output with several writes to one element is refused before anything is sent, and the group continues."""
    calls = [overlap_all_reduce, overlap_async, overlap_all_gather, overlap_all_to_all]
    for texts in values(run_ranks(refusals, 2, calls)):
        assert all("whose elements share memory" in text for text in texts), texts


def overlapping_inputs(job: Job) -> list[list[float]]:
    """Return results of calls that only read an expanded tensor."""
    job.init()
    one, other = _expanded(3), torch.zeros(3)
    gathered = torch.zeros(3 * job.size)
    dist.all_gather_into_tensor(gathered, one)
    dist.broadcast(one if job.rank == 0 else other, 0)
    summed = torch.ones(3) if job.rank == 0 else one
    dist.reduce(summed, 0)
    outputs = [torch.zeros(3) for _ in range(job.size)] if job.rank == 0 else None
    dist.gather(one, outputs, 0)
    return [gathered.tolist(), other.tolist(), summed.tolist(), *(t.tolist() for t in outputs or ())]


def test_overlapping_inputs_are_read() -> None:
    """A root broadcasts, and the others reduce and gather, from memory that several elements share."""
    first, second = values(run_ranks(overlapping_inputs, 2))
    assert first == [[1.0] * 6, [0.0] * 3, [2.0] * 3, [1.0] * 3, [1.0] * 3]
    assert second == [[1.0] * 6, [1.0] * 3, [1.0] * 3]


def subclasses(job: Job) -> tuple[list[float], str]:
    """Run an all-reduce of a functional collective's result, and of a DTensor."""
    job.init()
    pending = funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    dist.all_reduce(pending)
    sharded = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (job.size,)), [Shard(0)])
    try:
        dist.all_reduce(sharded)
    except TypeError as error:
        return pending.tolist(), str(error)
    return pending.tolist(), "nothing"


def test_tensors_that_wrap_others() -> None:
    """The result of a functional collective is awaited; a DTensor is refused, as with Gloo, and not summed."""
    for total, text in values(run_ranks(subclasses, 2)):
        assert total == [4.0, 4.0]
        assert "got a DTensor" in text


def numbers(job: Job) -> tuple[int, int, list[float]]:
    """Return sequence numbers before and after calls, and a tensor that one call lists twice."""
    job.init()
    group: Any = dist.group.WORLD
    group._set_sequence_number_for_group()
    before = group._get_sequence_number_for_group()
    dist.barrier()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    after = group._get_sequence_number_for_group()
    tensor = torch.ones(2)
    group.allreduce_coalesced([tensor, tensor]).wait()
    return before, after, tensor.tolist()


def test_the_sequence_number_counts_calls() -> None:
    """torch's ``_get_sequence_number_for_group``, equal on all ranks."""
    first, second = values(run_ranks(numbers, 2))
    assert first == second
    assert first[1] == first[0] + 2


def test_a_tensor_listed_twice_is_reduced_once() -> None:
    """As with Gloo, a coalesced all_reduce does not sum a tensor twice."""
    assert [tensor for *_, tensor in values(run_ranks(numbers, 2))] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("module", ["executor", "arguments", "work", "collective_group", "small_calls"])
def test_dynamo_skips_every_function(module: str) -> None:
    """The marks are on the code objects, so also on nested and decorated functions."""
    import importlib

    from ray_fracbackend.ipc.group import observers

    found = {
        code.co_name for code in observers._codes_of(importlib.import_module(f"ray_fracbackend.ipc.group.{module}"))
    }
    expected = {
        "executor": {"run", "_take_turn", "submit"},
        "arguments": {"takes", "decorate", "call"},
        "work": {"wait", "get_future", "outcome", "complete"},
        "collective_group": {"_timeout_s", "shutdown", "allreduce", "run"},
        "small_calls": {"all_reduce", "_prepare"},
    }
    assert expected[module] <= found
