// The plan form: a model, a cluster, a strategy; the planner's table, its picture, and the job.

import {copyButton, duration, h, number, table, tell} from "./dom.js";
import {ask} from "./server.js";

export async function planView(main, signal) {
  document.title = "Plan – shardtune";
  const offered = await ask("api/plan/options", {}, signal);
  const options = (id, values) => h("datalist", {id}, values.map(value => h("option", {value})));
  const choice = (name, values) => h("select", {name}, values.map(value => new Option(value)));
  const count = (name, value, least) => h("input", {name, type: "number", min: least, step: 1, value, required: true});
  const field = (text, control) => h("label", {class: "field"}, text, control);
  const form = h("form", {class: "bar", onsubmit: event => { event.preventDefault(); plan(); }},
    field("Model", h("input", {name: "model", list: "models", required: true, value: offered.models.find(name => name.includes("Llama-3.1-8B")) ?? offered.models[0]})),
    field("Cluster", h("input", {name: "cluster", list: "clusters", required: true, value: `4x${offered.gpus.includes("A40") ? "A40" : offered.gpus[0]}`, "aria-describedby": "cluster-help"})),
    field("Strategy", choice("strategy", offered.strategies)),
    field("Adapter", choice("adapter", offered.adapters)),
    field("Frozen weights in", choice("quantization", offered.quantizations)),
    field("Rows a step", count("global_batch", 16, 1)),
    field("Tokens a row", count("sequence_length", 1024, 8)),
    field("Steps", count("steps", 1000, 1)),
    h("button", {class: "main"}, "Plan"));
  const answer = h("div");
  main.replaceChildren(h("h2", {}, "Plan before you rent"), form,
    h("p", {id: "cluster-help", class: "soft"}, "A cluster is [NODESx]GPUSxTYPE, such as 4xA40 or 2x8xH100-80GB@400Gbps."),
    options("models", offered.models), options("clusters", offered.gpus.map(gpu => `4x${gpu}`)), answer);

  async function plan(candidate = null) {
    const asked = Object.fromEntries(new FormData(form));
    if (candidate) asked.strategy = candidate;
    tell("Planning …");
    try {
      const found = await ask("api/plan", asked, signal);
      answer.replaceChildren(...sections(found, asked));
      tell(found.chosen ? `${found.chosen}: ${found.forecast.verdict}.` : "No such strategy can be had for this model and cluster.");
    } catch (error) {
      if (!signal.aborted) { answer.replaceChildren(); tell(error.message, true); }
    }
  }

  function sections({plan: {candidates, fix}, chosen, forecast, picture, job}, asked) {
    const rows = candidates.map(each => h("tr", {class: `${each.fits ? "" : "unfit"} ${each.name === chosen ? "chosen" : ""}`},
      h("th", {scope: "row"}, each.step_seconds === null ? each.name : h("button", {type: "button", class: "quiet", "aria-pressed": String(each.name === chosen), onclick: () => plan(each.name)}, each.name)),
      h("td", {}, each.verdict), h("td", {class: "number"}, each.fits ? `${number(each.step_seconds, 3)} s` : "–"), h("td", {class: "number"}, number(each.gpu_gib, 3)),
      h("td", {class: "number"}, each.micro_batch ?? "–"), h("td", {}, each.gradient_checkpointing ?? "–"), h("td", {}, each.why)));
    const made = [table(`Every strategy on ${asked.cluster}, the best first`, ["strategy", "verdict", "step", "GPU, GiB", "micro-batch", "checkpointing", "why"], rows)];
    if (fix) made.push(h("p", {class: "failed"}, `Nothing fits. ${fix}`));
    if (!chosen) return made;
    const memory = forecast.gpu_gib, step = forecast.step_seconds;
    const kinds = ["params", "gradients", "optimizer", "activations", "logits", "buffers", "overhead"];
    const parts = ["compute", "communication", "optimizer", "offload", "bubble", "data"];
    made.push(h("h3", {}, `${chosen}: ${forecast.verdict}`),
      h("dl", {class: "facts"}, Object.entries({
        "Needed on each GPU": `${number(memory.required, 3)} of ${number(memory.capacity, 3)} GiB`, "A step": `${number(step.total, 3)} s`,
        "Tokens/s": number(forecast.tokens_per_second), "The whole run": duration(forecast.hours === null ? null : forecast.hours * 3600), MFU: `${(forecast.mfu * 100).toFixed(1)} %`,
      }).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      table("On a GPU, GiB", kinds, [h("tr", {}, kinds.map(kind => h("td", {}, number(memory[kind], 3))))]),
      table("A step, seconds", parts, [h("tr", {}, parts.map(part => h("td", {}, number(step[part], 3))))]),
      h("h3", {}, "What each rank holds, and what moves"),
      // As an image it can run nothing and load nothing.
      h("img", {class: "picture", alt: `${chosen}: which states each rank holds, and what the ranks send each other`, src: `data:image/svg+xml,${encodeURIComponent(picture)}`}),
      h("h3", {}, "The job"), h("p", {class: "soft"}, "Change data.train to your own file."),
      copyButton("Copy the job", () => job), h("pre", {class: "job", tabindex: 0, "aria-label": "The job as YAML"}, job));
    return made;
  }
}
