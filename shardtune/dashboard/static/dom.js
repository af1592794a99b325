// Builds elements. Text becomes text, never markup: names and logs are somebody else's words.

export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function s(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter(each => each !== null && each !== undefined && each !== false));
  return element;
}

export function tell(text, failed = false) {
  const told = document.getElementById("told");
  told.textContent = text;
  told.classList.toggle("failed", failed);
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1}).format(value);
  if (size >= 1000) return Intl.NumberFormat("en", {maximumFractionDigits: 0}).format(value);
  if (size !== 0 && size < 1e-4) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = value => String(value).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

export function ago(time) {
  if (!time) return "–";
  const seconds = Date.now() / 1000 - time;
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
  }
  return "just now";
}

export const stateBadge = state => h("span", {class: `state ${state}`}, state);

export function table(caption, headings, rows, attributes = {}) {
  return h("div", {class: "wide"},
    h("table", attributes,
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, headings.map(each => each instanceof Node ? each : h("th", {scope: "col"}, each)))),
      h("tbody", {}, rows)));
}

export function copyButton(label, text) {
  return h("button", {type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(text());
      tell("Copied.");
    } catch {
      tell("The browser doesn't allow copying; select the text instead.", true);
    }
  }}, label);
}
