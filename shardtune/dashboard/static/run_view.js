// The page of one run, which follows it while it trains.

import {Chart} from "./chart.js";
import {copyButton, duration, h, number, stateBadge, table, tell} from "./dom.js";
import {outputSection} from "./output_view.js";
import {ask, Gone, listen, open, pause} from "./server.js";

const REDRAW = 1000;  // milliseconds at least between two drawings

const SMOOTHED = 200;  // points from which on a smoothed line is drawn, too

export async function runView(main, signal, id) {
  const path = `api/runs/${id}`;
  const [details, curves] = await Promise.all([ask(path, {}, signal), ask(`${path}/curves`, {}, signal)]);
  let range = [null, null];
  const zoomed = (from, to) => { range = [from, to]; redraw(); };
  const loss = new Chart({title: "Loss", unit: "mean cross-entropy of trained tokens", large: true, zoomed});
  const scores = new Chart({title: "Score of each task", unit: "from 0 to 1", large: true, zoomed});
  const charts = details.figures.map(({title, unit, from_zero}) => new Chart({title, unit, fromZero: from_zero, zoomed}));
  const heading = h("h2", {}), facts = h("dl", {class: "facts"}), progress = h("progress", {"aria-label": "Steps done"});
  const cause = h("p", {class: "failed", role: "status"}), warnings = h("ul"), after = h("div");
  const whole = h("button", {type: "button", hidden: true, onclick: () => zoomed(null, null)}, "Show all steps");
  main.replaceChildren(heading, cause, facts, progress, h("div", {class: "bar"}, whole), warnings,
    h("div", {class: "charts"}, loss.element, scores.element, charts.map(chart => chart.element)),
    after, outputSection(id, signal), jobSection(details));

  function showRun(run) {
    document.title = `${run.name} – shardtune`;
    heading.replaceChildren(run.name, " ", stateBadge(run.state));
    cause.textContent = run.cause;
    const left = run.state === "running" ? duration(run.seconds_left) : "–";
    const told = {Step: run.steps ? `${run.step} of ${run.steps}` : run.step, Loss: number(run.loss, 5),
      "Time left": left, "Tokens/s": number(run.tokens_per_second), Model: run.model, Strategy: run.strategy, Adapter: run.adapter};
    facts.replaceChildren(...Object.entries(told).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value) || "–"))));
    progress.max = run.steps || 1;
    progress.value = run.steps ? run.step : 0;
  }

  function showCurves(found) {
    const marks = found.warnings, {figures, smoothed, evaluations, tasks} = found;
    loss.show([
      {name: "training", colour: 0, xs: figures.loss.steps, ys: figures.loss.values, faint: figures.loss.steps.length > SMOOTHED},
      ...(figures.loss.steps.length > SMOOTHED ? [{name: "training, smoothed", colour: 0, xs: smoothed.steps, ys: smoothed.values}] : []),
      ...Object.entries(evaluations).map(([name, curve], at) => ({name: `${name}, held out`, colour: at + 1, xs: curve.steps, ys: curve.values, dots: curve.steps.length < 80})),
    ], {marks});
    scores.show(Object.entries(tasks).map(([name, curve], at) => ({name, colour: at, xs: curve.steps, ys: curve.values, dots: curve.steps.length < 80})), {marks});
    scores.element.hidden = !scores.lines.length;
    for (const [at, figure] of details.figures.entries()) {
      const curve = figures[figure.name], expected = details.forecast?.[figure.forecast];
      charts[at].element.hidden = curve.values.every(value => value === null);
      charts[at].show([
        {name: figure.title, colour: 0, xs: curve.steps, ys: curve.values},
        ...(expected && curve.steps.length ? [{name: "forecast", colour: 7, xs: [curve.steps[0], curve.steps.at(-1)], ys: [expected, expected], dashed: true}] : []),
      ], {marks});
    }
    whole.hidden = range[0] === null && range[1] === null;
    warnings.replaceChildren(...found.warnings.slice(-5).map(([step, fact]) => h("li", {class: "stopped"}, `step ${step}: ${fact}`)));
  }

  let drawing = false, due = false;
  async function redraw() {
    if (drawing) { due = true; return; }
    drawing = true;
    try {
      do {
        due = false;
        showCurves(await ask(`${path}/curves`, {from: range[0], to: range[1]}, signal));
        if (due) await pause(REDRAW, signal);
      } while (due);
    } catch (error) {
      if (!signal.aborted) tell(error.message, true);
    } finally { drawing = false; }
  }

  showRun(details.run);
  showCurves(curves);
  after.replaceChildren(...endSections(details));
  let state = details.run.state, gone = false;
  while (!gone) {
    try {
      await listen(`${path}/live`, signal, event => {
        if (event.kind === "gone") { gone = true; return; }
        tell("");
        showRun(event.run);
        redraw();
        if (event.run.state !== state) {
          state = event.run.state;
          ask(path, {}, signal).then(found => after.replaceChildren(...endSections(found))).catch(() => {});
        }
      });
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Gone) gone = true;
      else tell(`${error.message}; trying again`, true);
    }
    if (!gone) await pause(2000, signal);
  }
  tell("This run's folder is gone. What is shown is what was there last.", true);
}

