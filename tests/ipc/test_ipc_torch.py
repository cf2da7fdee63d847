"""PyTorch's own users of a process group: each must work with ipc and have the same results as with Gloo."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ipc_harness import Job, run_ranks, values
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import ray_fracbackend.staged  # noqa: F401 (registers both backends)


class Net(torch.nn.Module):
    """A model with a buffer and a layer that not every input uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.sometimes = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 4)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(x if skip else torch.relu(self.sometimes(x)))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def train(group: dist.ProcessGroup, hook: Any = None, no_sync: bool = False, skip: bool = False, **options: Any) -> Any:
    """Train a new model with DDP for some steps; return its state."""
    torch.manual_seed(0)
    # One bucket with PowerSGD: with several, the order of the collectives in its callbacks would be a race on any backend.
    buckets = 25 if hook is powerSGD_hook.powerSGD_hook else 0.01
    model = DDP(Net(), process_group=group, bucket_cap_mb=buckets, **options)
    if hook is powerSGD_hook.powerSGD_hook:
        model.register_comm_hook(powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2), hook)
    elif hook is not None:
        model.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        with model.no_sync() if no_sync and step % 2 == 0 else contextlib.nullcontext():
            model(batch(dist.get_rank(), step), skip and step % 2 == 0).pow(2).mean().backward()
        if not (no_sync and step % 2 == 0):
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def take_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    for step in range(num_steps):
        model(batch(dist.get_rank(), step)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def bf16_hook(group, bucket):  # type: ignore[no-untyped-def]  (torch compares annotations by identity)
    """torch's hook under another name: torch refuses its name wherever there is no CUDA."""
    return default_hooks.bf16_compress_hook(group, bucket)


DDP_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "find_unused_parameters": {"find_unused_parameters": True, "skip": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "no_sync": {"no_sync": True},
    "fp16 hook": {"hook": default_hooks.fp16_compress_hook},
    "bf16 hook": {"hook": bf16_hook},
    # Its callbacks start further collectives and wait for them.
    "PowerSGD hook": {"hook": powerSGD_hook.powerSGD_hook},
    "allreduce hook": {"hook": default_hooks.allreduce_hook},
}


def ddp_cases(job: Job) -> None:
    """With two ranks a sum has only one order, so the weights are bitwise those of Gloo with all DDP options."""
    job.init()
    gloo = dist.new_group(backend="gloo")
    for name, options in DDP_CASES.items():
        on_ipc, on_gloo = train(dist.group.WORLD, **options), train(gloo, **options)
        assert all(torch.equal(on_ipc[key], on_gloo[key]) for key in on_gloo), name


def ddp_join(job: Job, backend: str) -> dict[str, Any]:
    """Use DDP's join with gradients divided by the number of ranks that still have batches, which the reducer reads from a Work."""
    job.init(backend)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        take_steps(model, optimizer, 2 + dist.get_rank())
    return model.module.state_dict()


def zero_optimizer(job: Job, backend: str) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # late, because it imports all of FSDP

    job.init(backend)
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    take_steps(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return model.module.state_dict()


def fsdp(job: Job, backend: str) -> list[torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    job.init(backend)
    results = []
    for policy in (
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 4))
        mesh = init_device_mesh("cpu", (job.size,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        take_steps(model, optimizer)
        results += [parameter.full_tensor().detach() for parameter in model.parameters()]
    return results


def compiled(job: Job, backend: str) -> list[torch.Tensor]:
    """Run functional collectives inside and outside torch.compile, and steps of a compiled DDP, with and without Dynamo's splitting."""
    job.init(backend)
    group: Any = dist.group.WORLD

    def function(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y, 0, group)
        w = funcol.reduce_scatter_tensor(z + 1, "sum", 0, group)
        return funcol.all_to_all_single(w.repeat(job.size), None, None, group) + funcol.all_reduce(w, "max", group)[0]

    x = torch.arange(4.0) + job.rank
    found = [function(x), torch.compile(function, backend="eager")(x)]
    found += funcol.all_reduce_coalesced([x, x * 3], "sum", group)
    found += funcol.all_gather_into_tensor_coalesced([x, x * 5], group)
    found += funcol.reduce_scatter_tensor_coalesced([x, x * 7], "sum", [0, 0], group)
    found.append(funcol.broadcast(x * (job.rank + 1), 1, group))
    for split in (True, False):
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = split
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        model, optimizer = torch.compile(DDP(net), backend="aot_eager"), torch.optim.SGD(net.parameters(), lr=0.1)
        take_steps(model, optimizer)
        found += [parameter.detach() for parameter in net.parameters()]
    return [tensor + 0 for tensor in found]


FUNCTIONS = [ddp_join, zero_optimizer, fsdp, pytest.param(compiled, marks=pytest.mark.full)]


def check_as_on_gloo(function: Callable[..., Any], backend: str, env: Mapping[str, str] = {}) -> None:
    """Run a function on a backend and on Gloo; the results must be bitwise equal. With two ranks a sum has only one order."""
    ours = values(run_ranks(function, 2, backend, env=env))
    theirs = values(run_ranks(function, 2, "gloo"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_same_results_as_on_gloo(function: Callable[..., Any]) -> None:
    """DDP's join, ZeroRedundancyOptimizer, FSDP2 and functional collectives."""
    check_as_on_gloo(function, "ipc")


def meshes(job: Job) -> None:
    """Use a 2 x 2 mesh, overlapping sub-groups and point to point, which uses Gloo."""
    job.init()
    rank = job.rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    for name, total in (("a", [2.0, 4.0][rank % 2]), ("b", [1.0, 5.0][rank // 2])):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        assert tensor.item() == total
    odd = dist.new_group([1, 3, 0])
    third = torch.tensor([10.0 + rank])
    if rank != 2:
        dist.broadcast(third, src=3, group=odd)
        assert dist.get_backend(odd) == dist.get_backend()
    assert third.item() == (12.0 if rank == 2 else 13.0)
    incoming = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % 4),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % 4),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert incoming.item() == (rank - 1) % 4
    coalesced = [torch.ones(2) * rank, torch.ones(3) * rank]
    with dist._coalescing_manager():
        for tensor in coalesced:
            dist.all_reduce(tensor)
    dist.barrier()
    assert [tensor.tolist() for tensor in coalesced] == [[6.0] * 2, [6.0] * 3]


def odd_uses(job: Job) -> None:
    """Parameters, inference tensors, views, sparse tensors, futures: each behaves as torch's users expect."""
    job.init()
    with torch.inference_mode():
        first = torch.ones(5, dtype=torch.bfloat16)
        dist.all_reduce(first)
    half = torch.full((5,), 2.0, dtype=torch.bfloat16)
    dist.all_reduce(half)  # with the scratch memory and the buffers of the call before
    assert first.tolist() + half.tolist() == [2.0] * 5 + [4.0] * 5
    leaf = torch.nn.Parameter(torch.full((3,), float(job.rank)))
    dist.all_reduce(leaf)
    assert (leaf.tolist(), leaf.requires_grad) == ([1.0] * 3, True)
    with torch.inference_mode():
        frozen = torch.full((3,), float(job.rank))
    dist.all_reduce(frozen)
    dist.all_reduce(frozen, async_op=True).wait()
    assert frozen.tolist() == [2.0] * 3
    view = torch.zeros(4, 4)
    dist.all_reduce(view[:, 1].add_(1.0))
    assert (view[:, 1].tolist(), view.sum()) == ([2.0] * 4, 8.0)
    scaled = torch.ones(2)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5 + job.rank))
    assert scaled.tolist() == [2.0] * 2
    for wrong in (dist.ReduceOp.BAND, dist.ReduceOp.BXOR):
        with pytest.raises(ValueError, match="float32"):
            dist.all_reduce(torch.ones(2), wrong)
    sparse = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [0.0, 2.0, 0.0]
    works = [dist.all_reduce(torch.full((2,), float(i)), async_op=True) for i in range(50)]
    for i, work in reversed(list(enumerate(works))):
        work.wait()
        assert work.result()[0].tolist() == [2.0 * i] * 2

    def more(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return dist.all_reduce(tensor, async_op=True).get_future().then(nested).wait()

    def nested(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    for _ in range(5):
        chained = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(more)
        assert chained.wait().tolist() == [16.0] * 2
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    dist.all_reduce(torch.ones(2))


def crossed_order(job: Job) -> None:
    """As with Gloo, asynchronous calls on two groups, in another order on each rank, do not wait for each other."""
    job.init()
    tensors = [torch.ones(3), torch.ones(3) * 2]
    order = list(zip([dist.new_group(), dist.new_group()], tensors, strict=True))
    works = [dist.all_reduce(t, group=group, async_op=True) for group, t in order[:: -1 if job.rank else 1]]
    for work in works:
        work.wait(timeout=None)
    assert [tensor[0].item() for tensor in tensors] == [2.0, 4.0]


# Uses of a group, with their numbers of ranks. They also run on fake devices.
USES = {ddp_cases: 2, meshes: 4, odd_uses: 2, crossed_order: 2}


@pytest.mark.parametrize("use", USES)
def test_uses(use: Callable[[Job], None]) -> None:
    """DDP and its hooks, meshes, unusual tensors, several groups."""
    values(run_ranks(use, USES[use]))


@pytest.mark.full
def test_torchrun_without_ray(tmp_path: Path) -> None:
    """The example trains with torchrun if Ray cannot be imported."""
    root = Path(__file__).parents[2]
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray here')")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    command = [*torchrun, str(root / "examples" / "torchrun_ipc.py")]
    done = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ipc, 2 ranks on ")
    assert float(done.stdout.split("loss ")[1]) < 0.01
