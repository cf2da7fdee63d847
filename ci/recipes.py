"""Run the commands of the pages in docs/recipes and compare what they print with the outputs on the pages.

usage: python ci/recipes.py [--write] [PAGE ...]     in an environment with the extra `test`, as root on Linux for pages with two nodes

A page is a file of docs/recipes without its suffix, such as one-gpu. --write puts what the commands printed into the page. What a page has:

    <!-- recipe: train.py=examples/stock_train.py -->   once: files of the folder that the commands run in, and where they run (see `Place`)
    <!-- file: examples/one_gpu.py -->                  the next block of code is this file
    <!-- diff: OLD NEW -->                              the next block of code has the lines that differ between two files
    <!-- run: exit=1 limit=90 node=b -->                the next indented block is run by a shell; the text block after it has its output

Addresses, ports, process ids, times and versions may differ. The option keep=REGEX, without spaces, keeps the lines that match it: a
training prints many lines of Ray. Of equal lines of one worker, as Ray prints them twice, one is kept.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import venv
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, call, install

PAGES = ROOT / "docs" / "recipes"
_NET = ROOT / "tests" / "net"
# Packages of Ray's dashboard, over those of the environment that this script runs in.
_DASHBOARD = ROOT / ".venv-dashboard"
# In the environment of all that the commands of a page start.
_MARK = "RECIPE_RUN"
_LIMIT_S = 120.0

_MARKER = re.compile(r"^<!-- (recipe|file|diff|run): ?(.*?) -->\n", re.MULTILINE)
_FENCED = re.compile(r"^```\w*\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)

# Beginning of a line that Ray passes on from another process.
_WORKER = re.compile(r"\(\w+ pid=")
# What may differ from one run to the next, most special first, and what stands for it in a comparison.
_VARIES = (
    (r"\d{4}-\d\d-\d\d[_ T]\d\d[-:]\d\d[-:]\d\d(?:[.,]\d+)?", "DATE"),
    (r"\b\d+\.\d+\.\d+\.\d+(?::\d+)?\b", "ADDRESS"),
    (r"^\((\w+) pid=\d+(?:, ip=ADDRESS)?\)", r"(\1)"),
    (r"\bpid[= ]\d+", "PID"),
    (r"\braysubmit_\w+", "JOB"),
    (r"\b(?=\w*\d)[0-9a-f]{8,}\b", "ID"),
    (r"\b\d+(?:\.\d+)? ?(?:us|ms|s|[KMGT]i?B(?:/s)?)\b(?! per)", "AMOUNT"),
    (r"\b\d+\.\d+(?:\.\w+)*(?:\+\w+)?\b", "NUMBER"),
    (r"\b\d+e-\d+\b|\b\d{3,}\b", "NUMBER"),
    (r"\bnode-[ab]\b", "NODE"),
    (r"-{3,}", "---"),
    (r"\s+", " "),
)


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Attributes:
        text: Lines for a shell.
        output: Start and end of its output in the page; None where the page shows none.
        options: Of its marker: exit, keep, limit, node.
    """

    text: str
    output: tuple[int, int] | None
    options: dict[str, str]


