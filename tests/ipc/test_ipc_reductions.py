"""Arithmetic of every element type, on tensors of any device, and factors of PREMUL_SUM."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ipc_calls import Watching, bare_group, options
from ipc_harness import Job, on_ranks

from ray_fracbackend.ipc._torch import RedOpType as Op
from ray_fracbackend.ipc.protocol import reductions
from ray_fracbackend.ipc.protocol.reductions import Reduction, plain_op

FLOAT8 = [dtype for dtype in reductions._FLOAT8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", list(reductions._ALLOWED), ids=str)
def test_a_reduction_stays_on_the_device_of_its_tensors(dtype: torch.dtype, num_ranks: int) -> None:
    """Here the meta device, which refuses to work with any other, also if the sum has another type."""
    for op in reductions._ALLOWED[dtype]:
        reduction = Reduction(dtype, op, num_ranks)
        out = torch.empty(8, dtype=dtype, device="meta")
        inputs = [torch.empty_like(out) for _ in range(num_ranks)]
        reduction.reduce(out, inputs)
        if reduction.stacks:
            reduction.reduce_stack(out, torch.stack(inputs))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", list(reductions._ALLOWED), ids=str)
def test_all_rows_at_once_equal_one_after_the_other(dtype: torch.dtype, num_ranks: int) -> None:
    """The results are bitwise equal for up to four ranks, whose order is fixed: rounded once, with NaNs, and with unsigned numbers."""
    numbers = torch.Generator().manual_seed(num_ranks)
    raw = torch.randint(0, 256, (num_ranks, 4096 * dtype.itemsize), dtype=torch.uint8, generator=numbers)
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        stack = (torch.randn(num_ranks, 4096, generator=numbers, dtype=kind) * 3).to(dtype)
    else:
        stack = raw.view(dtype)
    for op in reductions._ALLOWED[dtype]:
        reduction = Reduction(dtype, op, num_ranks)
        if reduction.stacks:
            found, expected = torch.empty_like(stack[0]), torch.empty_like(stack[0])
            reduction.reduce_stack(found, stack)
            reduction.reduce(expected, list(stack))
            assert torch.equal(as_numbers(found), as_numbers(expected)), op


def as_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in which two NaNs are equal."""
    return tensor.contiguous().view(torch.uint8)


def test_two_of_a_narrow_type_are_rounded_once() -> None:
    """An operation of bfloat16 itself computes in float32: no wider copy is created."""
    one, other = (torch.randn(4096).to(torch.bfloat16) for _ in range(2))
    for op, exact in ((Op.SUM, one.float() + other.float()), (Op.PRODUCT, one.float() * other.float())):
        reduction, out = Reduction(torch.bfloat16, op, 2), torch.empty_like(one)
        reduction.reduce(out, [one, other])
        assert torch.equal(out, exact.to(torch.bfloat16))
        assert not reduction._scratch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_mean_on_a_device_is_divided_by_a_number_of_the_device(dtype: torch.dtype) -> None:
    """CUDA multiplies by the reciprocal of a host number, which rounds differently from the division of the CPU."""
    out = torch.empty(8, dtype=dtype, device="meta")
    with Watching() as mode:
        Reduction(dtype, Op.AVG, 3).reduce(out, [torch.empty_like(out) for _ in range(3)])
    (divisor,) = [args[1] for function, args in mode.seen if function.overloadpacket is torch.ops.aten.div_]
    assert (divisor.device, divisor.dtype) == (out.device, torch.float32)


def test_one_reduction_serves_several_devices() -> None:
    """It keeps data for the next call separately for each device."""
    reduction = Reduction(torch.bfloat16, Op.SUM, 2)
    for device in ("cpu", "meta", "cpu"):
        out = torch.empty(4, dtype=torch.bfloat16, device=device)
        reduction.reduce(out, [torch.ones_like(out), torch.ones_like(out)])
    assert out.tolist() == [2.0] * 4


def test_an_operation_may_be_the_enum_or_wrapped() -> None:
    """torch treats both as instances of ReduceOp."""
    assert plain_op(Op.SUM) == plain_op(dist.ReduceOp(Op.SUM)) == Op.SUM


@on_ranks(3, limit_s=60)
def test_a_nan_is_everywhere_after_min_and_max(job: Job) -> None:
    """Whichever rank has it."""
    pg = bare_group(job, "nan", job.rank, job.size, 20.0)
    for without in range(job.size):
        for op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            tensor = torch.full((3,), math.nan if job.rank == without else float(job.rank))
            pg.allreduce([tensor], options("Allreduce", reduceOp=op)).wait()
            assert bool(tensor.isnan().all()), (without, op)


@on_ranks(2, limit_s=60)
def test_factors_of_every_kind_are_multiplied_by(job: Job) -> None:
    """float8 has no product of its own, and a factor that requires a gradient is treated as a number."""
    pg = bare_group(job, "factors", job.rank, job.size, 20.0)
    factors = [(dtype, 2.0) for dtype in FLOAT8] + [(torch.float32, torch.tensor(2.0, requires_grad=True))] * 2
    for dtype, factor in factors:
        tensor = torch.full((4,), float(job.rank + 1)).to(dtype)
        pg.allreduce([tensor], options("Allreduce", reduceOp=dist._make_nccl_premul_sum(factor))).wait()
        output, parts = torch.empty(1).to(dtype), torch.full((job.size,), float(job.rank + 1)).to(dtype)
        scatter = options("ReduceScatter", reduceOp=dist._make_nccl_premul_sum(factor))
        pg.reduce_scatter_single(output, parts, scatter).wait()
        assert [*tensor.float().tolist(), *output.float().tolist()] == [6.0] * 5, dtype
