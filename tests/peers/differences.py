"""Tests of others that pass on stock and not on ours, each with the reason. None is here for a defect of ours."""

from __future__ import annotations

import fnmatch

_BY_NAME = "torch allows monitored_barrier for a group named gloo alone; ipc's own barrier and time-outs name the missing ranks"
_TEXT = (
    "wants Gloo's words and class of error for wrong arguments; ours is a ValueError or TypeError that says what to do"
)
_SEVERAL = "passes several tensors a rank to one call, a form for several devices a process; ipc refuses it and says so"

# Suite (a pattern, as of the shell), test (likewise), reason.
EXPECTED: tuple[tuple[str, str, str], ...] = (
    ("*", "*::test_monitored_barrier*", _BY_NAME),
    (
        "DistributedTest*",
        "*::test_ddp_logging_data_cpu",
        "looks for gloo_* fields, which DDP's logging has for that name alone",
    ),
    ("test_c10d_gloo", "ProcessGroupGlooTest::test_*_checks", _TEXT),
    ("test_c10d_gloo", "ProcessGroupGlooTest::test_allgather_basics", _SEVERAL),
    ("test_c10d_gloo", "ProcessGroupGlooTest::test_allgather_noncontiguous_input", _SEVERAL),
    ("test_c10d_gloo", "ProcessGroupGlooTest::test_allreduce_basics", _SEVERAL),
    ("test_c10d_gloo", "ProcessGroupGlooTest::test_broadcast_basics", _SEVERAL),
    ("test_c10d_gloo", "ProcessGroupGlooTest::test_sparse_allreduce_basics", _SEVERAL),
    ("test_c10d_common", "*::test_backend_config", "ipc claims CUDA only in a torch that is built with it"),
)


def reason(suite: str, test: str) -> str | None:
    """Why a test is expected to pass on stock alone; None where it is not."""
    for suites, tests, text in EXPECTED:
        if fnmatch.fnmatchcase(suite, suites) and fnmatch.fnmatchcase(test, tests):
            return text
    return None
