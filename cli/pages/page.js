"use strict";
// Shared by all pages: elements, colours and numbers. Text is never inserted as markup.
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

function unpack(base64, kind) {
  const bytes = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
  return new kind(bytes.buffer);
}

const withCommas = (number) => Math.round(number).toLocaleString("en-US");
const percent = (share) => share === null ? "–" : share && share < 0.00005 ? "< 0.01 %" : `${(100 * share).toFixed(2)} %`;
function formatNumber(value) {
  if (Math.abs(value) >= 1000 && Math.abs(value) < 1e15) return withCommas(value);
  if (value === 0 || (Math.abs(value) >= 0.001 && Math.abs(value) < 1000)) return String(+Number(value).toPrecision(4));
  return Number(value).toExponential(2);
}

// Formats a duration as the terminal does: 47 s, 3 min 20 s, 2 h 05 min.
function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds), two = (number) => String(Math.floor(number)).padStart(2, "0");
  return whole < 60 ? `${whole} s` : whole < 3600 ? `${Math.floor(whole / 60)} min ${two(whole % 60)} s` : `${Math.floor(whole / 3600)} h ${two(whole % 3600 / 60)} min`;
}

// Heat-map colours from --low to --high, on a square-root scale, because a linear scale would hide small weights.
let ends = null;
let steps = null; // The scale in 1,024 steps, as pixel values.
function rampEnds() {
  const style = getComputedStyle(document.documentElement);
  const parse = (name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  ends = [parse("--low"), parse("--high")];
  steps = Uint32Array.from({ length: 1025 }, (_, i) => pixel(ramp(i / 1024)));
}
const pixel = (parts) => (255 << 24 | parts[2] << 16 | parts[1] << 8 | parts[0]) >>> 0; // ImageData's byte order.
function ramp(share) {
  const x = Math.sqrt(Math.min(1, Math.max(0, share)));
  return ends[0].map((low, i) => Math.round(low + (ends[1][i] - low) * x));
}
const rgb = (parts) => `rgb(${parts.join(",")})`;
// Returns black or white, whichever contrasts more with a colour, by WCAG's relative luminance: at least 4.5 to 1.
const linear = (part) => part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4;
const readable = (parts) => 0.2126 * linear(parts[0]) + 0.7152 * linear(parts[1]) + 0.0722 * linear(parts[2]) > 0.179 ? "#000" : "#fff";

const redraws = []; // Functions to call when the colours change.
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

// Returns a box that scrolls if its content is too wide, also with the keyboard.
const scroller = (label, ...children) => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, children);

// Places groups of sections side by side if the page is wide enough.
function beside(...groups) {
  const box = el("div", { class: "beside" });
  groups[0][0].replaceWith(box);
  box.append(...groups.map((group) => el("div", {}, group)));
}

// Replaces a token's leading and trailing spaces by dots. Line breaks and tabs are already escaped.
const showSpaces = (text) => text === "" ? "∅" : text.replace(/^ +| +$/g, (spaces) => "·".repeat(spaces.length));

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
