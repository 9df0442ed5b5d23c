// Charts with round ticks, as in `ticks.py`; a test compares the two.
const FLAT = 1e-8, TINY = 1e-300, NEAR = 1e-6, UNITS = { 6: "M", 9: "B", 12: "T" };
const times = (number, power) => Number(`${number}e${power}`);
const fixed = (value, decimals) => value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
const range = (first, last) => Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);

// An axis with up to `most` ticks: multiples of 1, 2 or 5 times a power of ten. With `extend`, it ends at ticks; without,
// at `low` and `high`, but starts at 0 if `low` is close to 0.
function axis(low, high, most, extend = true) {
  [low, high] = widened(!extend && 0 < low && low <= high / 10 ? 0 : low, high);
  const [first, last, step, k] = stepped(low, high, most, extend, Math.floor(Math.log10((high / 2 - low / 2) / most)) - 1);
  const numbers = range(first, last).map((n) => n * step).filter((n) => isFinite(times(n, k))), ticks = numbers.map((n) => times(n, k));
  if (extend) { low = Math.min(low, ...ticks); high = Math.max(high, ...ticks); }
  // Halves avoid overflow of the span.
  return { low, high, ticks, labels: labelled(numbers, k), share: (value) => (value / 2 - low / 2) / (high / 2 - low / 2) };
}

// A logarithmic axis of positive numbers with ticks at every decade, or every 2nd, 5th, 10th, …
function logAxis(low, high, most) {
  const [first, last, step, k] = stepped(Math.log10(low), Math.log10(high), most, true, 0);
  const decades = range(first, Math.max(last, first + 1)).map((n) => n * step * 10 ** k).filter((n) => 0 < times(1, n) && times(1, n) < Infinity);
  const ticks = decades.map((n) => times(1, n)), small = decades.every((n) => -4 < n && n < 6);
  const from = Math.log10(low = Math.min(low, ...ticks)), to = Math.log10(high = Math.max(high, ...ticks));
  return { low, high, ticks, labels: decades.map((n) => small ? fixed(times(1, n), Math.max(0, -n)) : `1e${n}`), share: (value) => (Math.log10(value) - from) / (to - from) };
}

// Over more than three decades, a linear axis would show only the largest numbers.
const spansDecades = (low, high) => low > 0 && high / 1000 > low;

function widened(low, high) {
  const largest = Math.max(Math.abs(low), Math.abs(high)), half = largest > TINY ? largest / 2 : 0.5;
  if (high / 2 - low / 2 > Math.max(FLAT * largest, TINY)) return [low, high];
  return [Math.max(low - half, -Number.MAX_VALUE), Math.min(high + half, Number.MAX_VALUE)];
}

function stepped(low, high, most, extend, k) {
  for (let power = k; ; power++) for (const step of [1, 2, 5]) {
    const size = times(step, power);
    const [first, last] = extend ? [Math.floor(low / size + NEAR), Math.ceil(high / size - NEAR)] : [Math.ceil(low / size - NEAR), Math.floor(high / size + NEAR)];
    if (last - first < most) return [first, last, step, power];
  }
}

// Labels for numbers × 10^k, with the same decimals and unit.
function labelled(numbers, k) {
  const top = String(Math.max(...numbers.map(Math.abs))).length - 1 + k, thousands = Math.floor(top / 3) * 3;
  const [unit, mark] = top < -3 || top >= 15 ? [top, `e${top}`] : top >= 6 && thousands - k <= 3 ? [thousands, UNITS[thousands]] : [0, ""];
  return numbers.map((n) => mark && !n ? "0" : fixed(times(n, k - unit), Math.max(0, unit - k)) + mark);
}

// The sample of a curve in a legend.
const key = ({ colour = "--soft", dash = "", pale = false, dots = false }) => svg("svg", { class: "key", viewBox: "0 0 26 10", "aria-hidden": "true" },
  svg("path", { class: pale ? "curve pale" : "curve", style: `stroke:var(${colour});stroke-dasharray:${dash}`, d: "M1 5H25" }),
  dots ? svg("circle", { cx: 13, cy: 5, r: 3, style: `fill:var(${colour})` }) : []);