function endSections({run, evaluation, tasks, samples, events, saves, has_page, result}) {
  const found = [];
  const sets = Object.entries(evaluation);
  if (sets.length) {
    found.push(table("Held-out sets, before and after", ["set", "loss before", "loss after", "perplexity after", "accuracy after"], sets.map(([name, {before, after}]) =>
      h("tr", {}, h("th", {scope: "row"}, name), [before?.loss, after.loss, after.perplexity, after.accuracy].map(value => h("td", {}, number(value)))))));
  }
  const asked = Object.entries(tasks);
  if (asked.length) {
    found.push(table("Tasks, before and after", ["task", "metric", "score before", "score after", "95 % interval"], asked.map(([name, {before, after}]) =>
      h("tr", {}, h("th", {scope: "row"}, name), [after.metric, number(before?.score), number(after.score), `${number(after.low)} to ${number(after.high)}`].map(value => h("td", {}, value))))));
  }
  for (const sample of samples) {
    found.push(h("details", {}, h("summary", {}, `Answer to: ${sample.prompt.slice(0, 120)}`),
      ["before", "after", "reference"].map(name => [h("h4", {}, name), h("pre", {}, sample[name])])));
  }
  const told = [
    ...events.map(event => [event.time, event.kind, event.text || event.cause || slowRank(event)]),
    ...saves.map(save => [save.time, "checkpoint", `step ${save.step}`]),
  ].sort((one, other) => one[0] - other[0]);
  if (told.length) {
    found.push(table("Faults, restarts and checkpoints", ["when", "what", ""], told.map(([time, kind, text]) =>
      h("tr", {}, h("td", {}, new Date(time * 1000).toLocaleString()), h("td", {}, kind), h("td", {}, h("pre", {}, text))))));
  }
  if (has_page) found.push(h("p", {}, h("button", {type: "button", onclick: () => open(`api/runs/${run.id}/report`)}, "Open the run's report")));
  if (result) found.push(h("p", {}, "Result: ", h("code", {}, result)));
  return found;
}

function slowRank({rank, phase, seconds, others}) {
  return `rank ${rank} is slow: ${number(seconds, 3)} s a step in ${phase}, the others ${number(others, 3)} s`;
}

function jobSection({job, path, environment}) {
  const versions = environment ? Object.entries(environment.packages).map(([name, version]) => `${name} ${version}`).join(", ") : "";
  return h("details", {}, h("summary", {}, "Job, folder and versions"),
    h("p", {}, "Folder: ", h("code", {}, path)),
    h("p", {class: "soft"}, environment ? `shardtune ${environment.shardtune}, Python ${environment.python}, ${versions}; ${environment.ranks} ranks` : ""),
    copyButton("Copy the job", () => job), h("pre", {class: "job", tabindex: 0, "aria-label": "job.yaml"}, job));
}
