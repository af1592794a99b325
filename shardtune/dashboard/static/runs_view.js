// The list of all runs: searched, ticked for comparison, and asked for again every two seconds.

import {sparkline} from "./chart.js";
import {ago, duration, h, number, stateBadge, tell} from "./dom.js";
import {ask, pause} from "./server.js";

const EVERY = 2000;
const ticked = new Set();  // stays while other pages are visited
let query = "";

export async function runsView(main, signal) {
  const search = h("input", {type: "search", value: query, placeholder: "strategy=fsdp lora rank=16 loss<2",
    "aria-describedby": "search-help", oninput: () => { query = search.value; refresh(); }});
  const compare = h("button", {type: "button", class: "main", onclick: () => { location.hash = `#/compare/${[...ticked].join(",")}`; }});
  const count = h("p", {class: "soft", role: "status"});
  const notes = h("ul", {class: "soft"});
  const body = h("tbody");
  const heading = (text, kind = "") => h("th", {scope: "col", class: kind}, text);
  main.replaceChildren(
    h("div", {class: "bar"},
      h("label", {class: "field grow"}, "Search by name, state or job values", search), compare),
    h("p", {id: "search-help", hidden: true}, "Words and key=value pairs, all of which have to be true; numbers also with < and >."),
    count,
    h("div", {class: "wide"}, h("table", {class: "runs"},
      h("caption", {}, "Runs"),
      h("thead", {}, h("tr", {}, heading("Compare"), heading("Run"), heading("State"), heading("Loss"), heading("", "number"),
        heading("Step", "number"), heading("Time left", "number"), heading("Model", "optional"), heading("Strategy", "optional"), heading("Written", "optional"))),
      body)),
    notes);
  const lines = new Map();

  function showTicks() {
    compare.textContent = ticked.size ? `Compare ${ticked.size} runs` : "Compare";
    compare.disabled = ticked.size < 2;
  }

  function show(found) {
    count.textContent = found.runs.length === found.all ? `${found.all} runs in ${found.folder}` : `${found.runs.length} of ${found.all} runs in ${found.folder}`;
    notes.replaceChildren(...found.notes.slice(0, 5).map(each => h("li", {}, each)),
      ...(found.notes.length > 5 ? [h("li", {}, `and ${found.notes.length - 5} more`)] : []));
    const wanted = found.runs.map(run => {
      if (!lines.has(run.id)) lines.set(run.id, new RunLine(run, showTicks));
      return lines.get(run.id).update(run);
    });
    // Moving a row takes the focus away from it: only where the order has changed.
    if (wanted.length !== body.children.length || wanted.some((row, at) => body.children[at] !== row)) {
      const focused = body.contains(document.activeElement) ? document.activeElement : null;
      body.replaceChildren(...wanted);
      focused?.focus();
    }
    const there = new Set(found.runs.map(run => run.id));
    if (!query) for (const id of ticked) if (!there.has(id)) ticked.delete(id);
    showTicks();
  }

  let asked = 0;
  async function refresh() {
    const mine = ++asked;
    try {
      const found = await ask("api/runs", {q: query}, signal);
      if (mine === asked) { show(found); tell(""); }
    } catch (error) {
      if (!signal.aborted) tell(error.message, true);
    }
  }

  showTicks();
  await refresh();
  for (;;) {
    await pause(EVERY, signal);
    if (!document.hidden) await refresh();
  }
}

class RunLine {
  constructor(run, changed) {
    const box = h("input", {type: "checkbox", "aria-label": `Compare ${run.name}`, onchange: () => {
      if (box.checked) ticked.add(run.id); else ticked.delete(run.id);
      changed();
    }});
    box.checked = ticked.has(run.id);
    this.cause = h("span", {class: "cause"});
    const name = h("th", {scope: "row"}, h("a", {href: `#/run/${run.id}`}, run.name), this.cause);
    const cell = (kind = "") => h("td", {class: kind});
    this.cells = {state: cell(), spark: cell(), loss: cell("number"), step: cell("number"), left: cell("number"),
      model: cell("optional"), strategy: cell("optional"), written: cell("optional")};
    this.row = h("tr", {}, h("td", {}, box), name, Object.values(this.cells));
  }

  update(run) {
    const {state, spark, loss, step, left, model, strategy, written} = this.cells;
    written.textContent = ago(run.written);
    const now = JSON.stringify(run);
    if (now === this.shown) return this.row;
    this.shown = now;
    state.replaceChildren(stateBadge(run.state));
    spark.replaceChildren(sparkline(run.spark));
    loss.textContent = number(run.loss);
    step.textContent = run.steps ? `${run.step} / ${run.steps}` : run.step;
    left.textContent = duration(run.seconds_left);
    model.textContent = model.title = run.model;
    strategy.textContent = run.adapter && run.adapter !== "none" ? `${run.strategy}, ${run.adapter}` : run.strategy;
    this.cause.textContent = run.cause;
    return this.row;
  }
}
