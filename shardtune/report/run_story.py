"""A run in words: the verdict, what was proven, and the commands that make sense now."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath

from shardtune.config.job import Job
from shardtune.core.runs.eval_figures import EvalFigures
from shardtune.core.runs.run_history import RunHistory
from shardtune.core.runs.run_report import Compared
from shardtune.report.duration import duration

_NAME = r"[^\s/'\"(){}\[\],:;<>]+"
_PATH = re.compile(rf"(?<![\w./~-])(?:~|/{_NAME})(?:/{_NAME})+")
"""An absolute path of two names or more; none of a URL."""


def verdict(run: RunHistory) -> str:
    """How the run went, in one sentence."""
    model = public(str(run.job.get("model.name") or "the model"))
    return f"{_state(run, model)}{_result(run)}{_gain(run)}."


def _state(run: RunHistory, model: str) -> str:
    after = f"after {_length(run)}" if run.steps else "before its first step"
    if run.state == "done":
        return f"{model} was trained" + (f" for {_length(run)}" if run.steps else "")
    if run.state == "stopped":
        asked = "stopped on request" if run.report is not None else "stopped or preempted"
        return f"{model}: {asked} {after}"
    if run.state == "running":
        return (
            f"{model} is in training, {_length(run)} so far" if run.steps else f"{model}: {after}"
        )
    cause = next((each.cause for each in reversed(run.events) if each.kind == "failed"), "")
    return f"{model}: failed {after}" + (f" ({public_text(cause)})" if cause else "")


def _length(run: RunHistory) -> str:
    done, seconds = run.steps[-1].step, sum(step.seconds for step in run.steps)
    of = f" of {run.total_steps:,}" if run.total_steps and run.total_steps != done else ""
    steps = f"{done:,}{of} steps" if of else counted(done, "step", "steps")
    clock = duration(seconds) if seconds >= 10 else f"{seconds:.1f} s"
    return f"{steps} on {run.tokens[-1]:,} tokens in {clock} of training"


def counted(number: int, one: str, many: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {one if number == 1 else many}"


def _result(run: RunHistory) -> str:
    """Why it ended early, and which step the result is of, where it isn't the last."""
    report, said = run.report, ""
    if report is None:
        return ""
    if (stop := report.early_stop) is not None:
        said = f"; it ended early, {stop.waited} evaluations after the best {stop.metric}"
    if report.result.step is None:
        return said
    best = report.best
    why = f", the best by {best.metric} ({best.value:.4g})" if best is not None else ""
    return f"{said}; the result is of step {report.result.step:,}{why}"


def _gain(run: RunHistory) -> str:
    """Of each held-out set, the loss before and now, or at the step that the result is of; without
    any set, of the training itself."""
    report, said = run.report, []
    until = report.result.step if report is not None else None
    for name, found in run.evaluations.items():
        first, last = found[0].loss, found[-1].loss
        if until is not None and report is not None and name in report.evaluation:
            last = report.evaluation[name].after.loss
        elif len(found) < 2:
            continue
        said.append(f"{_moved(first, last)} on {name}")
    if said:
        left = len(said) - 3
        more = f" and {counted(left, 'more set', 'more sets')}" if left > 0 else ""
        return "; the held-out loss " + ", ".join(said[:3]) + more
    losses = [each.loss for each in run.steps if until is None or each.step <= until]
    return f"; the training loss {_moved(losses[0], losses[-1])}" if len(losses) > 1 else ""


def _moved(before: float | None, after: float | None) -> str:
    """What became of a loss; None is one that wasn't finite."""
    if after is None:
        return "is no longer finite" if before is not None else "was never finite"
    if before is None:
        return f"is {after:.4g}"
    shown, now = f"{before:.4g}", f"{after:.4g}"
    if shown == now:
        return f"stayed at {now}"
    change = ""
    if before:
        share = after / before - 1
        change = f" ({share:+.0%})" if abs(share) >= 0.01 else f" ({share:+.2%})"
    return f"{'fell' if after < before else 'rose'} from {shown} to {now}{change}"


