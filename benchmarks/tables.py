"""Write the newest results into the pages that quote them. usage: python benchmarks/tables.py [--check]

A page has ``<!-- numbers: NAME -->`` before such a text and ``<!-- end -->`` after it; NAME is a key of TEXTS. The
comment may start a line only before a table, because Markdown does not format the rest of such a line.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from common import RESULTS, machine_of, newest

sys.path.append(str(RESULTS.parents[1]))

from benchmarks.ipc import COLD, COLLECTIVES, STEPS
from benchmarks.ipc.figure import added, medians, quotient
from tests.faults.cases import Case, cases

ROOT = RESULTS.parents[1]
DOCS = ROOT / "docs"
PAGES = (
    ROOT / "README.md",
    DOCS / "ipc.md",
    DOCS / "staged.md",
    *(DOCS / "development" / f"{name}.md" for name in ("faults", "ipc-design", "test-suites")),
)
_MARKED = re.compile(r"(<!-- numbers: ([\w ]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
_LONGEST = 200
# Backends of a cold call, by their name in a table.
_COLD = {"gloo": "Gloo", "ipc": "ipc", "gloo_async": "Gloo async", "ipc_async": "ipc async", "deepspeed": "DeepSpeed"}


def newest_result(kind: str) -> tuple[str, Any]:
    """Return name and content of the newest result of a kind."""
    path = newest(kind)
    if path is None:
        raise FileNotFoundError(f"no {kind} result in {RESULTS}")
    return path.name, json.loads(path.read_text())


def three_digits(value: float) -> str:
    """``0.029``, ``2.64``, ``21``."""
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def size_text(num_bytes: float) -> str:
    """``64 KiB``, ``25 MiB``."""
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"


def table(columns: list[str], rows: list[list[str]]) -> str:
    head, *lines = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return "\n\n" + "\n".join([head, "|" + "---|" * len(columns), *lines]) + "\n\n"


def start() -> str:
    """Return the duration of a start with two workers, with stock beside it."""
    _, result = newest_result("start_v2")
    rows = result["rows"]["new processes"]
    seconds = next(row["median_s"] for row in rows if row["num_workers"] == 2)
    return f"Starting a group took {seconds['ours'] * 1e3:.0f} ms (stock {seconds['stock'] * 1e3:.0f})"


def ipc_rows(operations: tuple[str, ...], num_ranks: int, busy: int = 0) -> dict[tuple[str, int], dict[str, float]]:
    """Return median milliseconds by backend, by operation and size, in the order of measurement."""
    found = medians(newest_result("ipc")[1]["rows"])
    return {
        (name, size): by for (name, *of, size), by in found.items() if name in operations and of == [num_ranks, busy]
    }


def ipc_setting(kind: str = "ipc") -> str:
    """Return the machine and settings of an ipc measurement."""
    name, result = newest_result(kind)
    machine = machine_of(result)
    open_mpi = result.get("open_mpi") or machine.get("open_mpi")
    mpi = f", {open_mpi.split('(')[-1].replace(')', '')}" if open_mpi else ""
    return (
        f"`benchmarks/results/{name}`: {machine['num_cpus']} cores of {machine['cpu']}, torch {machine['torch']}{mpi}, "
        f"{result['settings']['dtype']}, {result['settings']['starts']} starts of {result['settings']['rounds']} rounds"
    )


def ipc_collectives(num_ranks: int) -> str:
    """Return a table of every collective, with Gloo, Open MPI and a plain copy."""
    rows = []
    for (operation, size), ms in ipc_rows(COLLECTIVES, num_ranks).items():
        ratios = [("gloo", "ipc", 1), ("open_mpi", "ipc", 2), ("ipc", "copy", 2)]
        rows.append(
            [
                operation,
                size_text(size),
                *(
                    three_digits(ms[backend]) if backend in ms else "-"
                    for backend in ("ipc", "gloo", "open_mpi", "copy")
                ),
                *(f"{ms[a] / ms[b]:.{digits}f}" if a in ms and b in ms else "-" for a, b, digits in ratios),
            ]
        )
    columns = [
        "operation",
        "size",
        "ipc",
        "Gloo",
        "Open MPI",
        "plain copy",
        "Gloo / ipc",
        "Open MPI / ipc",
        "ipc / copy",
    ]
    return table(columns, rows)


def checkouts_setting() -> str:
    """Return the machine and the two commits of the newest comparison."""
    name, result = newest_result("checkouts")
    machine = machine_of(result)
    return (
        f"`benchmarks/results/{name}`: {machine['num_cpus']} cores of {machine['cpu']}, torch {machine['torch']}, "
        f"commit {result['old']} and commit {result['new']}"
    )


def checkouts() -> str:
    """Return a table of the newest comparison of two commits."""
    rows = []
    for row in newest_result("checkouts")[1]["rows"]:
        *words, last, unit = row["case"].replace(",", "").split()
        name = f"{' '.join(words)}, {size_text(int(last))}" if unit == "bytes" else row["case"]
        rows.append([name, *(three_digits(row[key]) for key in ("old_ms", "new_ms")), f"{row['new_over_old']:.2f}"])
    return table(["case", "before", "after", "after / before"], rows)


def ipc_busy(kind: str, *operations: str) -> str:
    """Return operations beside endless loops: times, and Gloo's time divided by ipc's."""
    found = medians(newest_result(kind)[1]["rows"])
    loops = sorted({busy for _, _, busy, _ in found})
    rows = []
    for operation, num_ranks, busy, size in sorted(found, key=lambda case: case[1]):
        if operation not in operations or busy != loops[0]:
            continue
        cells = [found[case] for of in loops if (case := (operation, num_ranks, of, size)) in found]
        quotients = [
            f"{three_digits(ms['ipc'])} / {three_digits(ms['gloo'])}: {ms['gloo'] / ms['ipc']:.1f}" for ms in cells
        ]
        rows.append([str(num_ranks), operation, size_text(size), *quotients, *["-"] * (len(loops) - len(cells))])
    return table(["ranks", "operation", "size", *map(loops_text, loops)], rows)


def loops_text(busy: int) -> str:
    """``quiet``, ``1 loop``, ``2 loops``."""
    return "quiet" if busy == 0 else f"{busy} loop{'s' if busy > 1 else ''}"


def ipc_steps() -> str:
    """Return training steps on a quiet machine, and what the exchange adds to the same step without communication."""
    rows = []
    for (step, num_ranks, busy, size), ms in medians(newest_result("ipc_training")[1]["rows"]).items():
        if step in STEPS and busy == 0:
            more = added(ms)
            times = [ms["ipc"], ms["gloo"], ms["none"], more["ipc"], more["gloo"]]
            copies = three_digits(more["copies"]) if "copies" in more else "-"
            name = {"ddp_step": "DDP", "fsdp_step": "FSDP2"}[step]
            line = [str(num_ranks), name, size_text(size), *map(three_digits, times), copies]
            rows.append([*line, quotient(more["gloo"], more["ipc"])])
    columns = [
        "ranks",
        "step",
        "parameters",
        "ipc",
        "Gloo",
        "no communication",
        "ipc adds",
        "Gloo adds",
        "copies alone add",
    ]
    return table([*columns, "Gloo adds / ipc adds"], rows)


def ipc_cold() -> str:
    """Return the microseconds that an all_reduce adds to a program that computes before it."""
    result = newest_result("ipc_training")[1]
    rows = []
    for (operation, num_ranks, busy, size), ms in medians(result["rows"]).items():
        if operation == COLD:
            cells = [f"{added(ms)[name] * 1e3:.0f}" if name in ms else "-" for name in _COLD]
            rows.append([str(num_ranks), loops_text(busy), size_text(size), f"{ms['none'] * 1e3:.0f}", *cells])
    return table(["ranks", "machine", "size", "computing", *_COLD.values()], rows)


def ipc_others(num_ranks: int) -> str:
    """Return the largest share of the machine that other processes used in a round."""
    shares = [row["others"] for row in newest_result("ipc")[1]["rows"] if row["num_ranks"] == num_ranks]
    return f"{max(shares) * 100:.0f}%"


def ipc_demo() -> str:
    """Return an epoch of the demo by backend."""
    name, result = newest_result("ipc_demo")
    ipc, gloo = (result["median_s"][backend] * 1e3 for backend in ("ipc", "gloo"))
    return (
        f"{ipc:.0f} ms with ipc and {gloo:.0f} ms with Gloo, a ratio of {gloo / ipc:.2f} (`benchmarks/results/{name}`)"
    )


def faults_setting() -> str:
    """Return the machine and timeouts of the failing starts."""
    name, result = newest_result("faults")
    where = result["environment"]
    loads = [cell["load"] for cell in result["cells"] if "load" in cell]
    return (
        f"`benchmarks/results/{name}`: {where['num_cpus']} cores of {where['cpu']}, Ray {where['ray']}, torch {where['torch']}, "
        f"load average {min(loads):.0f} to {max(loads):.0f}, {len(loads)} runs; {result['num_workers']} CPU workers, `start_timeout_s`, `timeout_s` and "
        f"TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S at {result['timeout_s']:g} s"
    )


def faults_rows() -> list[tuple[list[str], dict[str, Any]]]:
    """Return step, fault and conditions of each case, and its cells by engine."""
    rows: dict[Case, dict[str, Any]] = {case: {} for case in cases()}
    names = [field.name for field in fields(Case)]
    for cell in newest_result("faults")[1]["cells"]:
        rows[Case(**{name: cell[name] for name in names})][cell["engine"]] = cell
    return [([case.step, case.fault or "-", case.conditions], row) for case, row in rows.items()]


def fault_seen(cell: Any, limit_s: float) -> str:
    """``VerificationError, rank 1, 0.3 s``: the error, the seconds from the fault to the end of ``fit()``, and the starts if not one."""
    if "why_not" in cell:
        return f"- ({cell['why_not']})"
    seen = cell["seen"]
    if seen is None or "starts" not in seen:
        return f"no end in {limit_s:g} s"
    error = seen["error"]
    found = [error["cause_class"] if error else "trained"]
    if error and error["ranks"]:
        found.append(f"rank{'s' * (len(error['ranks']) > 1)} {', '.join(map(str, error['ranks']))}")
    elif not error and seen["trained"] != [2]:
        found.append("one worker")
    found.append(f"{seen['fault_s']:.{0 if seen['fault_s'] >= 10 else 1}f} s")
    if seen["starts"] != 1:
        found.append(f"{seen['starts']} starts")
    if error and seen["trained"]:
        found.append("then trained")
    found += [f"left: {', '.join(sorted({first_word(name) for name in seen['left']}))}"] if seen["left"] else []
    return ", ".join(found)


def first_word(name: str) -> str:
    """``worker``: the kind of something left behind."""
    return "workers" if "RayTrainWorker" in name else "placement group" if "placement" in name else name


def faults() -> str:
    """Return the end of every case with both engines."""
    limit_s = newest_result("faults")[1]["limit_s"]
    rows = [[*names, *(fault_seen(row[engine], limit_s) for engine in ("V1", "V2"))] for names, row in faults_rows()]
    return table(["step", "fault", "with", "V1", "V2"], rows)


def faults_text() -> str:
    """Return the first line of each error, of V1 unless only V2 has one; not those of a row with a condition, which repeat."""
    rows = []
    for (*names, condition), row in faults_rows():
        errors = [each["seen"]["error"] for each in (row["V1"], row["V2"]) if (each.get("seen") or {}).get("error")]
        if errors and not condition:
            rows.append([*names, first_line(errors[0]["cause"])])
    return table(["step", "fault", "first line"], rows)


def peers_setting() -> str:
    """Return the machine of the runs of other projects' suites."""
    name, result = newest_result("peers")
    where = result["environment"]
    # Suites are added one by one, on several machines. Only the sides of one suite ran on the same machine.
    return f"`benchmarks/results/{name}`: {where['num_cpus']} cores, each suite on one machine, torch {where['torch']}, Ray {where['ray']}"


