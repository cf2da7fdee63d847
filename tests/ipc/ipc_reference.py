"""Inputs that every rank can compute for every other, and the correct results of collectives."""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist

Op = dist.ReduceOp.RedOpType

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FLOAT8 = [getattr(torch, n) for n in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, n)]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [getattr(torch, n) for n in ("uint16", "uint32", "uint64") if hasattr(torch, n)]
COMPLEX = [torch.complex64, torch.complex128]
ALL_DTYPES = [*FLOATS, *FLOAT8, *INTEGERS, *UNSIGNED, *COMPLEX, torch.bool]

ARITHMETIC = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX]
BITWISE = [Op.BAND, Op.BOR, Op.BXOR]
# Operations that Gloo itself supports, for a second opinion.
GLOO_DTYPES = [torch.float32, torch.float64, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64]
GLOO_OPS = [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX]

# Name to shape; "strided" is passed transposed. "large" has more than three of the tests' 64 KiB chunks.
SHAPES = {"scalar": (), "empty": (0, 3), "small": (5,), "strided": (4, 3), "large": (50_001,)}


def ops_of(dtype: torch.dtype) -> list[Op]:
    """Return the operations that torch.distributed allows for a dtype and we support."""
    if dtype.is_complex:
        return [Op.SUM, Op.AVG]
    if dtype == torch.bool:
        return [Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, *BITWISE]
    if dtype.is_floating_point:
        return ARITHMETIC
    return [op for op in (*ARITHMETIC, *BITWISE) if op != Op.AVG]


def make(dtype: torch.dtype, shape: str, rank: int, salt: str = "") -> torch.Tensor:
    """Return a rank's input: whole numbers that every dtype represents exactly, so sums do not depend on order."""
    size = SHAPES[shape]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{dtype}{shape}{rank}{salt}".encode()))
    low, high = (0, 2) if dtype == torch.bool else (1, 4)
    data = torch.randint(low, high, size, generator=generator)
    if dtype.is_signed and dtype != torch.bool:
        data = data * torch.where(torch.randint(0, 2, size, generator=generator) > 0, 1, -1)
    if dtype.is_complex:
        tensor = torch.complex(data.double(), data.flip(0).double() if size else data.double()).to(dtype)
    else:
        tensor = data.to(dtype)
    return tensor.t() if shape == "strided" else tensor


def reduced(inputs: list[torch.Tensor], op: Op) -> torch.Tensor:
    """Reduce in wide types, one after the other, and convert at the end."""
    dtype = inputs[0].dtype
    if dtype.is_floating_point and dtype not in (torch.float32, torch.float64):
        return reduced([t.float() for t in inputs], op).to(dtype)
    if dtype in UNSIGNED:
        # Wrap-around modulo 2**bits equals that of the signed type; inputs are small, so the order is also the same.
        return reduced([t.to(torch.int64) for t in inputs], op).to(dtype)
    if dtype == torch.bool:
        return reduced([t.to(torch.int64) for t in inputs], {Op.AVG: Op.SUM}.get(op, op)) != 0
    total = inputs[0].clone()
    for tensor in inputs[1:]:
        total = _FUNCTIONS[op](total, tensor)
    if op == Op.AVG:
        if dtype.is_complex:  # torch passes complex numbers as pairs, so each part is divided
            return torch.view_as_complex(torch.view_as_real(total) / len(inputs))
        return total / len(inputs)
    return total


_FUNCTIONS = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether shape, dtype and bits are equal; `expected` is on the host."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    actual = actual.cpu()
    return torch.equal(actual.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8))
