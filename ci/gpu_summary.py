"""The answers of a run of ci/gpu.sh in ten lines, from its rows. Nothing here runs anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_SMALL, _LARGE = 64 << 10, 25 << 20


def summary(rows: Rows) -> list[str]:
    """Return one line for each question of docs/development/gpu-runs.md."""
    return [f"{question}: {answer(rows) or 'no answer'}" for question, answer in _QUESTIONS.items()]


def _machine(rows: Rows) -> str:
    tails = [row["output_tail"] for row in rows if row.get("event") == "ended" and row["step"] == "imports"]
    found = next((json.loads(line)["found"] for tail in tails for line in tail.splitlines() if line[:1] == "{"), {})
    names = ("gpus", "torch", "cuda", "nccl", "ray", "python")
    return ", ".join(f"{name} {found[name]}" for name in names if found.get(name))


def _tests(step: str) -> Callable[[Rows], str]:
    def answer(rows: Rows) -> str:
        own = [row for row in rows if row.get("script") == step]
        outcomes = {row["test"].partition("::")[2]: row["outcome"] for row in own if "test" in row}
        others = [f"{test} {outcome}" for test, outcome in outcomes.items() if outcome != "passed"]
        collected = max((row.get("num_collected", 0) for row in own), default=0)
        passed = f"{len(outcomes) - len(others)} of {collected} tests passed"
        return ", ".join([passed, *others]) if outcomes else ""

    return answer


def _probe(rows: Rows, question: str) -> dict[str, Any]:
    """Return the answers of both processes in one."""
    found: dict[str, Any] = {}
    for row in rows:
        if row.get("question") == question:
            found |= row
    return found


def _memory(rows: Rows) -> str:
    memory, copies, killed = (_probe(rows, question) for question in ("memory", "copy", "killed"))
    told = {
        "right": memory.get("is_right"),
        "opened in us": memory.get("open_us"),
        "words": _probe(rows, "identity").get("has_timelines"),
        "copy of 64 MiB, us": copies.get("copy_idle_us"),
        "beside kernels": copies.get("copy_beside_kernels_us"),
        "a stream behind a killed process comes free": killed.get("comes_free"),
        "by the host": killed.get("comes_free_by_the_host"),
        "failed": memory.get("failed") or killed.get("failed"),
    }
    return _join((name, value) for name, value in told.items() if value is not None)


def _handoff(rows: Rows) -> str:
    words = _probe(rows, "semaphore")
    found = [
        (f"words in {where} memory", words.get(name))
        for where, name in (("device", "hop_us"), ("host", "hop_in_host_memory_us"))
    ]
    found += [(_case(row, "way"), row["median_us"]) for row in rows if "median_us" in row and row["num_ranks"] == 2]
    return _join((name, value) for name, value in found if value is not None)


def _all_reduce(num_bytes: int) -> Callable[[Rows], str]:
    def answer(rows: Rows) -> str:
        found = {_case(row, "backend"): row["median_ms"] for row in _reduced(rows, num_bytes) if row["num_ranks"] == 2}
        own = [row for row in rows if row.get("script") == "gpu_all_reduce" and row["num_ranks"] == 2]
        failed = {_case(row, "backend"): row["failed"] for row in own if "failed" in row}
        return _join([*found.items(), *(failed.items() if num_bytes == _SMALL else ())])

    return answer


def _reduced(rows: Rows, num_bytes: int) -> list[Mapping[str, Any]]:
    wanted = {"operation": "all_reduce", "dtype": "float32", "num_bytes": num_bytes}
    return [row for row in rows if "median_ms" in row and wanted.items() <= row.items()]


def _auto(rows: Rows) -> str:
    """Return the backend by the rule of the page: the fastest at 25 MiB that is no slower than Gloo at 64 KiB."""
    small, large = (
        {row["backend"]: row["median_ms"] for row in _reduced(rows, size) if row["num_ranks"] == 2 and not row["mps"]}
        for size in (_SMALL, _LARGE)
    )
    fit = [name for name in ("ipc", "staged", "gloo") if name in large and small.get(name, 1e9) <= small.get("gloo", 0)]
    return min(fit, key=large.__getitem__) if fit else ""


def _ddp(rows: Rows) -> str:
    found = [row for row in rows if "samples_per_s" in row and row["num_ranks"] <= 2]
    return _join(
        (f"{_case(row, 'backend')} {row['model']} {row['how']} {row['num_ranks']}", row["samples_per_s"])
        for row in found
    )


def _case(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]}{' under MPS' if row.get('mps') else ''}"


def _join(pairs: Iterable[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in pairs)


_QUESTIONS: dict[str, Callable[[Rows], str]] = {
    "machine": _machine,
    "trains to the losses of one process": _tests("trains"),
    "ipc and staged are right": _tests("right"),
    "memory of another process": _memory,
    "hand-off, us": _handoff,
    "all_reduce of 64 KiB, 2 ranks, ms": _all_reduce(_SMALL),
    "all_reduce of 25 MiB, 2 ranks, ms": _all_reduce(_LARGE),
    "backend by the rule": _auto,
    "samples per second": _ddp,
    "memory cap": _tests("memory_cap"),
}
