"""PyTorch's own users of a process group: each must work with ipc and have the same results as with Gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ipc_harness import Job, run_ranks, values
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
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
        """Run it."""
        x = torch.relu(self.norm(self.first(x)))
        return self.last(x if skip else torch.relu(self.sometimes(x)))


def batch(rank: int, step: int) -> torch.Tensor:
    """Return a rank's input of a step."""
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


def ddp_cases(job: Job) -> list[str]:
    """Return names of the DDP options with which ipc and Gloo end with different weights."""
    job.init()
    gloo = dist.new_group(backend="gloo")
    different = []
    for name, options in DDP_CASES.items():
        on_ipc, on_gloo = train(dist.group.WORLD, **options), train(gloo, **options)
        if not all(torch.equal(on_ipc[key], on_gloo[key]) for key in on_gloo):
            different.append(name)
    return different


def test_ddp_ends_with_the_same_weights_as_on_gloo() -> None:
    """With two ranks a sum has only one order, so the weights are bitwise equal with all DDP options."""
    for different in values(run_ranks(ddp_cases, 2, limit_s=120)):
        assert different == []


def ddp_join(job: Job) -> dict[str, Any]:
    """Ranks with different numbers of batches use DDP's join."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # late, because it imports all of FSDP

    job.init()
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 4))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with Join([model, optimizer]):
        for step in range(2 + 3 * dist.get_rank()):
            model(batch(dist.get_rank(), step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.module.state_dict()


def test_ddp_join_and_zero_redundancy_optimizer() -> None:
    """With uneven inputs all ranks end with equal weights."""
    states = values(run_ranks(ddp_join, 3, limit_s=120))
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in state)


def ddp_join_by_remaining(job: Job, backend: str) -> dict[str, Any]:
    """Use DDP's join with gradients divided by the number of ranks that still have batches, which the reducer reads from a Work."""
    job.init(backend)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + dist.get_rank()):
            model(batch(dist.get_rank(), step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.module.state_dict()


def test_ddp_join_divides_by_the_ranks_that_remain() -> None:
    """The reducer's C++ waits for a Work that Python no longer references. With two ranks a sum has only one order."""
    on_ipc, on_gloo = (values(run_ranks(ddp_join_by_remaining, 2, backend, limit_s=60)) for backend in ("ipc", "gloo"))
    for ours, theirs in zip(on_ipc, on_gloo, strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def zero_optimizer(job: Job, backend: str) -> dict[str, Any]:
    """Run some steps of a sharded Adam."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # late, because it imports all of FSDP

    job.init(backend)
    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in range(3):
        model(batch(dist.get_rank(), step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    return model.module.state_dict()


def fsdp(job: Job, backend: str) -> list[torch.Tensor]:
    """Run some steps of FSDP2."""
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
        for step in range(3):
            model(batch(job.rank, step)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results += [parameter.full_tensor().detach() for parameter in model.parameters()]
    return results


def compiled(job: Job, backend: str) -> list[torch.Tensor]:
    """Run functional collectives inside and outside torch.compile, and a compiled DDP step."""
    job.init(backend)
    group = dist.group.WORLD

    def function(x: torch.Tensor) -> torch.Tensor:
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y, 0, group)
        w = funcol.reduce_scatter_tensor(z + 1, "sum", 0, group)
        return funcol.all_to_all_single(w.repeat(job.size), None, None, group) + funcol.all_reduce(w, "avg", group)[0]

    if backend == "gloo":  # Gloo has no AVG

        def function(x: torch.Tensor) -> torch.Tensor:
            y = funcol.all_reduce(x * 2, "sum", group)
            z = funcol.all_gather_tensor(y, 0, group)
            w = funcol.reduce_scatter_tensor(z + 1, "sum", 0, group)
            mean = funcol.all_reduce(w, "sum", group) / job.size
            return funcol.all_to_all_single(w.repeat(job.size), None, None, group) + mean[0]

    x = torch.arange(4.0) + job.rank
    eager = function(x)
    fast = torch.compile(function, backend="eager")(x)
    coalesced = funcol.all_reduce_coalesced([x, x * 3], "sum", group)
    gathered = funcol.all_gather_into_tensor_coalesced([x, x * 5], group)
    scattered = funcol.reduce_scatter_tensor_coalesced([x, x * 7], "sum", [0, 0], group)
    moved = funcol.broadcast(x * (job.rank + 1), 1, group)
    torch.manual_seed(0)
    model = torch.compile(DDP(torch.nn.Linear(4, 4)), backend="eager")
    model(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    return [t + 0 for t in [eager, fast, *coalesced, *gathered, *scattered, moved, *grads]]


@pytest.mark.parametrize("function", [zero_optimizer, fsdp, pytest.param(compiled, marks=pytest.mark.full)])
def test_same_results_as_on_gloo(function: Callable[..., Any]) -> None:
    """ZeroRedundancyOptimizer, FSDP2 and functional collectives have exactly the same results on ipc as on Gloo."""
    on_ipc = values(run_ranks(function, 2, "ipc", limit_s=120))
    on_gloo = values(run_ranks(function, 2, "gloo", limit_s=120))
    for ours, theirs in zip(on_ipc, on_gloo, strict=True):
        ours, theirs = (list(x.values()) if isinstance(x, dict) else x for x in (ours, theirs))
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


def meshes_and_objects(job: Job) -> dict[str, Any]:
    """Use a 2 x 2 mesh, overlapping sub-groups, objects, point to point."""
    job.init()
    rank = job.rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    sums = []
    for name in ("a", "b"):
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mesh.get_group(name))
        sums.append(tensor.item())
    odd = dist.new_group([1, 3, 0])
    third = torch.tensor([10.0 + rank])
    if rank != 2:
        dist.broadcast(third, src=3, group=odd)
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank * 1000)})
    listed = [{"from": rank}, rank]
    dist.broadcast_object_list(listed, src=2)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(4)] if rank == 1 else None, src=1)
    gathered = [None] * 4 if rank == 3 else None
    dist.gather_object(rank * rank, gathered, dst=3)
    incoming = torch.empty(1)
    ops = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), (rank + 1) % 4),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % 4),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    coalesced = [torch.ones(2) * rank, torch.ones(3) * rank]
    with dist._coalescing_manager():
        for tensor in coalesced:
            dist.all_reduce(tensor)
    dist.barrier()
    return {
        "sums": sums,
        "third": third.item(),
        "objects": [o["rank"] for o in objects],
        "listed": listed,
        "scattered": scattered,
        "gathered": gathered,
        "incoming": incoming.item(),
        "coalesced": [t.tolist() for t in coalesced],
        "backend": dist.get_backend(),
        "sub-backend": dist.get_backend(odd) if rank != 2 else dist.get_backend(),
    }


def test_meshes_sub_groups_objects_and_point_to_point() -> None:
    """Sub-groups are separate ipc groups, and operations that are not accelerated use Gloo."""
    for rank, result in enumerate(values(run_ranks(meshes_and_objects, 4, limit_s=120))):
        assert result["sums"] == [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]][rank]
        assert result["third"] == (12.0 if rank == 2 else 13.0)
        assert result["objects"] == [0, 1, 2, 3]
        assert result["listed"] == [{"from": 2}, 2]
        assert result["scattered"] == [f"for {rank}"]
        assert result["gathered"] == ([0, 1, 4, 9] if rank == 3 else None)
        assert result["incoming"] == (rank - 1) % 4
        assert result["coalesced"] == [[6.0] * 2, [6.0] * 3]
        assert result["backend"] == result["sub-backend"] == "ipc"


def checkpoint(job: Job, path: str) -> bool:
    """Save a sharded model with torch.distributed.checkpoint and load it into another."""
    import torch.distributed.checkpoint as dcp  # late, because it imports all of FSDP
    from torch.distributed.fsdp import fully_shard

    job.init()
    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(8, 6))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    torch.manual_seed(1)
    other = fully_shard(torch.nn.Linear(8, 6))
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state["model"])
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs)


def test_distributed_checkpoint(tmp_path: Path) -> None:
    """A checkpoint that was saved with ipc loads with ipc."""
    assert values(run_ranks(checkpoint, 2, str(tmp_path / "checkpoint"), limit_s=120)) == [True, True]


def odd_uses(job: Job) -> list[str]:
    """Use tensors and groups as callers do; return what failed."""
    job.init()
    bad = []
    leaf = torch.nn.Parameter(torch.full((3,), float(job.rank)))
    dist.all_reduce(leaf)
    if leaf.tolist() != [1.0] * 3 or not leaf.requires_grad:
        bad.append("parameter")
    with torch.inference_mode():
        frozen = torch.full((3,), float(job.rank))
    for async_op in (False, True):
        work = dist.all_reduce(frozen, async_op=async_op)
        if async_op:
            work.wait()
    if frozen.tolist() != [2.0] * 3:
        bad.append("inference tensor")
    with torch.inference_mode():
        dist.all_reduce(torch.ones(5, dtype=torch.bfloat16))
    half = torch.ones(5, dtype=torch.bfloat16)
    dist.all_reduce(half)
    if half.tolist() != [2.0] * 5:
        bad.append("scratch memory made under inference mode")
    view = torch.zeros(4, 4)
    dist.all_reduce(view[:, 1].add_(1.0))
    if view[:, 1].tolist() != [2.0] * 4 or view.sum() != 8.0:
        bad.append("column of a matrix")
    scaled = torch.ones(2)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5 + job.rank))
    if scaled.tolist() != [2.0] * 2:
        bad.append("PREMUL_SUM")
    for wrong in (dist.ReduceOp.BAND, dist.ReduceOp.BXOR):
        with contextlib.suppress(ValueError):
            dist.all_reduce(torch.ones(2), wrong)
            bad.append("bit operation on floats")
    sparse = torch.tensor([0.0, 1.0, 0.0]).to_sparse()
    dist.all_reduce(sparse)
    if sparse.to_dense().tolist() != [0.0, 2.0, 0.0]:
        bad.append("sparse tensor through Gloo")
    works = [dist.all_reduce(torch.full((2,), float(i)), async_op=True) for i in range(50)]
    works.reverse()
    for i, work in enumerate(works):
        work.wait()
        if work.result()[0].tolist() != [2.0 * (49 - i)] * 2:
            bad.append("works waited for in reverse")
    chained = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(lambda f: f.value()[0] * 5)
    if chained.wait().tolist() != [10.0] * 2:
        bad.append("future chain")

    def more(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return dist.all_reduce(tensor, async_op=True).get_future().then(nested).wait()

    def nested(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    chained = [dist.all_reduce(torch.ones(2), async_op=True).get_future().then(more).wait() for _ in range(5)]
    if [tensor.tolist() for tensor in chained] != [[16.0] * 2] * 5:
        bad.append("collectives inside callbacks")
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
        bad.append("quantized tensor")
    dist.all_reduce(torch.ones(2))
    return bad


def test_odd_tensors_and_uses() -> None:
    """Parameters, inference tensors, views, sparse tensors, futures: each behaves as torch's users expect."""
    for bad in values(run_ranks(odd_uses, 2, limit_s=120)):
        assert bad == []


def crossed_order(job: Job) -> list[float]:
    """Each rank starts asynchronous calls on two groups in a different order."""
    job.init()
    first, second = dist.new_group(), dist.new_group()
    a, b = torch.ones(3), torch.ones(3) * 2
    order = [(first, a), (second, b)]
    if job.rank == 1:
        order.reverse()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in order]
    for work in works:
        work.wait(timeout=None)
    return [a[0].item(), b[0].item()]


def test_groups_may_be_used_in_different_orders() -> None:
    """As with Gloo, asynchronous calls on different groups do not wait for each other."""
    assert values(run_ranks(crossed_order, 2, limit_s=120)) == [[2.0, 4.0]] * 2


@pytest.mark.full
def test_torchrun_without_ray(tmp_path: Path) -> None:
    """The example trains with torchrun if Ray cannot be imported."""
    import subprocess
    import sys

    root = Path(__file__).parents[2]
    (tmp_path / "ray.py").write_text("raise ImportError('there is no Ray here')")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    command = [*torchrun, str(root / "examples" / "torchrun_ipc.py")]
    done = subprocess.run(command, env=environment, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ipc, 2 ranks on ")
    assert float(done.stdout.split("loss ")[1]) < 0.01
