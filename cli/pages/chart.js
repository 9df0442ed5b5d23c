// Charts with round ticks.
const FLAT = 1e-8, TINY = 1e-300, TOLERANCE = 1e-6, UNITS = { 6: "M", 9: "B", 12: "T" };
const scaleByPower = (number, power) => Number(`${number}e${power}`);
const withDecimals = (value, decimals) => value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
const range = (first, last) => Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);

// Returns an axis with up to `maxTicks` ticks: multiples of 1, 2 or 5 times a power of ten.
// With `extend`, the axis ends at ticks. Otherwise it runs from `low` to `high`, or from 0 if `low` is close to 0.
function axis(low, high, maxTicks, extend = true) {
  [low, high] = widen(!extend && 0 < low && low <= high / 10 ? 0 : low, high);
  const [first, last, step, k] = findStep(low, high, maxTicks, extend, Math.floor(Math.log10((high / 2 - low / 2) / maxTicks)) - 1);
  const numbers = range(first, last).map((n) => n * step).filter((n) => isFinite(scaleByPower(n, k))), ticks = numbers.map((n) => scaleByPower(n, k));
  if (extend) { low = Math.min(low, ...ticks); high = Math.max(high, ...ticks); }
  // Halving avoids overflow.
  return { low, high, ticks, labels: makeLabels(numbers, k), share: (value) => (value / 2 - low / 2) / (high / 2 - low / 2) };
}

// Returns a logarithmic axis of positive numbers with ticks at every decade, or every 2nd, 5th, 10th, …
function logAxis(low, high, maxTicks) {
  const [first, last, step, k] = findStep(Math.log10(low), Math.log10(high), maxTicks, true, 0);
  const decades = range(first, Math.max(last, first + 1)).map((n) => n * step * 10 ** k).filter((n) => 0 < scaleByPower(1, n) && scaleByPower(1, n) < Infinity);
  const ticks = decades.map((n) => scaleByPower(1, n)), small = decades.every((n) => -4 < n && n < 6);
  const from = Math.log10(low = Math.min(low, ...ticks)), to = Math.log10(high = Math.max(high, ...ticks));
  return { low, high, ticks, labels: decades.map((n) => small ? withDecimals(scaleByPower(1, n), Math.max(0, -n)) : `1e${n}`), share: (value) => (Math.log10(value) - from) / (to - from) };
}

// Whether a range is so wide that a linear axis would show only the largest numbers.
const spansDecades = (low, high) => low > 0 && high / 1000 > low;

function widen(low, high) {
  const largest = Math.max(Math.abs(low), Math.abs(high)), half = largest > TINY ? largest / 2 : 0.5;
  if (high / 2 - low / 2 > Math.max(FLAT * largest, TINY)) return [low, high];
  return [Math.max(low - half, -Number.MAX_VALUE), Math.min(high + half, Number.MAX_VALUE)];
}

function findStep(low, high, maxTicks, extend, k) {
  for (let power = k; ; power++) for (const step of [1, 2, 5]) {
    const size = scaleByPower(step, power);
    const [first, last] = extend ? [Math.floor(low / size + TOLERANCE), Math.ceil(high / size - TOLERANCE)] : [Math.ceil(low / size - TOLERANCE), Math.floor(high / size + TOLERANCE)];
    if (last - first < maxTicks) return [first, last, step, power];
  }
}

// Returns labels of numbers × 10^k with a common number of decimals and unit.
function makeLabels(numbers, k) {
  const top = String(Math.max(...numbers.map(Math.abs))).length - 1 + k, thousands = Math.floor(top / 3) * 3;
  const [unit, mark] = top < -3 || top >= 15 ? [top, `e${top}`] : top >= 6 && thousands - k <= 3 ? [thousands, UNITS[thousands]] : [0, ""];
  return numbers.map((n) => mark && !n ? "0" : withDecimals(scaleByPower(n, k - unit), Math.max(0, unit - k)) + mark);
}

// Draws a short line as a legend key.
const key = ({ colour = "--soft", dash = "", pale = false, dots = false }) => svg("svg", { class: "key", viewBox: "0 0 26 10", "aria-hidden": "true" },
  svg("path", { class: pale ? "curve pale" : "curve", style: `stroke:var(${colour});stroke-dasharray:${dash}`, d: "M1 5H25" }),
  dots ? svg("circle", { cx: 13, cy: 5, r: 3, style: `fill:var(${colour})` }) : []);

