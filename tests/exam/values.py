"""Cases in which numbers go wrong, or memory runs out."""

from __future__ import annotations

import json
from typing import Any

from tests.exam.case import Findings
from tests.exam.faults import Fault
from tests.exam.harness import Done, Lab

DOWN = 2.0


def not_finite(lab: Lab, found: Findings) -> None:
    """34, 35: NaN in a sample, an infinite gradient on one rank, a loss far out of line."""
    faults = [
        Fault("scale logits", 1, 3, "forward", nth=2),
        Fault("spoil gradient", 0, 6, "forward"),
        Fault("scale logits", 1, 15, "forward", value=5000.0),
    ]
    done = lab.run("numbers", faults=faults)
    found.expect("it ends well", done.code == 0)
    notes = {note["step"]: note for note in done.records("not_finite")}
    steps = {step["step"]: step for step in done.records("step")}
    found.expect("both steps were left out", set(notes) == {3, 6})
    skipped = [step for step in steps if not steps[step]["applied"]]
    found.expect("and no other", skipped == [3, 6])
    if set(notes) == {3, 6}:
        found.expect("NaN: the rank is named", list(notes[3]["ranks"]) == ["1"])
        found.expect("NaN: with one sample of its six", len(notes[3]["ranks"].get("1", [])) == 1)
        found.expect("infinite gradient: the rank is named", list(notes[6]["ranks"]) == ["0"])
        found.expect("NaN: the loss isn't shown as a number", steps[3]["loss"] is None)
        states = _states(done)
        found.expect("NaN: no weight moved", states[3] == states[2])
        found.expect("infinite: no weight moved", states[6] == states[5])
        found.show(f"samples {notes[3]['ranks']['1']}; gradient of rank 0 found by itself")
    spikes = done.records("spike")
    found.expect("the spike is told, and only that", [each["step"] for each in spikes] == [15])
    if spikes:
        found.expect("with the ids of its batch", len(spikes[0]["samples"]) == 12)


def broken_weights(lab: Lab, found: Findings) -> None:
    """34: weights that are no numbers on one rank; the run goes on from its last checkpoint."""
    done = lab.struck_on_four
    restarts = done.events("restart")
    found.expect("it ends well", done.code == 0)
    found.expect("one restart, after that of a kill", len(restarts) == 2)
    told = restarts[-1]["text"] if restarts else ""
    found.expect("rank and weight are named", told.startswith("rank 2: at step 4"))
    trace = lab.whole_on_four.trace
    found.expect("the trace is that of the run without a fault", done.trace == trace)
    found.show("found in the step itself, exact after one restart")


def memory(lab: Lab, found: Findings) -> None:
    """36: an allocation fails on one rank."""
    done = lab.run("memory", "train.micro_batch=2", faults=[Fault("eat memory", 1, 4)])
    events = done.events("failed")
    found.expect("code 2: a person has to act", done.code == 2)
    found.expect("the rank and the step are named", "rank 1: out of memory at step 4" in done.error)
    found.expect("and the batch", "rows of up to" in done.error)
    found.expect("and the cheapest change", "set train.micro_batch: 1" in done.error)
    seconds = done.after_fault(0, events[0]) if events else float("inf")
    found.expect(f"all stopped within {DOWN:g} s", seconds <= DOWN)
    found.expect("nobody left", not done.left)
    found.show(f"all stopped in {seconds:.2f} s")


def stepping_down(lab: Lab, found: Findings) -> None:
    """36: with `on_oom: reduce_micro_batch` it goes on, and computes the same."""
    plain = ("train.micro_batch=2", "train.steps=8", "adapter.dropout=0")
    expected = lab.run("as-before", *plain, "launch.processes=1")
    reduce = "train.on_oom=reduce_micro_batch"
    fault = Fault("eat memory", 1, 4, always=True, value=1)
    done = lab.run("smaller", *plain, reduce, faults=[fault])
    found.expect("it ends well", done.code == expected.code == 0)
    found.expect("one step down", len(done.events("restart")) == 1)
    one, other = _losses(done), _losses(expected)
    found.expect("every step is there", len(one) == len(other) == 8)
    if len(one) == len(other):
        apart = max(abs(a - b) / b for a, b in zip(one, other, strict=True))
        found.expect("the same losses", apart < 1e-6)
        found.show(f"micro-batch 2 to 1, losses within {apart:.1e}")


def _losses(done: Done) -> list[float]:
    return [step["loss"] for step in done.records("step")]


def _states(done: Done) -> dict[int, str]:
    """The digest of the weights and the optimizer after each step."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.trace.splitlines()]
    return {line["step"]: line["state"] for line in lines}