def proofs(run: RunHistory, job: Job | None) -> list[tuple[str, str]]:
    """What this run has shown of itself: the claim, and what was compared."""
    found = []
    report = run.report
    if report is not None:
        within = report.result.largest_difference
        logits = "" if within is None else f"; logits {_within(within)} those before saving"
        of = "" if report.result.step is None else f" to those of step {report.result.step:,}"
        found.append(("the result is what was trained", f"read back: weights equal{of}{logits}"))
        if report.forecast is not None:
            held = report.forecast.held_bytes
            pairs = (held.params, held.grads, held.optim)
            same = all(pair.predicted == pair.measured for pair in pairs)
            fact = f"{_size(pairs)} a rank holds between steps"
            found.append(
                ("memory is as declared", f"{fact}, {'exactly' if same else 'not as'} predicted")
            )
    if run.steps and run.data is not None and run.data.packing:
        fact = "the second of two came out as it does alone, compared before step 1"
        found.append(("packed documents don't see each other", fact))
    if run.data is not None:
        documents = sum(each.documents for each in run.data.sets if each.side == "train")
        ends = sum(each.ends_trained for each in run.data.sets if each.side == "train")
        fact = f"{ends:,} of {documents:,} training documents"
        found.append(("documents that end with a trained stop token", fact))
    if run.environment is not None and run.environment.ranks > 1 and run.steps:
        fact = f"every value of it was compared on all {run.environment.ranks} ranks"
        found.append(("the ranks trained the same job", fact))
    if job is not None and job.save.trace:
        found.append(("the run can be repeated to the bit", "trace.jsonl has each step's digests"))
    return found


def _within(difference: float) -> str:
    return f"within {difference:.2g} of" if difference else "equal to"


def _size(pairs: tuple[Compared, ...]) -> str:
    held = sum(pair.measured for pair in pairs)
    return f"{held / 2**30:.3g} GiB" if held >= 2**28 else f"{held / 2**20:.3g} MiB"


def commands(run: RunHistory, job: Job | None) -> list[tuple[str, str]]:
    """What to do next: a word for it, and the line to copy."""
    folder = public_folder(run)
    at = shlex.quote(folder)
    found = []
    if run.state in ("failed", "stopped"):
        found.append(("resume", f"shardtune train {shlex.quote(f'{folder}/job.yaml')} --resume"))
    if run.report is None:
        return [*found, ("look again", f"shardtune report {at}")]
    found.append(("ask", f'shardtune generate {at} --prompt "..."'))
    decoder = run.data is None or not run.data.paired
    if decoder:  # a model with an encoder holds no dialogue
        found.append(("serve", f"shardtune serve {at}"))
    if job is None or job.trains != "full fine-tune":
        found.append(("merge", f"shardtune merge {at} {shlex.quote(f'merged/{run.name}')}"))
    return [
        *found,
        (
            "export",
            f"shardtune export {at} --to {'gguf' if decoder else 'hf'} "
            f"{shlex.quote(f'out/{run.name}')}",
        ),
        ("verify", f"shardtune verify {at}"),
        (
            "repeat",
            f"shardtune train {shlex.quote(f'{folder}/job.yaml')} save.directory=runs/again",
        ),
    ]


def public_folder(run: RunHistory) -> str:
    """The run's folder as its commands name it: as it was given, or by its name alone where that
    would show where it lies on this machine."""
    given = run.report.directory if run.report is not None else str(run.path)
    return run.name if given.startswith(("/", "~")) or ".." in PurePath(given).parts else given


def public(value: str) -> str:
    """A value without the folders of this machine that lead to it."""
    if value.startswith(("/", "~/")) and len(value) > 2 and "\n" not in value:
        return f".../{PurePath(value).name}"
    return value


def public_text(text: str) -> str:
    """Text of a person or a library without the folders of this machine, as far as a path can be
    told from other text."""
    return _PATH.sub(lambda found: f".../{PurePath(found.group()).name}", text)


def figures(found: EvalFigures | None) -> tuple[str, str, str]:
    """Loss, perplexity and accuracy as a table shows them."""
    if found is None or found.loss is None:
        return "unknown", "", ""
    perplexity = "" if found.perplexity is None else f"{found.perplexity:.3g}"
    return (
        f"{found.loss:.4f}",
        perplexity,
        "" if found.accuracy is None else f"{found.accuracy:.1%}",
    )
