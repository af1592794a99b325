// Shows the values under the pointer. The page says all of them without it.
for (const svg of document.querySelectorAll("figure svg")) {
  const series = [...svg.querySelectorAll("g[data-values]")].map((group) => ({
    name: group.dataset.name,
    values: JSON.parse(group.dataset.values),
    at: JSON.parse(group.dataset.at),
  }));
  if (!series.length) continue;
  const figure = svg.closest("figure");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  figure.append(tip);
  const rule = document.createElementNS("http://www.w3.org/2000/svg", "path");
  rule.setAttribute("class", "rule-x");
  svg.append(rule);
  const hide = () => {
    tip.hidden = true;
    rule.removeAttribute("d");
  };
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const view = svg.viewBox.baseVal;
    const x = ((event.clientX - box.left) * view.width) / box.width;
    const near = series.map(({ name, values, at }) => {
      let best = 0;
      for (let i = 1; i < at.length; i++) if (Math.abs(at[i] - x) < Math.abs(at[best] - x)) best = i;
      return { name, place: at[best], value: values[best] };
    });
    const place = near.reduce((a, b) => (Math.abs(a.place - x) <= Math.abs(b.place - x) ? a : b)).place;
    rule.setAttribute("d", `M${place} 10V${view.height - 34}`);
    tip.textContent = near
      .filter((each) => Math.abs(each.place - place) < 12)
      .map(({ name, value }) => `${name}: ${value[1]} (at ${value[0]})`)
      .join("\n");
    tip.hidden = false;
    const outer = figure.getBoundingClientRect();
    const left = event.clientX - outer.left + 12;
    tip.style.left = `${Math.max(0, Math.min(left, outer.width - tip.offsetWidth))}px`;
    tip.style.top = `${event.clientY - outer.top + 14}px`;
  });
}
