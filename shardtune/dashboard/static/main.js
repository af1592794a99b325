// The pages by the address behind the #. Leaving one ends what it still asks for.

import {compareView} from "./compare_view.js";
import {h, tell} from "./dom.js";
import {planView} from "./plan_view.js";
import {runView} from "./run_view.js";
import {runsView} from "./runs_view.js";
import {onKey} from "./server.js";

let leaving = new AbortController();

async function route() {
  leaving.abort(new DOMException("left the page", "AbortError"));
  leaving = new AbortController();
  const {signal} = leaving, main = document.getElementById("main");
  const [page = "", what = ""] = location.hash.replace(/^#\/?/, "").split("/");
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.page === (page === "plan" ? "plan" : "runs")) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = "Runs – shardtune";
  tell("");
  try {
    if (page === "run") await runView(main, signal, encodeURIComponent(what));
    else if (page === "compare") await compareView(main, signal, what.split(",").filter(Boolean));
    else if (page === "plan") await planView(main, signal);
    else await runsView(main, signal);
  } catch (error) {
    if (signal.aborted) return;
    tell(error.message, true);
    if (!main.children.length || page === "run") main.replaceChildren(h("p", {}, error.message, " ", h("a", {href: "#/"}, "All runs")));
  }
}

addEventListener("hashchange", () => {
  if (location.hash === "#main") return;
  route();
  document.getElementById("main").focus({preventScroll: true});
  scrollTo(0, 0);
});
onKey(route);
route();