def peers(of: str) -> str:
    """Return the number of passing tests on each side of a suite, and the duration."""
    # If nothing passes on stock's side, the suite needs something that is missing here, such as GPUs.
    found = [
        row
        for row in newest_result("peers")[1]["rows"]
        if row["of"] == of and next(iter(row["sides"].values()))["passed"]
    ]
    columns = list(dict.fromkeys(side for row in found for side in row["sides"]))
    rows = []
    for row in found:
        sides = [row["sides"].get(side) for side in columns]
        differ = sorted({each["test"] for side in sides if side for each in side["differences"]})
        passed = [str(side["passed"]) if side else "-" for side in sides]
        seconds = [f"{side['seconds']:.0f} s" if side else "-" for side in sides]
        rows.append([row["suite"], *passed, str(len(differ)), *seconds])
    head = [*(f"{side} passes" for side in columns), "only stock", *(f"{side} takes" for side in columns)]
    return table(["suite", *head], rows)


def peers_differences(of: str) -> str:
    """Return the tests that pass only on stock, by reason."""
    by_reason: dict[str, list[str]] = {}
    for row in newest_result("peers")[1]["rows"]:
        for side in row["sides"].values() if row["of"] == of else ():
            for each in side["differences"]:
                name = each["test"].rpartition("::")[2]
                known = by_reason.setdefault(str(each["reason"]), [])
                if name not in known:
                    known.append(name)
    rows = [[", ".join(f"`{name}`" for name in sorted(names)), reason] for reason, names in by_reason.items()]
    return table(["tests that pass on stock alone", "why"], rows) if rows else " No test passes on stock alone. "