// Draws curves of points [x, y], pale curves below the others; a null y is a gap. Redraws when the width changes. The
// pointer and the arrow keys read out values.
function lineChart({ name, title, x, series, legend = [], height = 240, logarithmic = false }) {
  const curves = [...series].sort((one, other) => !!other.pale - !!one.pale).filter((one) => one.points.some((p) => p[1] !== null));
  const caption = el("figcaption", {}, title ? el("h3", {}, title) : null,
    legend.map(([said, style]) => el("span", { class: "legend-item" }, key(style), said)));
  if (!curves.length) return el("figure", { "data-chart": name }, caption, el("p", { class: "soft" }, "nothing was recorded"));
  const readout = el("p", { class: "soft readout", "aria-live": "polite" }, "\u00a0");
  const frame = svg("svg", { role: "img", tabindex: 0, "aria-label": `${name} by ${x}`, style: `display:block;width:100%;height:${height}px` });
  const figure = el("figure", { "data-chart": name }, caption, frame, readout);

  const read = curves.filter((one) => !one.pale).map((one) => ({ ...one, points: one.points.filter((p) => p[1] !== null) }));
  const span = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const xs = span(curves.flatMap((one) => one.points.map((p) => p[0])));
  const ys = span(curves.flatMap((one) => one.points.filter((p) => p[1] !== null).map((p) => p[1])));
  const top = 8, bottom = 38, right = 16, room = (pixels, each) => Math.max(5, Math.min(8, Math.floor(pixels / each)));
  const up = (logarithmic && spansDecades(...ys) ? logAxis : axis)(...ys, room(height - top - bottom, 28));
  const left = 14 + 7 * Math.max(...up.labels.map((label) => label.length));
  const sy = (v) => top + (1 - up.share(v)) * (height - top - bottom);
  let width, across, sx, at = null, cursor;

  function draw(wide) {
    width = wide;
    across = axis(...xs, room(width - left - right, 60), false);
    sx = (v) => left + across.share(v) * (width - left - right);
    cursor = svg("g", { class: "cursor" });
    frame.setAttribute("viewBox", `0 0 ${width} ${height}`);
    frame.replaceChildren(
      ...up.ticks.map((v, i) => svg("g", { class: "y" }, svg("line", { class: "axis", x1: left, x2: width - right, y1: sy(v), y2: sy(v) }),
        svg("text", { x: left - 7, y: sy(v) + 4, "text-anchor": "end" }, up.labels[i]))),
      ...across.ticks.map((v, i) => svg("g", { class: "x" }, svg("line", { class: "axis", x1: sx(v), x2: sx(v), y1: height - bottom, y2: height - bottom + 5 }),
        svg("text", { x: Math.min(sx(v), width - 3.4 * across.labels[i].length), y: height - bottom + 17, "text-anchor": "middle" }, across.labels[i]))),
      svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, x),
      ...curves.map((one) => svg("path", { class: one.pale ? "curve pale" : "curve", style: `stroke:var(${one.colour});stroke-dasharray:${one.dash || ""}`, d: path(one.points) })),
      ...curves.filter((one) => one.dots && one.points.length <= width / 12).flatMap((one) => one.points.filter((p) => p[1] !== null)
        .map((p) => svg("circle", { cx: sx(p[0]), cy: sy(p[1]), r: 2.6, style: `fill:var(${one.colour})` }))),
      cursor);
    if (at !== null) tell();
  }
  // Round line caps turn a zero-length line at an isolated point into a dot.
  const path = (points) => points.map((p, i) => p[1] === null ? "" : (i && points[i - 1][1] !== null ? "L" : "M")
    + `${sx(p[0]).toFixed(1)} ${sy(p[1]).toFixed(1)}` + (i && points[i - 1][1] !== null ? "" : "h0")).join("");
  function tell() {
    const nearest = (points) => points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
    const found = read.map((one) => nearest(one.points)), here = nearest(found)[0];
    cursor.replaceChildren(svg("line", { x1: sx(here), x2: sx(here), y1: top, y2: height - bottom }),
      ...found.map((p, i) => svg("circle", { cx: sx(p[0]), cy: sy(p[1]), r: 4, style: `fill:var(${read[i].colour})` })));
    readout.textContent = `${x} ${plain(here)}: ` + read.map((one, i) => `${one.name} ${plain(found[i][1])}`).join(", ");
  }
  const move = (to) => { at = Math.min(across.high, Math.max(across.low, to)); tell(); };
  frame.addEventListener("pointermove", (event) => {
    const place = event.clientX - frame.getBoundingClientRect().left;
    move(across.low + (place - left) / (width - left - right) * (across.high - across.low));
  });
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
    if (!step) return;
    event.preventDefault();
    move((at ?? across.low) + step * (across.high - across.low));
  });
  draw(640);
  new ResizeObserver(() => { if (figure.clientWidth && figure.clientWidth !== width) draw(figure.clientWidth); }).observe(figure);
  return figure;
}