@dataclass
class Page:
    """A page and what its markers say."""

    path: Path
    text: str
    options: dict[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    # Start, end and true content of blocks that have files or differences.
    files: list[tuple[int, int, str]] = field(default_factory=list)

    @property
    def stale(self) -> list[str]:
        """Blocks of files and differences that are not those of the files."""
        return [self.text[start:end] for start, end, content in self.files if self.text[start:end] != content]


def read(name: str) -> Page:
    """Read a page.

    Args:
        name: Its file without the suffix.

    Raises:
        ValueError: A marker has no block after it.
    """
    path = PAGES / f"{name}.md"
    page = Page(path, path.read_text(encoding="utf-8"))
    markers = list(_MARKER.finditer(page.text))
    for number, marker in enumerate(markers):
        kind, words = marker[1], marker[2].split()
        end = markers[number + 1].start() if number + 1 < len(markers) else len(page.text)
        if kind == "recipe":
            page.options = _options(words)
        elif kind == "run":
            page.commands.append(_command(page.text, marker.end(), end, _options(words)))
        else:
            fenced = _FENCED.search(page.text, marker.end(), end)
            if fenced is None:
                raise ValueError(f"{path.name}: no block of code after {marker[0].strip()}")
            content = _file(words[0]) if kind == "file" else difference(*words)
            page.files.append((fenced.start(1), fenced.end(1), content))
    return page


def _options(words: list[str]) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _command(text: str, start: int, end: int, options: dict[str, str]) -> Command:
    command = _INDENTED.search(text, start, end)
    if command is None:
        raise ValueError(f"no indented block with a command after {text[start - 60 : start]!r}")
    output = _FENCED.search(text, command.end(), end)
    lines = [line[4:] for line in command[0].splitlines()]
    return Command("\n".join(lines), output and output.span(1), options)


def _file(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def difference(old: str, new: str) -> str:
    """Return the lines that differ between two files below their docstrings, without the headers of a patch."""
    lines = [_file(name).partition('"""\n\n')[2].splitlines(keepends=True) for name in (old, new)]
    hunks = list(difflib.unified_diff(*lines, n=2))[2:]
    return "".join("...\n" if line.startswith("@@") else line for line in hunks).removeprefix("...\n")


def shown(output: str, places: dict[str, str], keep: str) -> str:
    """Return an output as a page shows it.

    Args:
        output: What a command printed.
        places: What stands for folders of this machine, by folder.
        keep: Regular expression of the lines that are kept.
    """
    output = re.sub(r"\x1b\[[0-9;]*m", "", output.replace("\r\n", "\n"))
    for folder, name in sorted(places.items(), key=lambda item: -len(item[0])):
        output = output.replace(folder, name)
    kept: list[str] = []
    for line in output.splitlines():
        line = line.rstrip()
        if re.search(keep, line) and line not in (kept if _WORKER.match(line) else ()):
            kept.append(line)
    return "\n".join(kept).strip("\n") + "\n"


def comparable(output: str) -> list[str]:
    """Return the different lines of an output in any order, with one word for each thing that may differ between runs."""
    for pattern, word in _VARIES:
        output = "\n".join(re.sub(pattern, word, line) for line in output.splitlines())
    return sorted({line.strip() for line in output.splitlines()} - {""})


class Place:
    """Where the commands of a page run: a folder, with a home folder and Ray's files beside it, and a shell on this machine.

    Everything that they start is ended with the block.
    """

    def __init__(self, options: dict[str, str]) -> None:
        # Its name is short: Ray puts Unix sockets below it.
        self.folder = Path(tempfile.mkdtemp(prefix="rfb-"))
        for name in ("home", "ray", "work"):
            (self.folder / name).mkdir()
        self.mark = uuid.uuid4().hex
        self._bin = Path(sys.executable).parent
        if "dashboard" in options:
            self._bin = dashboard_environment()
        for name, source in options.items():
            if source:
                shutil.copy(ROOT / source, self.folder / "work" / name)

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in _marked(self.mark):
                with suppress(psutil.Error):
                    process.send_signal(number)
            end = time.monotonic() + 10
            while _marked(self.mark) and time.monotonic() < end:
                time.sleep(0.2)
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment(self) -> dict[str, str]:
        """Return the variables of a command; results of training are below the folder."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "NO_COLOR"))}
        own = {
            "HOME": str(self.folder / "home"),
            "PATH": f"{self._bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(self.folder / "ray"),
            "RAY_DEDUP_LOGS": "0",
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "80",
            "RAY_DISABLE_USAGE_STATS": "1",
            "RES_OPTIONS": "timeout:1",
            _MARK: self.mark,
        }
        return {**kept, **own}

    def command(self, text: str, node: str) -> list[str]:
        """Return the words that run a shell's text."""
        return ["bash", "-e", "-o", "pipefail", "-c", text]

    def run(self, command: Command) -> tuple[int | None, str]:
        """Run a command; returns its exit code, None after its limit, and what it printed."""
        words = self.command(command.text, command.options.get("node", "a"))
        # Ray, which stays after `ray start`, would hold a pipe open.
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                words,
                cwd=self.folder / "work",
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            code = None
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(float(command.options.get("limit", _LIMIT_S)))
            if code is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            output.seek(0)
            return code, output.read().decode(errors="replace")

    @property
    def names(self) -> dict[str, str]:
        """What a page shows in the place of a folder of this machine, by folder, and of its address."""
        from ray.util import get_node_ip_address

        folders = {self.folder / "home": "~", self.folder / "work": ".", ROOT: ".", sys.prefix: ".venv"}
        names = {str(folder): name for folder, name in folders.items()}
        address, shown_address = get_node_ip_address(), "10.0.0.3"
        # Before two spaces: in a column of a table, whose width stays.
        return {**names, f"{address}  ": f"{shown_address:{len(address)}}  ", address: shown_address}


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class TwoNodes(Place):
    """Two nodes, `a` and `b`, in network namespaces; with the option `firewall` each lets only the ports of Ray in."""

    # What the firewall lets in: Ray's ports as the page sets them, and those that it tells the reader to use.
    PORTS = "{ 6379-6399, 8265, 10002-10199 }"

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        sys.path.append(str(_NET))
        from net_nodes import Node, join

        name = f"rfb-{os.getpid()}-{self.mark[:6]}"
        self._nodes: dict[str, Any] = {}
        try:
            for number, letter in enumerate("ab", 1):
                self._nodes[letter] = Node(f"{name}-{letter}", f"node-{letter}", number)
            join(*self._nodes.values())
            if "firewall" in options:
                self._filter()
        except BaseException:
            self.__exit__()
            raise

    def _filter(self) -> None:
        for node in self._nodes.values():
            rules = (
                "add table inet filter; add chain inet filter input { type filter hook input priority 0; policy drop; };"
                "add rule inet filter input iif lo accept; add rule inet filter input ct state established,related accept;"
                f"add rule inet filter input meta l4proto {'{ icmp, ipv6-icmp, udp }'} accept;"
                f"add rule inet filter input tcp dport {self.PORTS} accept"
            )
            node.execute("nft", rules)

    def __exit__(self, *_: object) -> None:
        for node in self._nodes.values():
            node.close()
        super().__exit__()

    def environment(self) -> dict[str, str]:
        """As for one machine, without a token: the nodes are the only machines of their network."""
        return {**super().environment(), "RAY_AUTH_MODE": "disabled"}

    def command(self, text: str, node: str) -> list[str]:
        """Return the words that run a shell's text on a node; Ray's own files are of that node only."""
        own = self.folder / f"ray-{node}"
        own.mkdir(exist_ok=True)
        mount = [
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount --bind "$0" "$1" && shift && exec "$@"',
            own,
            self.folder / "ray",
        ]
        words: list[str] = self._nodes[node].command(*map(str, mount), *super().command(text, node))
        return words


def why_not(page: Page) -> str | None:
    """Return why this machine cannot run a page, None where it can."""
    if "two-nodes" not in page.options:
        return None
    sys.path.append(str(_NET))
    from net_nodes import why_not as why_no_nodes

    return why_no_nodes() or (None if shutil.which("nft") else "needs the command nft (package nftables)")


def dashboard_environment() -> Path:
    """Make an environment that has the packages of Ray's dashboard and those of this one; returns its folder of programs."""
    import site

    import ray

    python = environment_over(_DASHBOARD, site.getsitepackages())
    if not (_DASHBOARD / "installed").exists():
        install(python, f"ray[default]=={ray.__version__}")
        (_DASHBOARD / "installed").touch()
    return python.parent


def environment_over(folder: Path, below: list[str]) -> Path:
    """Make a virtual environment that has the packages of other folders too; returns its Python.

    Args:
        folder: Where it is made.
        below: Folders with packages, such as those of the environment of this process.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        # Older Pythons put an old setuptools there, which would go before that of the other folders.
        call(python, "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools")
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "below.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in below))
        for name, module in (("ray", "ray.scripts.scripts"), ("ray-fracbackend", "ray_fracbackend.cli")):
            program = python.parent / name
            program.write_text(f"#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
            program.chmod(0o755)
    return python


@dataclass(frozen=True)
class Run:
    """What came of a command.

    Attributes:
        command: The command.
        text: Its output as the page shows it.
        ended: How it ended, if not as the page says; else empty.
        differs: How its output differs from that on the page; else empty.
    """

    command: Command
    text: str
    ended: str
    differs: str


def run_page(page: Page) -> Iterator[Run]:
    """Run the commands of a page in order."""
    place_class = TwoNodes if "two-nodes" in page.options else Place
    with place_class(page.options) as place:
        for command in page.commands:
            code, output = place.run(command)
            text = shown(output, place.names, command.options.get("keep", ""))
            yield Run(command, text, _ended(command, code, output), _differs(page, command, text))


def _ended(command: Command, code: int | None, output: str) -> str:
    expected = int(command.options.get("exit", 0))
    if code == expected:
        return ""
    how = "no end within its limit" if code is None else f"exit code {code}, not {expected}"
    return f"{command.text}\n{how}:\n{output[-6000:]}"


def _differs(page: Page, command: Command, text: str) -> str:
    on_page = text if command.output is None else page.text[slice(*command.output)]
    lines = difflib.unified_diff(comparable(on_page), comparable(text), "the page", "this run", lineterm="", n=0)
    return (
        "\n".join([f"{command.text}\nprints other lines than {page.path.name} has:", *found])
        if (found := [*lines])
        else ""
    )


def problems(name: str) -> list[str]:
    """Run a page; returns what is wrong with it."""
    page = read(name)
    return [*page.stale, *(wrong for run in run_page(page) if (wrong := run.ended or run.differs))]


def write(name: str) -> list[str]:
    """Run a page and put files and outputs into it; returns which commands do not end as the page says."""
    page = read(name)
    blocks, failed = list(page.files), []
    for run in run_page(page):
        if run.ended:
            failed.append(run.ended)
        if run.command.output is not None:
            blocks.append((*run.command.output, run.text))
    text = page.text
    for start, end, content in sorted(blocks, reverse=True):
        text = text[:start] + content + text[end:]
    page.path.write_text(text, encoding="utf-8")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = sorted(path.stem for path in PAGES.glob("*.md"))
    parser.add_argument("--write", action="store_true", help="put files and outputs into the pages")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(names)}; default: all")
    options = parser.parse_args()
    if unknown := sorted(set(options.pages) - set(names)):
        parser.error(f"no page {', '.join(unknown)}; there are {', '.join(names)}")
    failed = False
    for name in options.pages or names:
        if reason := why_not(read(name)):
            print(f"{name}: not run: {reason}", flush=True)
            continue
        found = write(name) if options.write else problems(name)
        print(
            f"{name}: {'failed' if found else 'written' if options.write else 'passed'}", *found, sep="\n", flush=True
        )
        failed |= bool(found)
    if failed:
        sys.exit("a page failed, see above")


if __name__ == "__main__":
    main()
