"""The flow of docs/development/architecture.md is the sequence of calls of a real start."""

from __future__ import annotations

import builtins
import os
import re
import sys
import threading
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

import ray_fracbackend
from tests.project.test_reading_path import reading_path
from tests.ray.starts import start

_PAGE = Path(__file__).parents[2] / "docs" / "development" / "architecture.md"
# Column of the workers.
_RIGHT = 44


def record() -> None:
    """Record every call into the package in this process, from now on."""
    root = f"{Path(ray_fracbackend.__file__).parent}{os.sep}"
    calls: list[tuple[str, str]] = []
    vars(builtins)["recorded_calls"] = calls

    def profile(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and code.co_name != "<module>":
            calls.append((code.co_filename.removeprefix(root).replace(os.sep, "/"), code.co_name))

    threading.setprofile(profile)
    sys.setprofile(profile)


def recorded() -> list[tuple[str, str]]:
    """Return module and function of each call, in order."""
    sys.setprofile(None)
    threading.setprofile(None)
    calls: list[tuple[str, str]] = vars(builtins).pop("recorded_calls")
    return calls


def drawn() -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return module and function of each line of the flow, on the driver and on a worker."""
    block = _PAGE.read_text(encoding="utf-8").partition("## Flow")[2].split("```")[1]
    sides: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for line in block.splitlines():
        for side, text in zip(sides, (line[:_RIGHT], line[_RIGHT:]), strict=True):
            side.extend(re.findall(r"^(\w+\.py) +(\w+)", text))
    return sides


def in_order(lines: list[tuple[str, str]], calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the lines up to the first one that is not called after the lines before it."""
    left = iter((Path(module).name, function) for module, function in calls)
    return list(takewhile(lambda line: any(line == call for call in left), lines))


def first_entries(calls: list[tuple[str, str]]) -> list[str]:
    """Return the modules of the reading path in the order in which they are entered."""
    return list(dict.fromkeys(module for module, _ in calls if module in reading_path()))


@pytest.mark.full
def test_the_flow_is_that_of_a_real_start(pair: Any) -> None:
    """Every line is a call, in this order, and the modules of the reading path are entered in the path's order."""
    pair.execute(record)
    record()
    try:
        start(pair)
    finally:
        driver, worker = recorded(), pair.execute(recorded)[0]
    on_driver, on_worker = drawn()
    # Created by dataclass, or another choice for workers without GPUs.
    made = {("config.py", "FracTorchConfig"), ("report.py", "StartReport")}
    on_driver = [("choices.py", "without_gpus") if line == ("choices.py", "own") else line for line in on_driver]
    on_driver = [line for line in on_driver if line not in made]
    assert in_order(on_driver, driver) == on_driver
    assert in_order(on_worker, worker) == on_worker
    path = reading_path()
    entered = [first_entries(driver), first_entries(worker)]
    assert [sorted(modules, key=path.index) for modules in entered] == [
        [
            "backend.py",
            "collect.py",
            "decide/table.py",
            "decide/choices.py",
            "decide/rendezvous.py",
            "decide/plan.py",
            "report.py",
        ],
        ["worker/probe.py", "worker/store.py", "decide/plan.py", "worker/process_group.py", "verify.py"],
    ]
    assert entered[0] == sorted(entered[0], key=path.index)
    own = [module for module in entered[1] if module.startswith("worker/") or module == "verify.py"]
    assert own == sorted(own, key=path.index)
