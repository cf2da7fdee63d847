"""Workflows in .github: pinned actions, time limits, existing commands, no cancelled runs, one build for a release."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_fracbackend.cli.parser import parser

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "ci"))

import commands  # noqa: E402
import windows  # noqa: E402

_FOLDER = _ROOT / ".github" / "workflows"
_TEXTS = {path.name: path.read_text() for path in sorted(_FOLDER.glob("*.yml"))}
# Read everything as text: YAML would read "on" as True.
_WORKFLOWS: dict[str, dict[str, Any]] = {name: yaml.load(text, Loader=yaml.BaseLoader) for name, text in _TEXTS.items()}
_JOBS = [(name, job) for name, workflow in _WORKFLOWS.items() for job in workflow["jobs"]]

_each_workflow = pytest.mark.parametrize("name", _WORKFLOWS)
_each_job = pytest.mark.parametrize(("name", "job"), _JOBS)


def job_of(name: str, job: str) -> dict[str, Any]:
    """Return a job of a workflow."""
    return _WORKFLOWS[name]["jobs"][job]  # type: ignore[no-any-return]


def steps_of(name: str, job: str) -> list[dict[str, Any]]:
    """Return the steps of a job; a job that calls another workflow has none."""
    return job_of(name, job).get("steps", [])  # type: ignore[no-any-return]


def commands_of(name: str, job: str) -> str:
    """Return all shell lines of a job."""
    return "\n".join(step["run"] for step in steps_of(name, job) if "run" in step)


def seconds(minutes: str) -> int:
    """Return a time limit of a workflow in seconds."""
    return int(minutes) * 60


@_each_workflow
def test_actions_are_pinned(name: str) -> None:
    """Every action has a full commit and its version in a comment; an action has the same commit everywhere."""
    used = re.findall(r"^\s*(?:- )?uses: (.+)$", _TEXTS[name], flags=re.MULTILINE)
    assert used
    bad = [each for each in used if not re.fullmatch(r"(\S+@[0-9a-f]{40} # v\d+\.\d+\.\d+|\./\S+\.yml)", each)]
    assert bad == []
    everywhere = {each for text in _TEXTS.values() for each in re.findall(r"uses: (\S+)@(\S+)", text)}
    assert len(everywhere) == len({action for action, _ in everywhere})


@_each_job
def test_jobs_are_bounded(name: str, job: str) -> None:
    """Every job has its own time limit, not GitHub's six hours; a job that calls a workflow has that workflow's limits."""
    assert "timeout-minutes" in job_of(name, job) or job_of(name, job).get("uses", "").startswith("./")


@_each_workflow
def test_files_in_workflows_exist(name: str) -> None:
    """Every file and folder that a step, a cache or another workflow names exists."""
    lines = "\n".join(commands_of(name, job) for job in _WORKFLOWS[name]["jobs"])
    named = re.findall(r"[\w./-]+", lines)
    named += re.findall(r"^ +((?:ci/)?[\w.-]+\.(?:toml|txt))$", _TEXTS[name], flags=re.MULTILINE)
    named += [path for each in _WORKFLOWS[name]["jobs"].values() if (path := each.get("uses", "")).startswith("./")]
    ours = [
        path for path in named if re.match(r"(?:\./)?(?:\.github|ci|tests|benchmarks|examples|docs|upstream)/", path)
    ]
    assert ours
    assert [path for path in ours if not (_ROOT / path).exists()] == []


@_each_workflow
def test_concurrency_ends_no_scheduled_run(name: str) -> None:
    """Either the runs of only one pull request share a group, or the group cancels nothing: a push does not cancel a scheduled run."""
    concurrency = _WORKFLOWS[name]["concurrency"]
    alone = r"[a-z]+-\$\{\{ github\.event_name == 'pull_request' && github\.ref \|\| github\.run_id \}\}"
    if concurrency["cancel-in-progress"] != "false":
        assert re.fullmatch(alone, concurrency["group"])
    else:
        assert not {"schedule", "workflow_dispatch"} & set(_WORKFLOWS[name]["on"])
    groups = [workflow["concurrency"]["group"].partition("-$")[0] for workflow in _WORKFLOWS.values()]
    assert len(set(groups)) == len(groups), "a workflow must not end another, nor wait for the one that calls it"


def test_a_pull_request_is_checked() -> None:
    """Tests, all commands, the linters and the docs, on Linux and Windows, for pull requests, main and release branches."""
    on = _WORKFLOWS["ci.yml"]["on"]
    assert on["push"]["branches"] == ["main", "release/**"]
    assert {"pull_request", "workflow_call"} <= set(on)
    assert "python ci/test.py" in commands_of("ci.yml", "test")
    assert "python ci/commands.py" in commands_of("ci.yml", "commands")
    assert {"python ci/lint.py", "python ci/docs.py"} <= set(commands_of("ci.yml", "lint").splitlines())
    for job in ("commands", "lint"):
        systems = job_of("ci.yml", job)["strategy"]["matrix"]["os"]
        assert [system.partition("-")[0] for system in systems] == ["ubuntu", "windows"]
        assert "pip install -c ci/constraints.txt" in commands_of("ci.yml", job)
    assert all(seconds(job["timeout-minutes"]) <= 30 * 60 for job in _WORKFLOWS["ci.yml"]["jobs"].values())


def test_every_command_is_run() -> None:
    """ci/commands.py has each command of the command line, with valid arguments."""
    (choices,) = (action.choices for action in parser()._actions if action.dest == "command")
    assert {command.name for command in commands.COMMANDS} == set(choices)
    for command in commands.COMMANDS:
        parser().parse_args(command.arguments)


def limit_of_installation(name: str, job: str) -> int:
    """Return the time limit that a job gives pip, in seconds."""
    (limit,) = (
        seconds(step["timeout-minutes"]) for step in steps_of(name, job) if "pip install" in step.get("run", "")
    )
    return limit


@pytest.mark.parametrize("torch", ["2.7.1", "2.9.1", "2.13.0"])
def test_windows_steps_end_before_their_job(torch: str) -> None:
    """Whatever hangs, the job has time to print its table, and uploads the results in any case."""
    limits = sum(step.limit_s for step in windows.chosen([], torch))
    checkout_s = 3 * 60
    assert limits + limit_of_installation("versions.yml", "start") + checkout_s <= seconds(
        job_of("versions.yml", "start")["timeout-minutes"]
    )
    (upload,) = (step for step in steps_of("versions.yml", "start") if "upload-artifact" in step.get("uses", ""))
    assert upload["if"].startswith("always()")
    assert f"--results {upload['with']['path']}" in commands_of("versions.yml", "start")


def test_commands_end_before_their_job() -> None:
    """The same for the commands of the command line."""
    limits = sum(command.limit_s for command in commands.COMMANDS)
    whole = seconds(job_of("ci.yml", "commands")["timeout-minutes"])
    assert limits + limit_of_installation("ci.yml", "commands") < whole
    assert limits < seconds(job_of("release.yml", "test")["timeout-minutes"]) / 1.5


def test_linters_are_pinned() -> None:
    """A new release of a linter does not fail an unrelated change."""
    constraints = (_ROOT / "ci" / "constraints.txt").read_text()
    modules = re.findall(r'sys\.executable, "-m", "(\w+)"', (_ROOT / "ci" / "lint.py").read_text())
    assert {"ruff", "mypy", "jactionlint"} == set(modules)
    checkers = {*modules, "pyright"}  # the last one in tests/typing
    assert [name for name in checkers if not re.search(rf"^{name}==", constraints, flags=re.MULTILINE)] == []
    # Nothing is linted with packages from an unpinned installation.
    linting = [(name, job) for name, job in _JOBS if "ci/lint.py" in commands_of(name, job)]
    assert linting == [("ci.yml", "lint")]


def test_apt_knows_its_packages() -> None:
    """The package lists of an image are older than the packages on the servers."""
    lines = [line for name, job in _JOBS for line in commands_of(name, job).splitlines() if "apt-get install" in line]
    assert lines
    assert all("apt-get update && " in line for line in lines)


def test_only_the_upload_can_publish() -> None:
    """Only one job has a token for the package index. It waits for its environment and all other jobs, and runs none of our code."""
    publishing = [(name, job) for name, job in _JOBS if "id-token" in str(job_of(name, job).get("permissions"))]
    assert publishing == [("release.yml", "publish")]
    assert all("id-token" not in str(workflow.get("permissions")) for workflow in _WORKFLOWS.values())
    publish = job_of("release.yml", "publish")
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["environment"] == "pypi"
    assert set(publish["needs"]) == set(_WORKFLOWS["release.yml"]["jobs"]) - {"publish"}
    assert [step["uses"].partition("@")[0] for step in publish["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_a_release_is_built_once() -> None:
    """The files of the single build are tested and uploaded: no other job builds, and none restores a cache of another run."""
    assert _WORKFLOWS["release.yml"]["on"] == {"push": {"tags": ["v*"]}}
    every_command = [commands_of("release.yml", job) for job in _WORKFLOWS["release.yml"]["jobs"]]
    assert re.findall(r"ci/release\.py (\S+)", "\n".join(every_command)) == ["check-tag", "build", "test"]
    assert re.findall(r"-m build|pip wheel|setup\.py|pip install [^\n]*\.(?:\s|$)", "\n".join(every_command)) == []
    artifacts = [
        (step["uses"].partition("@")[0].rpartition("/")[2], step["with"]["name"])
        for job in _WORKFLOWS["release.yml"]["jobs"]
        for step in steps_of("release.yml", job)
        if "artifact" in step.get("uses", "")
    ]
    assert artifacts == [
        ("upload-artifact", "release"),
        ("download-artifact", "release"),
        ("download-artifact", "release"),
    ]
    assert "cache: pip" not in _TEXTS["release.yml"]


def test_dependabot_updates_the_pins() -> None:
    """Actions and Python packages, including the constraints, get weekly updates."""
    updates = yaml.safe_load((_ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert [update["package-ecosystem"] for update in updates] == ["github-actions", "pip"]
    assert "/ci" in updates[1]["directories"]
    assert {update["schedule"]["interval"] for update in updates} == {"weekly"}
