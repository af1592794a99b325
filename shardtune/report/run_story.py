"""A run in words: the verdict, what was proven, and the commands that make sense now."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath

from shardtune.config.job import Job
from shardtune.core.eval_figures import EvalFigures
from shardtune.core.run_history import RunHistory
from shardtune.core.run_report import Compared
from shardtune.report.duration import duration

_NAME = r"[^\s/'\"(){}\[\],:;<>]+"
_PATH = re.compile(rf"(?<![\w./~-])(?:~|/{_NAME})(?:/{_NAME})+")
"""An absolute path of two names or more; none of a URL."""


def verdict(run: RunHistory) -> str:
    """How the run went, in one sentence."""
    model = public(str(run.job.get("model.name") or "the model"))
    return f"{_state(run, model)}{_result(run)}{_gain(run)}."


def _state(run: RunHistory, model: str) -> str:
    done = run.steps[-1].step if run.steps else 0
    of = f" of {run.total_steps:,}" if run.total_steps and run.total_steps != done else ""
    tokens = f"{run.tokens[-1]:,} tokens" if run.tokens else "no tokens"
    seconds = sum(step.seconds for step in run.steps)
    length = f"{done:,}{of} steps on {tokens} in {duration(seconds)} of training"
    if run.state == "done":
        return f"{model} was trained for {length}"
    if run.state == "stopped":
        return f"{model}: stopped on request after {length}"
    if run.state == "running":
        return f"{model} is in training, {length} so far"
    cause = next((each.cause for each in reversed(run.events) if each.kind == "failed"), "")
    return f"{model}: failed after {length}" + (f" ({public_text(cause)})" if cause else "")


def _result(run: RunHistory) -> str:
    """Which step the result is of, where it isn't the last."""
    report = run.report
    if report is None or report.result.step is None:
        return ""
    best = report.best
    why = f", the best by {best.metric} ({best.value:.4g})" if best is not None else ""
    return f"; the result is of step {report.result.step:,}{why}"


def _gain(run: RunHistory) -> str:
    """Of each held-out set, the loss before and now, or at the step that the result is of; without
    any set, of the training itself."""
    report, said = run.report, []
    until = report.result.step if report is not None else None
    for name, found in run.evaluations.items():
        known = [each.loss for each in found if each.loss is not None]
        last = known[-1] if len(known) > 1 else None
        if until is not None and report is not None and name in report.evaluation:
            last = report.evaluation[name].after.loss
        if known and last is not None:
            said.append(f"{_moved(known[0], last)} on {name}")
    if said:
        more = f" and {len(said) - 3} more sets" if len(said) > 3 else ""
        return "; the held-out loss " + ", ".join(said[:3]) + more
    losses = [
        each.loss
        for each in run.steps
        if each.loss is not None and (until is None or each.step <= until)
    ]
    return f"; the training loss {_moved(losses[0], losses[-1])}" if len(losses) > 1 else ""


def _moved(before: float, after: float) -> str:
    change = f" ({after / before - 1:+.0%})" if before else ""
    verb = "fell" if after < before else "rose" if after > before else "stayed"
    return f"{verb} from {before:.4g} to {after:.4g}{change}"


def proofs(run: RunHistory, job: Job | None) -> list[tuple[str, str]]:
    """What this run has shown of itself: the claim, and what was compared."""
    found = []
    report = run.report
    if report is not None:
        within = report.result.largest_difference
        logits = "" if within is None else f"; logits within {within:.2g} of those before saving"
        of = "" if report.result.step is None else f" to those of step {report.result.step:,}"
        found.append(("the result is what was trained", f"read back: weights equal{of}{logits}"))
        if report.forecast is not None:
            held = report.forecast.held_bytes
            pairs = (held.params, held.grads, held.optim)
            same = all(pair.predicted == pair.measured for pair in pairs)
            fact = f"{_gib(pairs)} a rank holds between steps"
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


def _gib(pairs: tuple[Compared, ...]) -> str:
    return f"{sum(pair.measured for pair in pairs) / 2**30:.3g} GiB"


def commands(run: RunHistory, job: Job | None) -> list[tuple[str, str]]:
    """What to do next: a word for it, and the line to copy."""
    folder = public_folder(run)
    at = shlex.quote(folder)
    found = []
    if run.state in ("failed", "stopped"):
        found.append(("resume", f"shardtune train {shlex.quote(f'{folder}/job.yaml')} --resume"))
    if run.report is None:
        return [*found, ("look again", f"shardtune report {at}")]
    found += [
        ("ask", f'shardtune generate {at} --prompt "..."'),
        ("serve", f"shardtune serve {at}"),
    ]
    if job is None or job.trains != "full fine-tune":
        found.append(("merge", f"shardtune merge {at} {shlex.quote(f'merged/{run.name}')}"))
    return [
        *found,
        ("export", f"shardtune export {at} --to gguf {shlex.quote(f'out/{run.name}')}"),
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