def counts_setting() -> str:
    """Return the source of the counts."""
    name, result = newest_result("cuda_counts")
    return f"`benchmarks/results/{name}`: torch {result['environment']['torch']}, emulated CUDA"


def counts(*backends: str) -> str:
    """Return the counts of an all_reduce on the device and the host, by backend."""
    rows = []
    for row in newest_result("cuda_counts")[1]["rows"]:
        if row["backend"] not in backends or "ranks" not in row:
            continue
        ranks, size = row["ranks"], row["num_bytes"]
        moved = sum(2 * rank["device_copy_bytes"] + rank["kernel_bytes"] for rank in ranks) / size
        cells = [row["backend"]] if len(backends) > 1 else []
        cells += [str(row["num_ranks"]), row["dtype"], size_text(size), f"{moved:.0f}"]
        cells += [each_rank(rank["to_host_bytes"] / size for rank in ranks)]
        cells += [each_rank(rank["to_device_bytes"] / size for rank in ranks)]
        names = ("kernels", "event_records", "event_waits", "word_writes", "word_waits", "host_waits")
        cells += [each_rank(rank[name] for rank in ranks) for name in names]
        rows.append([*cells, each_rank(rank["peak_device_bytes"] / 2**20 for rank in ranks)])
    columns = [
        "ranks",
        "type",
        "size S",
        "moved on the device, all ranks, in S",
        "to the host, in S",
        "from the host, in S",
    ]
    columns += [
        "kernels",
        "event records",
        "waits for own events",
        "words written",
        "waits for words",
        "waits of the host",
    ]
    columns += ["peak device memory, MiB"]
    return table([*(["backend"] if len(backends) > 1 else []), *columns], rows)


