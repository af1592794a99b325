"""Who starts processes when, and what it is charged with."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from tests.exam.slots import Slots, at, has_ended


def test_the_most_urgent_goes_first_and_a_wide_one_waits_for_room() -> None:
    """Two slots, both taken until everybody waits."""
    slots = Slots(2, urgency={"later": 2, "sooner": 1}, width={"wide": 2})
    went: list[str] = []

    def go(name: str) -> None:
        with at(name), slots.taken():
            went.append(name)

    threads = []
    with at("first"), slots.taken(), slots.taken():
        for number, name in enumerate(("later", "sooner", "wide")):
            threads.append(threading.Thread(target=go, args=(name,)))
            threads[-1].start()
            while len(slots._waiting) <= number:
                time.sleep(0.001)
        assert went == []
    for thread in threads:
        thread.join()
    assert went == ["wide", "sooner", "later"]  # no urgency: before all others
    assert slots.free == 2
    assert slots.clock.keys() == {"first", "later", "sooner", "wide"}


def test_a_process_is_charged_with_its_children() -> None:
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(10**7))'])"
    slots = Slots()
    with at("busy"), slots.taken():
        process = subprocess.Popen([sys.executable, "-c", busy], text=True)
        assert not has_ended(process)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(process)
        slots.charge(process)
        assert process.wait() == 0
    assert slots.cpu["busy"] > 0.05
    assert "busy " in slots.report()
