"""Save the start report beside the run's results. Driver or controller."""

from __future__ import annotations

import json
import os
import posixpath
from contextlib import suppress
from typing import Any

from ray_fracbackend import _ray
from ray_fracbackend._ray import WorkerGroup
from ray_fracbackend.decide.settings import switch
from ray_fracbackend.log import logger
from ray_fracbackend.timeouts import bounded

# A later start of the same run, after a failure or a resize, replaces the file.
REPORT_FILE = "start_report.json"
_SAVE_S = 2.0
_ENABLED_ENV_VAR = "RAY_FRACBACKEND_START_REPORT"


def earlier_start(worker_group: WorkerGroup) -> dict[str, Any] | None:
    """Return number, date and result of the run's last start from its report, None if there is none; check the variable."""
    if not switch(_ENABLED_ENV_VAR, os.environ.get(_ENABLED_ENV_VAR, "1")):
        return None

    def read() -> dict[str, Any] | None:
        if (folder := _ray.results_folder(worker_group)) is None:
            return None
        file_system, path = folder
        with file_system.open_input_stream(posixpath.join(path, REPORT_FILE)) as stream:
            report = json.loads(stream.read())
        number = int(report["earlier"]["number"]) if report["earlier"] else 0
        result = "started" if report["ok"] else report["error"]["reason"]
        return {"number": number + 1, "date": report["date"], "result": result}

    try:
        return bounded(read, _SAVE_S)
    except Exception:  # usually because it is the first start
        return None


def save_report(worker_group: WorkerGroup, report: dict[str, Any]) -> str | None:
    """Write a report in the results folder of the group's run.

    Slow storage delays the start by a few seconds; an error of the storage does not fail the start. For a group without a run,
    and with RAY_FRACBACKEND_START_REPORT=0, nothing is written.

    Returns:
        Path of the file, followed by the kind of storage unless it is local; None if no file was written.
    """
    if not switch(_ENABLED_ENV_VAR, os.environ.get(_ENABLED_ENV_VAR, "1")):
        return None

    def write() -> str | None:
        if (folder := _ray.results_folder(worker_group)) is None:
            return None
        file_system, path = folder
        file_system.create_dir(path, recursive=True)
        file = posixpath.join(path, REPORT_FILE)
        is_local = file_system.type_name == "local"
        # Renamed when it is complete: a full disk leaves the earlier report. Other storage keeps that one by itself.
        part = f"{file}.part" if is_local else file
        try:
            with file_system.open_output_stream(part) as stream:
                stream.write(json.dumps(report, indent=2).encode())
            if is_local:
                file_system.move(part, file)
        finally:
            if is_local:
                with suppress(FileNotFoundError):
                    file_system.delete_file(part)
        return file if is_local else f"{file} ({file_system.type_name})"

    try:
        return bounded(write, _SAVE_S)
    except TimeoutError:
        logger.warning("%s is not yet written in the results folder after %g s: slow storage", REPORT_FILE, _SAVE_S)
    except Exception as error:  # each kind of storage raises its own errors
        logger.warning("%s was not written in the results folder: %s", REPORT_FILE, error)
    return None