def each_rank(values: Iterable[float]) -> str:
    """Return ``3``; ``3, 0`` if the first rank has 3 and the others 0; else the smallest and the largest value."""
    first, *others = [f"{value:.4g}" for value in values]
    if set(others) <= {first}:
        return first
    return f"{first}, {others[0]}" if len(set(others)) == 1 else f"{min([first, *others])} to {max([first, *others])}"


def first_line(text: str) -> str:
    """Return the first line of a text for a cell of a table, shortened if it is very long."""
    line = text.splitlines()[0].replace("|", "\\|")
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


TEXTS: dict[str, Callable[[], str]] = {
    "start": start,
    "ipc setting": ipc_setting,
    "ipc 2 ranks": lambda: ipc_collectives(2),
    "ipc 4 ranks": lambda: ipc_collectives(4),
    "ipc others 2": lambda: ipc_others(2),
    "ipc others 4": lambda: ipc_others(4),
    "ipc busy": lambda: ipc_busy("ipc", "all_reduce"),
    "ipc training setting": lambda: ipc_setting("ipc_training"),
    "ipc steps": ipc_steps,
    "ipc steps busy": lambda: ipc_busy("ipc_training", *STEPS),
    "ipc cold": ipc_cold,
    "ipc demo": ipc_demo,
    "checkouts setting": checkouts_setting,
    "checkouts": checkouts,
    "counts setting": counts_setting,
    "counts ipc": lambda: counts("ipc"),
    "counts staged": lambda: counts("staged", "gloo"),
    "faults setting": faults_setting,
    "faults": faults,
    "faults text": faults_text,
    "peers setting": peers_setting,
    "peers torch": lambda: peers("torch"),
    "peers torch differences": lambda: peers_differences("torch"),
    "peers Ray": lambda: peers("Ray"),
    "peers Ray differences": lambda: peers_differences("Ray"),
}


def renewed(page: str) -> str:
    """Return the page with the newest numbers."""
    return _MARKED.sub(lambda found: f"{found[1]}{TEXTS[found[2]]()}{found[4]}", page)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where a page is out of date"
    )
    check = arguments.parse_args().check
    stale = [page for page in PAGES if renewed(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page} is out of date" if check else page)
        if not check:
            page.write_text(renewed(page.read_text()))
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
