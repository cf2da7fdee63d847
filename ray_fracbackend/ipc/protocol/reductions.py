"""Element-wise reduction of several ranks' chunks, always in rank order. Used by every rank; imports torch.

Accumulation types: float16, bfloat16 and float8 in float32, complex32 in complex64, everything else in itself.
torch cannot add unsigned integers of 16 to 64 bits: they are reduced as signed integers with the same bits (with the
sign bit flipped before and after MIN and MAX).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch import RedOpType as Op

_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
)
_WIDER: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    **dict.fromkeys(_FLOAT8, torch.float32),
    torch.complex32: torch.complex64,
}
_SIGNED = {
    getattr(torch, f"uint{bits}"): getattr(torch, f"int{bits}")
    for bits in (16, 32, 64)
    if hasattr(torch, f"uint{bits}")
}
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, *_FLOAT8)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, *_SIGNED)

_SUMS = (Op.SUM, Op.AVG, Op.PREMUL_SUM)
_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PREMUL_SUM: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
# The same operations over the rows of a tensor.
_ROW_FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    Op.SUM: torch.sum,
    Op.AVG: torch.sum,
    Op.PREMUL_SUM: torch.sum,
    Op.PRODUCT: torch.prod,
    Op.MIN: torch.amin,
    Op.MAX: torch.amax,
}
# Types that torch does not compute with, and bool, whose sum is a count.
_WITHOUT_ROWS = (*_FLOAT8, torch.complex32, torch.bool)
# No AVG of integers, as in Gloo: their sum may overflow, and such a mean is none of its inputs.
_ALLOWED: dict[torch.dtype, tuple[Any, ...]] = {
    **dict.fromkeys(_FLOATS, (*_SUMS, Op.PRODUCT, Op.MIN, Op.MAX)),
    **dict.fromkeys(_COMPLEX, (*_SUMS, Op.PRODUCT)),
    **dict.fromkeys(_INTEGERS, (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR)),
    torch.bool: (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.BAND, Op.BOR, Op.BXOR),
}


# torch creates a new enum object on each access; comparing and hashing it takes as long as a small copy.
_OPS: dict[int, Any] = {int(op): op for op in Op.__members__.values()}


def plain_op(reduce_op: Any) -> Any:
    """Return the `RedOpType` of a ``ReduceOp`` or of the enum itself; always the same object."""
    return _OPS[int(getattr(reduce_op, "op", reduce_op))]


def scaled(tensor: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """Return a rank's input of a PREMUL_SUM times its factor, computed in the wider type as float8 has no product."""
    wide = tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
    return torch.mul(wide, factor).to(tensor.dtype)


def premul_factor(reduce_op: Any) -> float | torch.Tensor:
    """Return the factor of a PREMUL_SUM, which each rank applies to its own input."""
    factor: float | torch.Tensor = reduce_op.__getstate__()[1]
    return factor.detach() if isinstance(factor, torch.Tensor) else factor


def check_reduces(operation: str, dtype: torch.dtype, op: Any) -> None:
    """Check that `Reduction` supports this operation for an element type.

    Raises:
        ValueError: It does not; the message lists the supported operations.
    """
    allowed = _ALLOWED.get(dtype, ())
    if op not in allowed:
        names = ", ".join(one.name for one in allowed) or "none"
        raise ValueError(f"{operation} cannot reduce {dtype} with {op.name}; supported for this dtype: {names}.")


