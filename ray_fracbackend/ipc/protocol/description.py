"""Descriptions of collective calls, which peers compare and print. Imports torch."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch

from .control import DESCRIPTION_BYTES

# The first KEY_BYTES of a description must be equal on all ranks; the rest only appears in messages.
KEY_BYTES = 128


@dataclass(slots=True)
class Terms:
    """The description of a call and its deadline.

    Attributes:
        description: From `describe_call`; its key must be equal on all ranks.
        deadline: Value of `time.monotonic` after which a rank that is still missing counts as lost.
    """

    description: bytes
    deadline: float

    @staticmethod
    def within(description: bytes, timeout_s: float) -> Terms:
        """Return the terms of a call that starts now."""
        return Terms(description, time.monotonic() + timeout_s)

    def left(self) -> timedelta:
        """Return the remaining time; never zero, which would mean that the call sets no timeout."""
        return timedelta(seconds=max(0.001, self.deadline - time.monotonic()))

    def is_late(self) -> bool:
        """Return whether the deadline has passed, or is so close that Gloo (in whole milliseconds) has timed out."""
        return time.monotonic() > self.deadline - 0.01


@lru_cache(maxsize=4096)
def describe_call(
    operation: str,
    dtype: torch.dtype | None = None,
    shape: torch.Size | None = None,
    reduce_op: Any = None,
    root: int | None = None,
) -> bytes:
    """Describe one collective call.

    Two ranks agree if operation (with lists or with one tensor), dtype, reduce operation, root and number of elements are
    equal. Different shapes with the same number of elements agree, as they do for Gloo. `reduce_op` is a ``RedOpType``.

    Returns:
        `DESCRIPTION_BYTES` bytes: `KEY_BYTES` to compare, then text to print.
    """
    numel = "" if shape is None else str(shape.numel())
    dtype_name = "" if dtype is None else str(dtype).removeprefix("torch.")
    op_name = "" if reduce_op is None else reduce_op.name
    kind = re.sub("_into_tensor$|_tensor$|_single$", "", operation)
    key = f"{kind}|{dtype_name}|{numel}|{op_name}|{'' if root is None else root}"
    text = operation
    details = []
    if shape is not None:
        details.append(f"{dtype_name}[{','.join(map(str, shape))}]")
    elif dtype_name:
        details.append(dtype_name)
    if op_name:
        details.append(op_name)
    if root is not None:
        details.append(f"root {root}")
    if details:
        text += f"({', '.join(details)})"
    return _field(key, KEY_BYTES) + _field(text, DESCRIPTION_BYTES - KEY_BYTES)


def _field(text: str, num_bytes: int) -> bytes:
    data = text.encode("ascii", "replace")
    if len(data) > num_bytes:
        # Only a shape with very many dimensions is so long, and shapes are not compared.
        data = data[: num_bytes - 3] + b"..."
    return data.ljust(num_bytes, b"\0")


def through_gloo(terms: Terms) -> Terms:
    """Return the terms of the same call through Gloo; its description differs from a call through shared memory."""
    return _marked(terms, b"G", "through Gloo")


def first_on_device(terms: Terms) -> Terms:
    """Return the terms of the same call on a device that the group must set up first."""
    return _marked(terms, b"D", "on a CUDA device")


def _marked(terms: Terms, mark: bytes, how: str) -> Terms:
    text = f"{description_text(terms.description)} {how}"
    key = terms.description[: KEY_BYTES - 1] + mark
    return Terms(key + _field(text, DESCRIPTION_BYTES - KEY_BYTES), terms.deadline)


@lru_cache(maxsize=4096)
def description_text(description: bytes) -> str:
    """Return the printable part of a description."""
    return description[KEY_BYTES:].rstrip(b"\0").decode("ascii", "replace")


def operation_of(description: bytes) -> str:
    """Return the name of the operation."""
    return description_text(description).partition("(")[0]
