"""NCCL's refusals of ranks that share a GPU, recognised by its own words. Standard library only.

NCCL writes the sentence as a warning to its log and returns ``ncclInvalidUsage`` alone; torch adds the sentence as
"Last error" where it gets hold of it. Sources: init.cc and transport/nvls.cc of the release tags.

===================  ==============================================================================
NCCL                 words
===================  ==============================================================================
to 2.29              ``Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000``
2.30.3, 2.30.4       ``Multiple ranks detected using the same GPU on this node. Set NCCL_MULTI_...``
2.30.7 and newer     ``Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_...``
2.30, NVLS demanded  ``... has been set to "1" and communicator has multiple ranks using the same NVML device``
===================  ==============================================================================
"""

from __future__ import annotations

import re

_REFUSALS = re.compile(
    r"Duplicate GPU detected(?:\s*:\s*rank \d+ and rank \d+ both on CUDA device \w+)?"
    r"|Multiple ranks (?:detected|are) using the same GPU[^.\n;)]*"
    r"|NCCL_NVLS_ENABLE has been set to \"1\" and communicator has multiple ranks[^.\n;)]*",
    re.IGNORECASE,
)
_RANKS = re.compile(r"Duplicate GPU detected\s*:\s*rank (\d+) and rank (\d+)", re.IGNORECASE)
_LAST_ERROR = re.compile(r"^Last error:\s*\n\s*(\S[^\n]*)", re.MULTILINE)


def refusal_in(text: str) -> str | None:
    """NCCL's words that refuse ranks on one GPU, None where the text has none."""
    found = _REFUSALS.search(text)
    return found.group().strip() if found else None


def refused_ranks(text: str) -> tuple[int, ...]:
    """The ranks of the communicator that the sentence names, in ascending order; newer versions name none."""
    found = _RANKS.search(text)
    return tuple(sorted(map(int, found.groups()))) if found else ()


def is_invalid_usage(text: str) -> bool:
    """True where NCCL returned ``ncclInvalidUsage``, with or without a sentence of its own."""
    return "ncclInvalidUsage" in text or ("NCCL" in text and "invalid usage" in text)


def cause_of(error: BaseException) -> str:
    """An error in one line: its first, and NCCL's own last error where torch appended that."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    last = _LAST_ERROR.search(text)
    first = text.splitlines()[0]
    return f"{first}: {last.group(1).strip()}" if last else first
