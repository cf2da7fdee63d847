"""What a start logs before it waits and while it waits, and what its errors have of that."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ray_fracbackend import UnreachableMasterError, VerificationError
from ray_fracbackend.decide.table import decide_start
from ray_fracbackend.start import collect
from tests.ray.starts import START_S, replace_in_worker, start

DOUBT = "a doubt about the workers"


@pytest.fixture
def lines(caplog):
    """The lines of the package, as a function: level and text of each."""
    caplog.set_level("INFO", logger="ray.train")
    prefix = "ray_fracbackend: "

    def found():
        records = [(record.levelname, record.getMessage()) for record in caplog.records]
        return [(level, text.removeprefix(prefix)) for level, text in records if text.startswith(prefix)]

    return found


@pytest.fixture
def doubted(pair, monkeypatch):
    """Workers whose plan has a warning."""
    monkeypatch.setattr(
        "ray_fracbackend.start.backend.decide_start", lambda *args: replace(decide_start(*args), warnings=(DOUBT,))
    )
    return pair


def test_a_quick_start(pair, lines):
    """What begins and how long it may take; then the outcome."""
    start(pair, start_timeout_s=100)
    (first, begin), (second, outcome) = lines()
    assert (first, second) == ("INFO", "INFO")
    assert re.fullmatch(r"starting gloo at 127\.0\.0\.1:\d+ with 2 workers, up to 100 s", begin)
    assert outcome.startswith("using gloo (no GPUs were asked for) [2 workers, ")


def test_warnings_come_before_the_wait(doubted, lines):
    """Each once; an error has it too."""
    start(doubted)
    (level, warning), (_, begin), _ = lines()
    assert (level, warning == DOUBT, begin.startswith("starting gloo")) == ("WARNING", True, True)


def test_an_error_has_the_warnings_of_its_start(doubted, lines):
    """On lines of their own below the message; the log does not have them a second time."""
    doubted.execute_single(1, replace_in_worker, "torch.distributed", "all_reduce", "corrupt", 1)
    with pytest.raises(VerificationError) as caught:
        start(doubted, start_timeout_s=START_S)  # too short for a search for the fault
    message, *below = str(caught.value).splitlines()
    assert "wrong result on rank 1" in message
    assert below == [f"warning before this error: {DOUBT}"]
    assert [text for _, text in lines() if DOUBT in text] == [DOUBT]
    assert DOUBT not in caught.value.found


def test_an_error_of_the_fallback_has_the_first_failure(pair, first_choice, lines):
    """Both starts are logged with their limits, and why there was a second one is in the error."""
    first_choice(warnings=("a doubt",))
    pair.execute(replace_in_worker, "torch.distributed", "all_reduce", "corrupt", 2)
    with pytest.raises(VerificationError) as caught:
        start(pair, start_timeout_s=9)  # too short for a search for the fault
    _, *below = str(caught.value).splitlines()
    assert below[0] == "warning before this error: a doubt"
    assert below[1].startswith("warning before this error: cpu:gloo failed its verification, fell back to gloo")
    told = [text for _, text in lines()]
    assert [told[0], told[2]] == [line.removeprefix("warning before this error: ") for line in below]
    assert re.fullmatch(r"starting cpu:gloo at .* with 2 workers, up to \d\.?\d? s, then gloo", told[1])
    assert re.fullmatch(r"starting gloo at .* with 2 workers, up to \d\.?\d? s", told[3])
    assert len(told) == 4


def test_a_long_wait_names_the_ranks(pair, monkeypatch, lines):
    """Those without an answer, with node, step, and how long the start still waits."""
    monkeypatch.setattr(collect, "_LOG_AFTER_S", 1.0)
    pair.execute_single(1, replace_in_worker, "ray_fracbackend.worker.probe", "probe_devices", "nap 4", 1)
    start(pair, start_timeout_s=100)
    waits = [text for level, text in lines() if level == "INFO" and "waiting for" in text]
    assert len(waits) >= 2
    for text in waits:
        assert re.fullmatch(
            r"probing the workers: waiting for rank 1 \(node .*, pid \d+\), [\d.]+ s so far, up to \d+ s more", text
        )


def test_a_wrong_address_on_one_node(pair, lines):
    """It is not waited for: each rank first connects to it, and the error has what is wrong with it, once."""
    with pytest.raises(UnreachableMasterError) as caught:
        start(pair, master_addr="10.99.0.1", start_timeout_s=4)
    (level, warning), (_, begin) = lines()
    assert (level, begin.startswith("starting gloo at 10.99.0.1:")) == ("WARNING", True)
    assert warning.startswith("rank 0's address 10.99.0.1 (master_addr as configured) is on no interface of its node ")
    message, below = str(caught.value).splitlines()
    assert below == f"warning before this error: {warning}"
    assert message.endswith("if it is set, correct it or leave it out.")
    assert caught.value.ranks == (1,)
    assert caught.value.step == begin.split(" with ")[0]
