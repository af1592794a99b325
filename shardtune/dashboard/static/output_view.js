// What the ranks printed, and their last stacks.

import {h, tell} from "./dom.js";
import {ask, pause} from "./server.js";

const EVERY = 2000;

export function outputSection(id, signal) {
  const path = `api/runs/${id}`;
  const select = h("select", {onchange: () => latest()});
  const follow = h("input", {type: "checkbox", checked: true});
  const older = h("button", {type: "button", onclick: () => before()}, "Earlier lines");
  const text = h("pre", {class: "log", tabindex: 0, "aria-label": "Log of the rank"});
  const stacks = h("div");
  const none = h("p", {class: "soft", hidden: true}, "No rank has written a log here.");
  const controls = h("div", {class: "bar"}, h("label", {class: "field"}, "Log of", select), h("label", {}, follow, " Follow"), older);
  const section = h("details", {ontoggle: () => { if (section.open) open(); }},
    h("summary", {}, "Logs and stacks of the ranks"), none, controls, text, stacks);
  let begin = 0, running = false;

  const chosen = () => { const [attempt, rank] = select.value.split("/"); return {attempt, rank}; };

  async function latest() {
    const page = await ask(`${path}/log`, chosen(), signal);
    const atEnd = text.scrollHeight - text.scrollTop - text.clientHeight < 40;
    if (text.textContent !== page.text) text.textContent = page.text;
    begin = page.begin;
    older.disabled = begin === 0;
    if (atEnd || text.scrollTop === 0) text.scrollTop = text.scrollHeight;
  }

  async function before() {
    try {
      const page = await ask(`${path}/log`, {...chosen(), before: begin}, signal);
      follow.checked = false;
      const high = text.scrollHeight;
      text.prepend(page.text);
      text.scrollTop += text.scrollHeight - high;
      begin = page.begin;
      older.disabled = begin === 0;
    } catch (error) { tell(error.message, true); }
  }

  async function look() {
    const found = await ask(`${path}/output`, {}, signal);
    const value = select.value;
    const names = found.logs.map(log => [`attempt ${log.attempt}, rank ${log.rank}`, `${log.attempt}/${log.rank}`]);
    if (names.length !== select.length || names.some(([, each], at) => select[at].value !== each)) {
      select.replaceChildren(...names.map(([name, each]) => new Option(name, each)));
      if (names.some(([, each]) => each === value)) select.value = value;
    }
    none.hidden = names.length > 0;
    controls.hidden = text.hidden = !names.length;
    stacks.replaceChildren(...found.stacks.flatMap(stack => [
      h("h4", {}, `${stack.kind === "stack" ? "Last stack" : "Error"} of rank ${stack.rank}, attempt ${stack.attempt}`),
      h("pre", {}, stack.text)]));
    if (names.length && (follow.checked || !text.textContent)) await latest();
  }

  async function open() {
    if (running) return;
    running = true;
    try {
      while (section.open) {
        await look();
        await pause(EVERY, signal);
      }
    } catch (error) {
      if (!signal.aborted) tell(error.message, true);
    } finally { running = false; }
  }

  return section;
}