// Draws curves of points [x, y] over pale curves. A null y is a gap. A curve that is a level has its name on it.
// Values above `high` are drawn at its height. `memory` keeps the selected x when a new chart replaces this one. Redraws when the width changes. The pointer and arrow keys select the values to read out.
function lineChart({ name, title, x, series, legend = [], height = 240, logarithmic = false, high = Infinity, memory = {} }) {
  const curves = [...series].sort((curve, other) => !!other.pale - !!curve.pale).filter((curve) => curve.points.some((p) => p[1] !== null));
  const caption = el("figcaption", {}, title ? el("h3", {}, title) : null,
    legend.map(([text, style]) => el("span", { class: "legend-item" }, key(style), text)));
  if (!curves.length) return el("figure", { "data-chart": name }, caption, el("p", { class: "soft" }, "no data"));
  const readout = el("p", { class: "soft readout", "aria-live": "polite" }, "\u00a0");
  const frame = svg("svg", { role: "img", tabindex: 0, "aria-label": `${name} by ${x}`, style: `display:block;width:100%;height:${height}px` });
  const figure = el("figure", { "data-chart": name }, caption, frame, readout);

  const readoutCurves = curves.filter((curve) => !curve.pale && !curve.level).map((curve) => ({ ...curve, points: curve.points.filter((p) => p[1] !== null) }));
  const span = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const xs = span(curves.flatMap((curve) => curve.points.map((p) => p[0])));
  const ys = span(curves.flatMap((curve) => curve.points.filter((p) => p[1] !== null).map((p) => Math.min(p[1], high))));
  const top = 8, bottom = 38, right = 16, tickLimit = (pixels, pixelsPerTick) => Math.max(5, Math.min(8, Math.floor(pixels / pixelsPerTick)));
  const yAxis = (logarithmic && spansDecades(...ys) ? logAxis : axis)(...ys, tickLimit(height - top - bottom, 28));
  const left = 14 + 7 * Math.max(...yAxis.labels.map((label) => label.length));
  const sy = (v) => top + (1 - yAxis.share(Math.min(v, high))) * (height - top - bottom);
  let width, xAxis, sx, at = memory.at ?? null, cursor;

  function draw(newWidth) {
    width = newWidth;
    xAxis = axis(...xs, tickLimit(width - left - right, 60), false);
    sx = (v) => left + xAxis.share(v) * (width - left - right);
    cursor = svg("g", { class: "cursor" });
    frame.setAttribute("viewBox", `0 0 ${width} ${height}`);
    frame.replaceChildren(
      ...yAxis.ticks.map((v, i) => svg("g", { class: "y" }, svg("line", { class: "axis", x1: left, x2: width - right, y1: sy(v), y2: sy(v) }),
        svg("text", { x: left - 7, y: sy(v) + 4, "text-anchor": "end" }, yAxis.labels[i]))),
      ...xAxis.ticks.map((v, i) => svg("g", { class: "x" }, svg("line", { class: "axis", x1: sx(v), x2: sx(v), y1: height - bottom, y2: height - bottom + 5 }),
        svg("text", { x: Math.min(sx(v), width - 3.4 * xAxis.labels[i].length), y: height - bottom + 17, "text-anchor": "middle" }, xAxis.labels[i]))),
      svg("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle" }, x),
      ...curves.map((curve) => svg("path", { class: curve.pale ? "curve pale" : "curve", style: `stroke:var(${curve.colour});stroke-dasharray:${curve.dash || ""}`, d: path(curve.points) })),
      ...curves.filter((curve) => curve.dots && curve.points.length <= width / 12).flatMap((curve) => curve.points.filter((p) => p[1] !== null)
        .map((p) => svg("circle", { cx: sx(p[0]), cy: sy(p[1]), r: 2.6, style: `fill:var(${curve.colour})` }))),
      ...curves.filter((curve) => curve.level).map((curve) => svg("text", { class: "level", x: width - right, y: sy(curve.points[0][1]) - 4, "text-anchor": "end" }, curve.name)),
      cursor);
    if (at !== null) showReadout();
  }
  // With round line caps, zero-length lines draw isolated points.
  const path = (points) => points.map((p, i) => p[1] === null ? "" : (i && points[i - 1][1] !== null ? "L" : "M")
    + `${sx(p[0]).toFixed(1)} ${sy(p[1]).toFixed(1)}` + (i && points[i - 1][1] !== null ? "" : "h0")).join("");
  function showReadout() {
    const nearest = (points) => points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
    const nearestPoints = readoutCurves.map((curve) => nearest(curve.points)), nearestX = nearest(nearestPoints)[0];
    cursor.replaceChildren(svg("line", { x1: sx(nearestX), x2: sx(nearestX), y1: top, y2: height - bottom }),
      ...nearestPoints.map((p, i) => svg("circle", { cx: sx(p[0]), cy: sy(p[1]), r: 4, style: `fill:var(${readoutCurves[i].colour})` })));
    readout.textContent = `${x} ${formatNumber(nearestX)}: ` + readoutCurves.map((curve, i) => `${curve.name} ${formatNumber(nearestPoints[i][1])}`).join(", ");
  }
  const move = (to) => { memory.at = at = Math.min(xAxis.high, Math.max(xAxis.low, to)); showReadout(); };
  frame.addEventListener("pointermove", (event) => {
    const offset = event.clientX - frame.getBoundingClientRect().left;
    move(xAxis.low + (offset - left) / (width - left - right) * (xAxis.high - xAxis.low));
  });
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
    if (!step) return;
    event.preventDefault();
    move((at ?? xAxis.low) + step * (xAxis.high - xAxis.low));
  });
  draw(640);
  new ResizeObserver(() => { if (figure.clientWidth && figure.clientWidth !== width) draw(figure.clientWidth); }).observe(figure);
  return figure;
}
