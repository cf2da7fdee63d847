"""Errors that keep nothing alive. Standard library only.

A traceback holds the frames that it went through, and so their local variables: process groups, whose peers would go on
waiting for this rank, and actor handles, whose workers would live on. A frame that holds the error in a variable is a reference
cycle, which only the garbage collector ends. A cleared frame still holds the closure of its function: what is in one has to be
deleted by its owner.
"""

from __future__ import annotations

import traceback
from typing import NoReturn


def raise_from(error: BaseException, cause: BaseException) -> NoReturn:
    """Raise an error that is in no variable of the calling frame: pass an expression.

    Args:
        error: The error to raise.
        cause: What it comes from; the error itself where there is nothing to add.
    """
    try:
        if error is cause:  # an error that is its own cause would send Ray's V1 engine round in circles
            raise error
        raise error from cause
    finally:
        del error, cause


def release_frames(error: BaseException | None) -> None:
    """Clear the local variables of all calls that an error and its causes went through and that have ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
