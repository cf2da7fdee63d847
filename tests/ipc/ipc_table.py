"""The table of every collective, element type, reduce operation and shape, on any device, against a reference on the host."""

from __future__ import annotations

from collections.abc import Callable

import ipc_reference as ref
import torch
import torch.distributed as dist
from ipc_harness import Job, rank_device
from ipc_reference import Op, make, reduced, same

import ray_fracbackend.ipc  # noqa: F401 (registers the backend)

Group = dist.ProcessGroup
SMALL_CHUNKS = {
    "RAY_FRACBACKEND_IPC_CHUNK_BYTES": "65536",
    "RAY_FRACBACKEND_IPC_DEVICE_CHUNK_BYTES": "65536",
    "RAY_FRACBACKEND_IPC_DEVICE_ONE_PASS_BYTES": "16384",
}


def own(dtype: torch.dtype, shape: str, salt: str = "") -> torch.Tensor:
    """This rank's input, on the device."""
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
    """Every rank's input."""
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
    """All ranks' inputs, reduced."""
    return reduced([make(dtype, shape, r) for r in range(dist.get_world_size())], op)


def expect_scattered(dtype: torch.dtype, op: Op, shape: str, root: int) -> torch.Tensor:
    """All ranks' parts for this rank, reduced."""
    return reduced([make(dtype, shape, r, str(dist.get_rank())) for r in range(dist.get_world_size())], op)


REDUCERS: dict[str, tuple[Callable[..., torch.Tensor | None], Callable[..., torch.Tensor | None]]] = {
    "all_reduce": (run_all_reduce, expect_reduced),
    "reduce": (run_reduce, lambda d, o, s, root: expect_reduced(d, o, s, root) if dist.get_rank() == root else None),
    "reduce_scatter": (run_reduce_scatter, expect_scattered),
    "reduce_scatter_tensor": (run_reduce_scatter_single, expect_scattered),
}


def ways(size: int, number: int) -> list[bool]:
    """Values of async_op: both in small worlds, alternating from case to case in large ones, which are slow here."""
    return [False, True] if size < 4 else [bool(number % 2)]


def check_movers(gloo: Group | None, dtypes: list[torch.dtype]) -> list[str]:
    """Failures of the collectives that only copy, over element types, shapes and both kinds of call."""
    bad = []
    size = dist.get_world_size()
    for place, (name, (run, expect)) in enumerate(MOVERS.items()):
        for dtype in dtypes:
            for number, shape in enumerate(ref.SHAPES, place):
                root = (number + len(shape)) % size
                expected = expect(dtype, shape, root)
                for async_op in ways(size, number):
                    actual = run(dist.group.WORLD, dtype, shape, root, async_op)
                    if len(actual) != len(expected) or not all(map(same, actual, expected)):
                        bad.append(f"{name} {dtype} {shape} root {root} async {async_op}")
                # Gloo has no all_to_all of lists.
                if gloo and dtype in (torch.float32, torch.int64) and shape == "small" and name != "all_to_all":
                    second = run(gloo, dtype, shape, root, False)
                    if not all(map(same, second, expected)):
                        bad.append(f"Gloo disagrees with the reference: {name} {dtype} {shape}")
    return bad


def check_reducers(gloo: Group | None, dtypes: list[torch.dtype]) -> list[str]:
    """Failures of the reducing collectives, over element types, operations, shapes and both kinds of call."""
    bad = []
    size = dist.get_world_size()
    for place, (name, (run, expect)) in enumerate(REDUCERS.items()):
        for dtype in dtypes:
            for op in ref.ops_of(dtype):
                # torch lets complex through only here.
                if dtype.is_complex and name != "all_reduce":
                    continue
                for number, shape in enumerate(ref.SHAPES, place + op.value):
                    root = (number + len(shape)) % size
                    expected = expect(dtype, op, shape, root)
                    for async_op in ways(size, number):
                        actual = run(dist.group.WORLD, dtype, op, shape, root, async_op)
                        if expected is not None and (actual is None or not same(actual, expected)):
                            bad.append(f"{name} {dtype} {op.name} {shape} root {root} async {async_op}")
                    bad += check_gloo(gloo, name, run, dtype, op, shape, root, expected)
    return bad


def check_gloo(gloo, name, run, dtype, op, shape, root, expected) -> list[str]:  # type: ignore[no-untyped-def]
    """Ask Gloo for the same, where it can, on shapes small enough to be quick."""
    if gloo is None or dtype not in ref.GLOO_DTYPES or op not in ref.GLOO_OPS or shape in ("empty", "large"):
        return []
    if shape == "strided":
        return []  # Gloo refuses or misreads some of these; the reference is enough
    actual = run(gloo, dtype, op, shape, root, False)
    if expected is not None and not same(actual, expected):
        return [f"Gloo disagrees with the reference: {name} {dtype} {op.name} {shape}"]
    return []


def whole_table(job: Job, dtypes: list[torch.dtype]) -> list[str]:
    """Run every case on this rank and return those that failed."""
    job.init()
    gloo = dist.new_group(backend="gloo") if rank_device().type == "cpu" else None
    bad = check_movers(gloo, dtypes) + check_reducers(gloo, dtypes)
    reason = dist.group.WORLD._device_side.gloo_reason
    bad += [f"Gloo carried it: {reason}"] if reason else []
    dist.barrier()
    dist.destroy_process_group()
    return bad
