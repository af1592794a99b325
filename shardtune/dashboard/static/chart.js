// A line chart in SVG: hover or arrow keys read values; dragging, + and - zoom, 0 shows all.

import {h, number, s} from "./dom.js";

const LEFT = 58, RIGHT = 12, TOP = 8, BOTTOM = 26;
const HALF_LETTER = 3.3;
const COLOURS = 8;  // from the ninth line on they begin anew, dashed

export class Chart {
  // `zoomed(from, to)` is called with steps, or with nulls for all.
  constructor({title, unit, large = false, fromZero = false, zoomed = null}) {
    Object.assign(this, {title, unit, fromZero, zoomed, lines: [], marks: [], xName: "step", at: null, drag: null});
    this.svg = s("svg", {role: "img", tabindex: 0, focusable: "true"});
    this.legend = h("ul", {class: "legend"});
    this.note = h("span", {});
    this.readout = h("p", {class: "readout", "aria-live": "polite"});
    this.element = h("figure", {class: large ? "large" : ""},
      h("figcaption", {}, h("b", {}, title), unit, this.legend, this.note),
      h("div", {class: "plot"}, this.svg), this.readout);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.drag = null; this.move(null); });
    this.svg.addEventListener("pointerdown", event => { this.drag = this.value(event); });
    this.svg.addEventListener("pointerup", event => this.release(event));
    this.svg.addEventListener("dblclick", () => this.zoomed?.(null, null));
    this.svg.addEventListener("keydown", event => this.key(event));
    this.svg.addEventListener("blur", () => this.move(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  // lines: {name, colour, xs, ys, faint, dashed, dots}; marks: [x, text]
  show(lines, {marks = [], xName = "step"} = {}) {
    this.lines = lines.filter(line => line.xs.length);
    Object.assign(this, {marks, xName});
    this.legend.replaceChildren(...(this.lines.length < 2 ? [] : this.lines.map(line =>
      h("li", {}, h("span", {class: `key c${line.colour % COLOURS}${isDashed(line) ? " dashed" : ""}`}), line.name))));
    this.draw();
  }

  draw() {
    this.svg.setAttribute("aria-label", this.summary());
    const {width, height} = this.svg.getBoundingClientRect();
    if (!width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const xs = this.lines.flatMap(line => line.xs);
    const ys = this.lines.flatMap(line => known(line.ys));
    this.note.textContent = "";
    if (!ys.length) {
      this.svg.replaceChildren(s("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, "nothing yet"));
      this.place = null;
      return;
    }
    const [x0, x1] = spread(least(xs), most(xs), .5);
    const [low, high] = this.range();
    const [y0, y1] = spread(this.fromZero ? Math.min(0, low) : low, high);
    this.note.textContent = this.cutOff(y1);
    const inner = {wide: width - LEFT - RIGHT, high: height - TOP - BOTTOM};
    const place = this.place = {
      x: value => LEFT + (value - x0) / (x1 - x0) * inner.wide,
      y: value => TOP + (y1 - Math.min(y1, Math.max(y0, value))) / (y1 - y0) * inner.high,
      value: left => x0 + (left - LEFT) / inner.wide * (x1 - x0), x0, x1,
    };
    const grid = ticks(y0, y1, Math.max(2, Math.floor(inner.high / 45))).flatMap(value => [
      s("line", {class: "grid", x1: LEFT, x2: width - RIGHT, y1: place.y(value), y2: place.y(value)}),
      s("text", {x: LEFT - 6, y: place.y(value) + 4, "text-anchor": "end"}, number(value))]);
    const below = ticks(x0, x1, Math.max(2, Math.floor(inner.wide / 90)), true).map(value => {
      const name = number(value), x = place.x(value), beyond = x + HALF_LETTER * name.length > width;
      return s("text", {x: beyond ? width : x, y: height - 8, "text-anchor": beyond ? "end" : "middle"}, name);
    });
    const warned = this.marks.map(([x, text]) =>
      s("line", {class: "warned", x1: place.x(x), x2: place.x(x), y1: TOP, y2: height - BOTTOM}, s("title", {}, text)));
    const drawn = this.lines.flatMap(line => this.line(line));
    this.cursor = s("line", {class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden"});
    this.svg.replaceChildren(...grid, ...below, ...warned, ...drawn, this.cursor);
    this.move(this.at);
  }

  // What the y axis shows. Of faint lines, which a smoothed one stands for, no spike sets it: it would press all
  // else to the bottom.
  range() {
    const clear = this.lines.filter(line => !line.faint).flatMap(line => known(line.ys));
    const faint = this.lines.filter(line => line.faint).flatMap(line => known(line.ys)).sort((one, other) => one - other);
    if (!clear.length || !faint.length) return [least([...clear, ...faint]), most([...clear, ...faint])];
    const at = share => faint[Math.round(share * (faint.length - 1))], room = at(.98) - at(.02);
    return [Math.min(least(clear), Math.max(faint[0], at(.02) - room)), Math.max(most(clear), Math.min(faint.at(-1), at(.98) + room))];
  }

  cutOff(top) {
    let found = null;
    for (const {xs, ys, faint} of this.lines) if (faint) ys.forEach((y, at) => { if (y > (found?.y ?? top)) found = {y, x: xs[at]}; });
    return found ? `cut off: ${number(found.y)} at ${this.xName} ${number(found.x)}` : "";
  }

  line(drawn) {
    const {xs, ys, colour, faint, dots} = drawn, {x, y} = this.place;
    let path = "", pen = false;
    xs.forEach((step, at) => {
      if (ys[at] === null) { pen = false; return; }
      path += `${pen ? "L" : "M"}${x(step).toFixed(1)} ${y(ys[at]).toFixed(1)}`;
      pen = true;
    });
    const kind = `curve c${colour % COLOURS}${faint ? " faint" : ""}${isDashed(drawn) ? " dashed" : ""}`;
    const single = xs.length === 1;
    const points = dots || single ? xs.flatMap((step, at) => ys[at] === null ? [] :
      [s("circle", {class: `dot c${colour % COLOURS}`, cx: x(step), cy: y(ys[at]), r: 3})]) : [];
    return [s("path", {class: kind, d: path}), ...points];
  }

  summary() {
    const main = this.lines.find(line => !line.faint) ?? this.lines[0];
    const found = main ? known(main.ys) : [];
    if (!found.length) return `${this.title}: nothing yet`;
    const last = `last ${number(found.at(-1))} at ${this.xName} ${number(main.xs.at(-1))}`;
    const keys = this.zoomed ? "Arrow keys read values, + and - zoom, 0 shows all." : "Arrow keys read values.";
    return `${this.title}: ${last}, least ${number(least(found))}, greatest ${number(most(found))}. ${keys}`;
  }

  value(event) {
    return this.place?.value(event.clientX - this.svg.getBoundingClientRect().left) ?? null;
  }

  point(event) {
    const value = this.value(event);
    if (value !== null) this.move(value);
  }

  release(event) {
    const from = this.drag, to = this.value(event);
    this.drag = null;
    if (from === null || to === null || !this.zoomed) return;
    if (Math.abs(this.place.x(from) - this.place.x(to)) > 12) this.zoomed(Math.floor(Math.min(from, to)), Math.ceil(Math.max(from, to)));
  }

  key(event) {
    if (!this.place) return;
    const {x0, x1} = this.place, main = this.lines[0].xs, middle = this.at ?? (x0 + x1) / 2;
    const here = this.at === null ? main.length - 1 : nearest(main, this.at);
    const zoom = factor => this.zoomed?.(Math.max(0, Math.floor(middle - (x1 - x0) * factor)), Math.ceil(middle + (x1 - x0) * factor));
    const actions = {
      ArrowLeft: () => this.move(main[Math.max(0, here - (this.at === null ? 0 : 1))]),
      ArrowRight: () => this.move(main[Math.min(main.length - 1, here + 1)]),
      Home: () => this.move(main[0]),
      End: () => this.move(main.at(-1)),
      "+": () => zoom(.25), "-": () => zoom(1), 0: () => this.zoomed?.(null, null),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  move(value) {
    this.at = value;
    if (!this.place || !this.cursor) return;
    if (value === null) {
      this.cursor.setAttribute("visibility", "hidden");
      this.readout.textContent = "";
      return;
    }
    const main = this.lines[0].xs, x = main[nearest(main, value)];
    this.cursor.setAttribute("x1", this.place.x(x));
    this.cursor.setAttribute("x2", this.place.x(x));
    this.cursor.setAttribute("visibility", "visible");
    const read = this.lines.map(line => {
      const at = nearest(line.xs, x);
      const far = line.dots && line.xs[at] !== x ? ` (${this.xName} ${number(line.xs[at])})` : "";
      return `${line.name} ${number(line.ys[at], 5)}${far}`;
    });
    this.readout.textContent = `${this.xName} ${Intl.NumberFormat("en").format(x)}: ${read.join(", ")}`;
  }
}

export function sparkline(values) {
  const found = known(values);
  if (found.length < 2) return h("span", {class: "soft"}, "–");
  const [low, high] = spread(least(found), most(found));
  const at = (value, index) => `${(index / (values.length - 1) * 100).toFixed(1)} ${(26 - (value - low) / (high - low) * 24).toFixed(1)}`;
  const points = values.flatMap((value, index) => value === null ? [] : [at(value, index)]);
  const label = `loss from ${number(found[0])} to ${number(found.at(-1))}`;
  return s("svg", {class: "spark c0", viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img", "aria-label": label},
    s("path", {class: "curve", "vector-effect": "non-scaling-stroke", d: `M${points.join("L")}`}));
}

const isDashed = line => line.dashed || line.colour >= COLOURS;
const known = values => values.filter(value => value !== null);
const least = values => values.reduce((one, other) => other < one ? other : one, Infinity);
const most = values => values.reduce((one, other) => other > one ? other : one, -Infinity);

function spread(low, high, room = Math.abs(low) * .05 || 1) {
  return high > low ? [low, high] : [low - room, high + room];
}

function ticks(low, high, count, whole = false) {
  const rough = Math.max((high - low) / count, whole ? 1 : 0), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(each => each * power >= rough * .75);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6 && found.length < 50; value += step) found.push(Number(value.toPrecision(12)));
  return found;
}

function nearest(xs, value) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < value) low = middle + 1; else high = middle;
  }
  return low > 0 && value - xs[low - 1] < xs[low] - value ? low - 1 : low;
}
