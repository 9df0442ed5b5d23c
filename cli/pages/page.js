"use strict";
// What every page shares: building elements (text is only ever set as text), colours, numbers.
const data = JSON.parse(document.getElementById("data").textContent);

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  for (const child of children.flat(2)) if (child !== null && child !== undefined) node.append(child);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
function svg(tag, attributes, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  for (const child of children.flat()) node.append(child);
  return node;
}

function unpacked(base64, kind) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return new kind(bytes.buffer);
}

const withCommas = (number) => Math.round(number).toLocaleString("en-US");
const short = (value) => value === null || value === undefined ? "–" : Number(value).toFixed(3);
function plain(value) {
  if (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 1e5)) return String(+Number(value).toPrecision(4));
  return Number(value).toExponential(2);
}

// Colours of a heat map, between two of the style's; small shares would be invisible on a straight scale.
let ends = null;
let steps = null; // the scale in 1,024 steps, as pixels
function rampEnds() {
  const style = getComputedStyle(document.documentElement);
  const parse = (name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  ends = [parse("--low"), parse("--high")];
  steps = Uint32Array.from({ length: 1025 }, (_, i) => pixel(ramp(i / 1024)));
}
const pixel = (parts) => (255 << 24 | parts[2] << 16 | parts[1] << 8 | parts[0]) >>> 0; // as ImageData has them
function ramp(share) {
  const x = Math.sqrt(Math.min(1, Math.max(0, share)));
  return ends[0].map((low, i) => Math.round(low + (ends[1][i] - low) * x));
}
const rgb = (parts) => `rgb(${parts.join(",")})`;
// Black or white, whichever stands out more: 4.5 to 1 at least (WCAG's relative luminance).
const linear = (part) => part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
const readable = (parts) => 0.2126 * linear(parts[0]) + 0.7152 * linear(parts[1]) + 0.0722 * linear(parts[2]) > 0.179 ? "#000" : "#fff";

const redraws = []; // called when the colours change
function recolour() { rampEnds(); redraws.forEach((draw) => draw()); }
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);

function themeButton() {
  const dark = () => document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  return el("button", { id: "theme", type: "button", onclick: () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    recolour();
  } }, "light / dark");
}

function heading(title, ...lines) {
  document.getElementById("main").append(
    el("header", {}, el("h1", {}, title), themeButton()), ...lines.map((line) => el("p", { class: "soft" }, line)));
}

function section(title, ...children) {
  const node = el("section", {}, el("h2", {}, title), children);
  document.getElementById("main").append(node);
  return node;
}

// A token as it is shown: line ends and tabs come escaped already, a space alone would be nothing to see.
const shown = (text) => text === "" ? "∅" : text.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));

function context2d(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = width + "px";
  canvas.style.height = height + "px";
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
rampEnds();

// Curves in one frame: series of [x, y] or of y by index. Pointing at it, or the arrow keys, reads the values.
function lineChart({ name, x, series, height = 240, format = plain }) {
  const width = 760, left = 62, right = 12, top = 10, bottom = 34;
  const curves = series.map((one) => ({ ...one, points: one.points.map((p, i) => Array.isArray(p) ? p : [i, p]).filter((p) => p[1] !== null && p[0] !== null) }))
    .filter((one) => one.points.length);
  const all = curves.flatMap((one) => one.points);
  const readout = el("p", { class: "soft", "aria-live": "polite" }, " ");
  if (!all.length) return el("p", { class: "soft" }, "nothing was recorded");
  const span = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
  const [x0, x1] = span(all.map((p) => p[0]));
  let [y0, y1] = span(all.map((p) => p[1]));
  if (y0 === y1) { y0 -= 0.5 * Math.abs(y0) || 0.5; y1 += 0.5 * Math.abs(y1) || 0.5; }
  const sx = (v) => left + (x1 === x0 ? 0.5 : (v - x0) / (x1 - x0)) * (width - left - right);
  const sy = (v) => top + (1 - (v - y0) / (y1 - y0)) * (height - top - bottom);
  const marks = [0, 0.25, 0.5, 0.75, 1];
  const cursor = svg("line", { class: "axis", y1: top, y2: height - bottom, x1: -9, x2: -9 });
  const frame = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${name} by ${x}`, style: `width:100%;max-width:${width}px` },
    marks.map((m) => { const v = y0 + m * (y1 - y0); return svg("g", {}, svg("line", { class: "axis", x1: left, x2: width - right, y1: sy(v), y2: sy(v) }),
      svg("text", { x: left - 6, y: sy(v) + 4, "text-anchor": "end" }, format(v))); }),
    marks.map((m) => { const v = x0 + m * (x1 - x0); return svg("text", { x: sx(v), y: height - bottom + 16, "text-anchor": m === 0 ? "start" : m === 1 ? "end" : "middle" }, plain(v)); }),
    svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, x),
    curves.map((one) => svg("path", { class: one.faint ? "curve faint" : "curve", style: `stroke:var(${one.colour})` + (one.dash ? `;stroke-dasharray:${one.dash}` : ""),
      d: one.points.map((p, i) => `${i ? "L" : "M"}${sx(p[0]).toFixed(1)} ${sy(p[1]).toFixed(1)}`).join("") })),
    curves.filter((one) => one.points.length === 1).map((one) => svg("circle", { cx: sx(one.points[0][0]), cy: sy(one.points[0][1]), r: 3, style: `fill:var(${one.colour})` })),
    cursor);
  let at = x0;
  const read = () => {
    cursor.setAttribute("x1", sx(at)); cursor.setAttribute("x2", sx(at));
    readout.textContent = `${x} ${plain(at)}: ` + curves.map((one) => {
      const near = one.points.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
      return `${one.name} ${format(near[1])}`;
    }).join(", ");
  };
  frame.addEventListener("pointermove", (event) => {
    const box = frame.getBoundingClientRect(), place = (event.clientX - box.left) / box.width * width;
    at = Math.min(x1, Math.max(x0, x0 + (place - left) / (width - left - right) * (x1 - x0)));
    read();
  });
  frame.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -0.01, ArrowRight: 0.01 }[event.key];
    if (!step) return;
    event.preventDefault();
    at = Math.min(x1, Math.max(x0, at + step * (x1 - x0)));
    read();
  });
  return el("figure", { style: "margin:0 0 10px", "data-chart": name }, frame, readout);
}