class Reduction:
    """One operation on one element type.

    Args:
        dtype: Element type of inputs and output.
        op: A ``RedOpType`` that passes `check_reduces`.
        num_ranks: Divisor of AVG.

    Attributes:
        stacks: Whether `reduce_stack` can be used.
    """

    def __init__(self, dtype: torch.dtype, op: Any, num_ranks: int) -> None:
        self.dtype = dtype
        self.op = op
        self._num_ranks = num_ranks
        self._function = _FUNCTIONS[op]
        signed = _SIGNED.get(dtype)
        # Unsigned x and signed (x XOR sign bit) have the same order; other operations give the same bits.
        self._signed = signed
        self._flip = torch.iinfo(signed).min if signed is not None and op in (Op.MIN, Op.MAX) else 0
        self.accumulate_dtype: torch.dtype = _WIDER.get(dtype, dtype)
        self.stacks = op in _ROW_FUNCTIONS and dtype not in _WITHOUT_ROWS
        self._divides = op == Op.AVG
        self._scratch: dict[torch.device, torch.Tensor] = {}

    def _scratch_of(self, numel: int, device: torch.device) -> torch.Tensor:
        # Cached: a new allocation per chunk would cause page faults on every call.
        scratch = self._scratch.get(device)
        if scratch is None or scratch.numel() < numel:
            with torch.inference_mode(False):
                scratch = self._scratch[device] = torch.empty(numel, dtype=self.accumulate_dtype, device=device)
        return scratch[:numel]

    def reduce_stack(self, out: torch.Tensor, stack: torch.Tensor) -> None:
        """Reduce the rows of a tensor in one kernel, on devices; only if `stacks` is true.

        torch chooses the order of a sum's terms, which depends only on the number of rows: up to four are in row order.

        Args:
            out: See `reduce`; must not share memory with `stack`.
            stack: 2-D tensor of `dtype`, with rows of the length of `out`.
        """
        if self._signed is not None:
            out, stack = out.view(self._signed), stack.view(self._signed)
        if self._flip:
            stack = stack ^ self._flip
        # A sum accumulates in the wider type and rounds once. AVG divides before that; not every product rounds once.
        wide = self.op in (Op.AVG, Op.PRODUCT) and self.dtype != self.accumulate_dtype
        total = self._scratch_of(out.numel(), out.device) if wide else out
        function = _ROW_FUNCTIONS[self.op]
        if self.op in (Op.MIN, Op.MAX) and total.dtype != stack.dtype:
            total.copy_(function(stack, 0))
        elif self.op in (Op.MIN, Op.MAX):
            function(stack, 0, out=total)
        else:
            function(stack, 0, dtype=total.dtype, out=total)
        self._store(total, out)

    @property
    def pair_function(self) -> Callable[..., torch.Tensor] | None:
        """The function of torch that does the same as `reduce` for two inputs of `dtype`, as ``function(a, b, out=out)``."""
        plain = self._signed is None and not self._divides
        widens = self.accumulate_dtype != self.dtype and not self._rounds_once(2)
        return self._function if plain and not widens else None

    def _rounds_once(self, num_inputs: int) -> bool:
        """Return whether one operation in the element type has the same result as in the wider type."""
        if self.dtype in _WITHOUT_ROWS:
            return False
        return self.op in (Op.MIN, Op.MAX) or (num_inputs == 2 and not self._divides)

    def reduce(self, out: torch.Tensor, inputs: Sequence[torch.Tensor]) -> None:
        """Reduce `inputs` in the given order.

        Args:
            out: Result, 1-D, of `dtype`. With two inputs it may be one of them; with more it must not overlap any but the first
                two.
            inputs: At least one tensor of `dtype` and of the length of `out`.
        """
        if self._signed is not None:
            out, inputs = out.view(self._signed), [tensor.view(self._signed) for tensor in inputs]
        if self._flip:
            inputs = [tensor ^ self._flip for tensor in inputs]
        widen = self.accumulate_dtype != self.dtype and not self._rounds_once(len(inputs))
        total = self._scratch_of(out.numel(), out.device) if widen else out
        if len(inputs) == 1 or widen:
            total.copy_(inputs[0])
            rest = inputs[1:]
        else:
            self._function(inputs[0], inputs[1], out=total)
            rest = inputs[2:]
        for tensor in rest:
            self._accumulate(total, tensor, widen)
        self._store(total, out)

    def _store(self, total: torch.Tensor, out: torch.Tensor) -> None:
        """Store the result in `out`: undo the sign flip, and divide for AVG."""
        if self._flip:
            total.bitwise_xor_(self._flip)
        self.finish(total)
        if total is not out:
            out.copy_(total)

    def _accumulate(self, total: torch.Tensor, tensor: torch.Tensor, widen: bool) -> None:
        if widen and (self._function is not torch.add or tensor.dtype in _FLOAT8):
            tensor = tensor.to(self.accumulate_dtype)
        self._function(total, tensor, out=total)

    def finish(self, total: torch.Tensor) -> None:
        """Divide a complete sum for AVG, in place; no effect for other operations."""
        if not self._divides:
            return
        if total.is_complex():
            total = torch.view_as_real(total)
        # For a Python number, CUDA multiplies by the reciprocal, which rounds differently from a division.
        total.div_(
            self._num_ranks if total.is_cpu else torch.full((), self._num_ranks, dtype=total.dtype, device=total.device)
        )
