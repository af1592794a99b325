"""The report in a real browser: light and dark, wide and narrow, without a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.exam.case import Findings
from tests.exam.seeing_lab import PICTURES, SeeingCase, SeeingLab, Theme

WIDTHS = (1280, 390)
THEMES: tuple[Theme, ...] = ("light", "dark")
MOST_BYTES = 500_000
LOOK = """() => {
  const named = (svg) => (svg.getAttribute("aria-labelledby") || "").split(" ")
    .every((id) => (document.getElementById(id)?.textContent || "").trim());
  const figures = [...document.querySelectorAll("figure")];
  return {
    figures: figures.length,
    nameless: figures.filter((f) => !f.querySelector("figcaption")?.textContent
      || ![...f.querySelectorAll("svg")].every((s) => s.getAttribute("role") === "img" && named(s)))
      .length,
    empty: [...document.querySelectorAll("svg")]
      .filter((s) => s.getBoundingClientRect().height < 20).length,
    overflow: document.documentElement.scrollWidth - window.innerWidth,
    paper: getComputedStyle(document.body).backgroundColor,
    headings: [...document.querySelectorAll("h2")].map((h) => h.textContent),
  };
}"""
PAPER_WIDTH = 718  # of A4, without its margins
CUT_OFF = """() => [...document.querySelectorAll(".wide")]
  .filter((e) => e.scrollWidth > e.clientWidth + 1)
  .map((e) => e.getAttribute("aria-label") ?? e.textContent.slice(0, 40))"""
PARTS = {
    "Answers before and after", "Loss", "Steps", "Where the time of a step went", "What happened",
    "Data", "What was proven", "Next", "The job", "Versions and digests",
}  # fmt: skip


def page_of_a_run(lab: SeeingLab, found: Findings) -> None:
    """The page that the run itself has written."""
    page = lab.run / "report.html"
    _look_at(lab, found, page, PARTS)
    if lab.pictures:
        _picture(lab, page, "report_light.png", "light", from_heading="Loss")
        _picture(lab, page, "report_dark.png", "dark", from_heading=lab.run.name)


def compared(lab: SeeingLab, found: Findings) -> None:
    """The run beside another with twice its learning rate in the job, and nothing else."""
    other = lab.folder / "other"
    if not other.is_dir():
        shutil.copytree(lab.run, other, ignore=shutil.ignore_patterns("checkpoints", "result"))
        job = other / "job.yaml"
        text = job.read_text("utf-8").replace("learning_rate: 0.0008", "learning_rate: 0.0016")
        job.write_text(text, "utf-8")
    target = lab.folder / "comparison.html"
    done = lab.shardtune("report", str(lab.run), str(other), "--out", str(target))
    found.expect(f"`report` of two runs ends with 0 ({done.stderr[:200]})", done.returncode == 0)
    _look_at(lab, found, target, {"What the jobs differ in", "Loss, by tokens"})
    with lab.open(target, theme="light", width=1280) as seen:
        rows = seen.page.locator("section").first.locator("tbody tr").all_inner_texts()
    found.expect(f"the jobs differ in one value: {rows}", len(rows) == 1)
    found.expect("the rate", "train.learning_rate" in rows[0] and "0.0016" in rows[0])


def hovering(lab: SeeingLab, found: Findings) -> None:
    """Values appear under the pointer; without scripts the page is whole, too."""
    page = lab.run / "report.html"
    with lab.open(page, theme="light", width=1280) as seen:
        chart = seen.page.locator("figure.large svg").first
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        seen.page.mouse.move(box["x"] + box["width"] * 0.98, box["y"] + box["height"] / 2)
        tip = seen.page.locator(".tip:visible").inner_text()
    losses = [
        line["loss"]
        for line in map(json.loads, (lab.run / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "step"
    ]
    found.expect(f"the last loss is shown: {tip!r}", f"{losses[-1]:.4f}"[:5] in tip)


def hostile_answer(lab: SeeingLab, found: Findings) -> None:
    """What a model said stays text, in a browser that would run it."""
    other = lab.folder / "hostile"
    if not other.is_dir():
        shutil.copytree(lab.run, other, ignore=shutil.ignore_patterns("checkpoints", "result"))
        report = json.loads((other / "report.json").read_text("utf-8"))
        evil = "</pre><script>document.title='run'</script><img src='http://x.example/' onerror=x>"
        for sample in report["samples"]:
            sample.update(prompt=evil, before=evil, after=evil, reference=evil)
        (other / "report.json").write_text(json.dumps(report), "utf-8")
    target = lab.folder / "hostile.html"
    lab.shardtune("report", str(other), "--out", str(target))
    with lab.open(target, theme="light", width=1280) as seen:
        title, images = seen.page.title(), seen.page.locator("img").count()
        shown = seen.page.locator("article").first.inner_text()
    found.expect("no script of it runs", title == "hostile: done")
    found.expect("no picture of it is asked for", not images and not seen.requests)
    found.expect("it is shown as it is", "<script>document.title" in shown)


def after_a_fault(lab: SeeingLab, found: Findings) -> None:
    """A rank is killed; what the launcher leaves is a page that says so, and how to go on."""
    target = lab.folder / "faulty"
    command = ["train", "recipes/quickstart.yaml", "model.name=tiny", "train.steps=4000",
               "evaluate.samples=0", "save.every=10", "launch.restarts=0",
               f"save.directory={target}", "--overwrite"]  # fmt: skip
    with lab.started(*command) as process:
        metrics = target / "metrics.jsonl"
        lab.wait_until(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 30, process)
        max(lab.ranks_of(process), key=lambda each: each.pid).kill()
        process.communicate(timeout=60)
    found.expect("the run has failed", process.returncode == 1)
    with lab.open(target / "report.html", theme="light", width=390) as seen:
        state = seen.page.locator(".state").inner_text()
        text = seen.page.locator("main").inner_text()
    found.expect(f"the page says failed ({state})", state == "failed")
    found.expect("the launcher's words are in it", "What the launcher saw" in text)
    found.expect("it says how to go on", "faulty/job.yaml --resume" in text)
    found.expect(f"no error ({seen.problems})", not seen.problems)


def _look_at(lab: SeeingLab, found: Findings, page: Path, parts: set[str]) -> None:
    size = page.stat().st_size
    found.expect(f"under {MOST_BYTES:,} bytes ({size:,})", size < MOST_BYTES)
    papers = set()
    figures = 0
    for theme in THEMES:
        for width in WIDTHS:
            with lab.open(page, theme=theme, width=width) as seen:
                facts = seen.page.evaluate(LOOK)
                seen.page.emulate_media(media="print")
                facts["printed"] = seen.page.evaluate(LOOK)["paper"]
                seen.page.set_viewport_size({"width": PAPER_WIDTH, "height": 1000})
                cut = seen.page.evaluate(CUT_OFF)
            where = f"{theme}, {width} px"
            found.expect(f"{where}: no error ({seen.problems})", not seen.problems)
            found.expect(f"{where}: no request ({seen.requests})", not seen.requests)
            found.expect(f"{where}: figures with title and text", not facts["nameless"])
            found.expect(f"{where}: all figures are drawn", not facts["empty"])
            found.expect(f"{where}: nothing beside the page", facts["overflow"] <= 0)
            found.expect(
                f"{where}: {parts - set(facts['headings'])}", parts <= set(facts["headings"])
            )
            papers.add(facts["paper"])
            found.expect(f"{where}: prints on white", facts["printed"] == "rgb(255, 255, 255)")
            found.expect(f"{where}: nothing is cut off on paper ({cut})", not cut)
            figures = facts["figures"]
    found.expect("there are figures", figures > 0)
    found.expect(f"light and dark differ ({papers})", len(papers) == 2)
    found.show(f"{figures} figures, {size / 1000:.0f} kB, {len(THEMES) * len(WIDTHS)} views")


def _picture(lab: SeeingLab, page: Path, name: str, theme: Theme, *, from_heading: str) -> None:
    with lab.open(page, theme=theme, width=1280) as seen:
        heading = seen.page.get_by_role("heading", name=from_heading, exact=True)
        heading.evaluate("heading => heading.scrollIntoView()")
        seen.page.screenshot(path=PICTURES / name)


CASES = (
    SeeingCase("report", "the page of a run", page_of_a_run),
    SeeingCase("report-compare", "two runs beside each other", compared),
    SeeingCase("report-hover", "values under the pointer", hovering),
    SeeingCase("report-fault", "the page of a run whose rank was killed", after_a_fault),
    SeeingCase("report-hostile", "an answer that is markup", hostile_answer),
)
