"""A diagnosis, as a person wants to read it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardtune.core.runs.diagnosis import Diagnosis, Remedy

BAR_WIDTH = 30  # letters that all of the time is wide


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """What bounds the run, the share of each part beside its forecast, what would help, then the
    ranks and collectives to look at."""
    colour = "green" if found.healthy else "yellow"
    console.print(Text(found.verdict, f"bold {colour}"))
    console.print(Text(_measured(found), "dim"))
    _print_shares(found, console)
    _print_remedies(found, console)
    for slow in found.stragglers:
        console.print(
            Text(
                f"straggler: rank {slow.rank} takes {slow.times:g} times as long for its rows; "
                f"the others wait {slow.lost:.0%} of the time",
                "yellow",
            )
        )
    _print_collectives(found, console)
    for setting in found.settings:
        console.print(Text(f"{setting.key} = {setting.value}"))
        console.print(Text(f"    {setting.meaning}", "dim"))


def _measured(found: Diagnosis) -> str:
    how = "its profile" if found.profiled else "its metrics; `train --profile 5` tells more"
    words = f"{found.steps} steps of {found.step_seconds:.3g} s, from {how}"
    if found.efficiency is not None:
        words += f"; passes reach {found.efficiency:.0%} of the device's peak"
    return words


def _print_shares(found: Diagnosis, console: Console) -> None:
    console.print()
    heading = "forecast" if found.forecast else ""
    console.print(Text(f"{'':15}{'measured':>9}{heading:>10}", "bold"))
    for name, share in sorted(found.shares.items(), key=lambda each: -each[1]):
        told = ""
        if found.forecast is not None:
            told = f"{found.forecast.get(name, 0.0):.0%}"
        if share >= 0.005 or (found.forecast or {}).get(name, 0.0) >= 0.005:
            bar = "█" * round(BAR_WIDTH * share)
            console.print(Text(f"{name:15}{share:>9.0%}{told:>10}  {bar}"), no_wrap=True)


def _print_remedies(found: Diagnosis, console: Console) -> None:
    console.print()
    if not found.remedies:
        console.print(Text("No change of the job is known that would save time."))
    for remedy in found.remedies:
        console.print(Text(f"{remedy.gain:>4.0%} less time: {_about(remedy)}"))
        if remedy.line:
            console.print(Text(f"    {remedy.line}", "cyan"), soft_wrap=True)
    console.print()


def _about(remedy: Remedy) -> str:
    told = f"{remedy.fact} (by the {remedy.by})" if remedy.by == "planner" else remedy.fact
    return told if remedy.same_result else f"{told}; another result"


def _print_collectives(found: Diagnosis, console: Console) -> None:
    shown = [each for each in found.collectives if each.share >= 0.005]
    if not shown:
        return
    how = "measured" if all(each.measured for each in shown) else "as the planner shares it out"
    console.print(Text(f"exposed communication, {how}", "bold"))
    for each in shown:
        count = f"  {each.count:.0f} a step" if each.count is not None else ""
        link = f"  {each.link}" if each.link else ""
        console.print(Text(f"{each.op:28}{each.share:>6.1%}{count}{link}"))
