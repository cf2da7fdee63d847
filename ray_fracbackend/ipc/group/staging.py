"""Tensors of any layout as flat memory, and back. Imports torch."""

from __future__ import annotations

import torch


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor` in row-major order, 1-D: a view where its memory is laid out so, else a copy."""
    # Not detach(): what is written to that raises the version of the caller's tensor, which Gloo and NCCL leave alone.
    tensor = tensor.data
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(-1) if tensor.is_contiguous() else tensor.contiguous().view(-1)


class Output:
    """Flat memory for a result, and the tensor that finally receives it.

    Args:
        tensor: The caller's tensor, any layout.
        load: Whether the flat memory must start with the tensor's elements.

    Attributes:
        flat: 1-D, same dtype; shares the tensor's memory where its layout allows.
    """

    def __init__(self, tensor: torch.Tensor, *, load: bool = False) -> None:
        tensor = tensor.data  # as in `flat`
        self._tensor = tensor
        self._direct = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if self._direct:
            self.flat = tensor.view(-1)
        elif load:
            self.flat = flat(tensor)
        else:
            self.flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)

    def store(self) -> None:
        """Copy the flat memory into the caller's tensor, unless they are the same."""
        if not self._direct:
            self._tensor.copy_(self.flat.view(self._tensor.shape))
