"""Tests of other projects that pass on stock but not on ours, with reasons. No defect of ours is listed here."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection

_BY_NAME = "torch allows monitored_barrier for a group named gloo alone; ipc's own barrier and time-outs name the missing ranks"
_TEXT = "wants Gloo's message and class of error for wrong arguments; ours is a ValueError or TypeError that says what to do"
_SEVERAL = "passes several tensors a rank to one call, a form for several devices a process; ipc refuses it and says so"
_CHECKED = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
    "sparse_allreduce",
)
_WITH_SEVERAL = (
    "allgather_basics",
    "allgather_noncontiguous_input",
    "allreduce_basics",
    "broadcast_basics",
    "sparse_allreduce_basics",
)

# Suite (a shell pattern), test (likewise), reason.
EXPECTED: tuple[tuple[str, str, str], ...] = (
    *(("*", f"*::test_monitored_barrier{end}", _BY_NAME) for end in ("", "_gloo", "_gloo_subgroup")),
    (
        "DistributedTest*",
        "*::test_ddp_logging_data_cpu",
        "looks for gloo_* fields, which DDP's logging has for that name alone",
    ),
    *(("test_c10d_gloo", f"ProcessGroupGlooTest::test_{name}_checks", _TEXT) for name in _CHECKED),
    *(("test_c10d_gloo", f"ProcessGroupGlooTest::test_{name}", _SEVERAL) for name in _WITH_SEVERAL),
    ("test_c10d_common", "*::test_backend_config", "ipc claims CUDA only in a torch that is built with it"),
)


def reason(suite: str, test: str) -> str | None:
    """Return why a test is expected to pass only on stock; None if it is not."""
    return next((line[2] for line in EXPECTED if _is_of(line, suite, test)), None)


def unused(found: Collection[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return lines of `EXPECTED` that match no difference.

    Args:
        found: Suite and test of each difference in a run of all suites.
    """
    return [line for line in EXPECTED if not any(_is_of(line, *each) for each in found)]


def _is_of(line: tuple[str, str, str], suite: str, test: str) -> bool:
    return fnmatch.fnmatchcase(suite, line[0]) and fnmatch.fnmatchcase(test, line[1])
