"""A progress bar for commands: on terminals, where tqdm is installed, after two seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_DELAY_S = 2.0


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """Draws a bar on standard error while the block runs.

    Args:
        total: Steps in all.
        what: What is being done.

    Yields:
        A function to call with the number of steps that are done.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda done: None
        return
    with tqdm(total=total, desc=what, disable=None, delay=_DELAY_S, leave=False) as bar:

        def show(done: int) -> None:
            bar.update(done - bar.n)

        yield show
