// Several runs over each other, by tokens or by steps, and what their jobs have different.

import {Chart} from "./chart.js";
import {h, number, stateBadge, table} from "./dom.js";
import {ask, pause} from "./server.js";

const EVERY = 3000;
const SMOOTHED = 100;  // points from which on a smoothed line is drawn, too: the more runs, the fewer points has each

export async function compareView(main, signal, ids) {
  const chart = new Chart({title: "Loss", unit: "", large: true});
  const held = new Chart({title: "Held-out loss", unit: "", large: true});
  const scores = new Chart({title: "Score of each task", unit: "from 0 to 1", large: true});
  const axis = h("select", {onchange: () => draw()}, new Option("tokens", "tokens"), new Option("steps", "steps"));
  const below = h("div");
  main.replaceChildren(h("h2", {}, `${ids.length} runs compared`),
    h("div", {class: "bar"}, h("label", {class: "field"}, "Aligned by", axis)), below,
    h("div", {class: "charts"}, chart.element, held.element, scores.element));
  document.title = "Comparison – shardtune";
  let found = null;

  function draw() {
    const by = axis.value, xName = by === "tokens" ? "tokens" : "step";
    const lines = found.runs.flatMap(({run, loss, smoothed}, at) => loss.steps.length > SMOOTHED ? [
      {name: run.name, colour: at, xs: smoothed[by], ys: smoothed.values},
      {name: `${run.name}, each step`, colour: at, xs: loss[by], ys: loss.values, faint: true},
    ] : [{name: run.name, colour: at, xs: loss[by], ys: loss.values}]);
    chart.show(lines, {xName});
    for (const [one, kind] of [[held, "evaluations"], [scores, "tasks"]]) {
      one.show(found.runs.flatMap((each, at) => Object.entries(each[kind]).map(([name, curve]) =>
        ({name: `${each.run.name}: ${name}`, colour: at, xs: curve[by], ys: curve.values, dots: true}))), {xName});
      one.element.hidden = !one.lines.length;
    }
  }

  function tables() {
    const names = found.runs.map(({run}) => run.name);
    const colour = at => h("span", {class: `key c${at % 8}${at < 8 ? "" : " dashed"}`});
    const keyName = key => h("th", {scope: "row", class: "key-name"}, key.split(/(?<=[._])/).flatMap(part => [part, h("wbr")]));
    return [
      table("Runs", ["run", "state", "step", "loss", "tokens/s"], found.runs.map(({run}, at) => h("tr", {},
        h("th", {scope: "row"}, colour(at), h("a", {href: `#/run/${run.id}`}, run.name)), h("td", {}, stateBadge(run.state)),
        [run.step, run.loss, run.tokens_per_second].map(value => h("td", {}, number(value)))))),
      found.differences.length ? table(`Where the jobs differ (${found.alike} values are the same)`, ["value", ...names],
        found.differences.map(({key, values}) => h("tr", {}, keyName(key),
          values.map(value => h("td", {}, value === null ? "–" : String(value))))))
        : h("p", {}, "The jobs are the same."),
    ];
  }

  for (let shown = "";;) {
    const next = await ask("api/compare", {run: ids}, signal);
    const text = JSON.stringify(next);
    if (text !== shown) {
      shown = text;
      found = next;
      below.replaceChildren(...tables());
      draw();
    }
    await pause(EVERY, signal);
  }
}
