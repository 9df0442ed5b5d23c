// The panel "Inside the model": what the newest token attends to, heads and layers to switch off, the most likely token
// after each layer, and how the settings change the next token's probabilities.

const inside = $("inside"), heads = $("heads"), sight = $("sight"), strip = $("strip"), lens = $("lens"), next = $("next");
const SHOWN = 10; // Tokens in the list of next tokens.
const BUCKETS = 12; // Parts of the text in a head's cell.
const MAX_ARCS = 16;
const PAUSE = 250; // Milliseconds between inspections.
const MAX_TIME = 100; // Milliseconds of an inspection. One that takes longer waits until the model has stopped writing.

const off = { heads: new Set(), layers: new Set() }; // Heads are layer · heads per layer + head.
let look = null; // The last inspection.
let lookedAt = ""; // Its ids and what was switched off.
let lookTimer = 0, lookTime = 0, looking = false, isStale = false;
let pointedHead = -1; // The head under the pointer or with the focus, or -1 for the average.
let tappedHead = -1; // The head last tapped on a touch screen.
let pointedLayer = -1; // The layer last pointed at, or -1 for the last layer.

function switchedOff() {
  return { heads: [...off.heads].map((at) => [layerOf(at), at % model.shape.heads]), layers: [...off.layers] };
}


// Inspection

// Inspects the text soon. Several changes cause one inspection.
function refreshInside() {
  if (!inside.open || inside.hidden || (job && lookTime > MAX_TIME)) return;
  if (!job) clearTimeout(lookTimer);
  if (!job || !lookTimer) lookTimer = setTimeout(inspect, PAUSE);
}

async function inspect() {
  lookTimer = 0;
  isStale = looking;
  if (looking) return;
  looking = true;
  try {
    const ids = knownIds() ?? (chat ? null : await tokenize(field.value)), key = JSON.stringify([ids, switchedOff()]);
    const mustWait = job && model.can_switch && ids?.length > model.context_length; // The worker would read it all again.
    if (ids && key !== lookedAt && !mustWait) {
      const start = performance.now();
      look = await engine.inspect(ids, { off: switchedOff() });
      lookTime = performance.now() - start;
      look.start = ids.length - look.tokens.length;
      lookedAt = key;
      $("insight").hidden = false;
      drawInside();
    }
    const isPart = ids && look && look.tokens.length < ids.length;
    $("insight").hidden = !ids || !look;
    $("inside-note").textContent = isPart ? `This is how the model reads the last ${thousands(look.tokens.length)} tokens.` : ids ? "" : "Send a message to see how the model reads it.";
  } catch (error) {
    $("inside-note").textContent = error.message;
  }
  looking = false;
  if (isStale) refreshInside();
}

// Attention

const layerOf = (head) => Math.floor(head / model.shape.heads);
const isOff = (head) => off.heads.has(head) || off.layers.has(layerOf(head));

// Returns the newest token's attention in one head, or on average in all heads that are on. Returns null if none is.
function attentionOf(at) {
  const n = look.tokens.length;
  if (at >= 0) return isOff(at) ? null : look.attention.subarray(at * n, (at + 1) * n);
  const on = [...Array(look.layers * look.heads).keys()].filter((head) => !isOff(head));
  return on.length ? Float32Array.from({ length: n }, (_, t) => on.reduce((sum, head) => sum + look.attention[head * n + t], 0) / on.length) : null;
}

const strongest = (shares, count) => [...shares.keys()].sort((a, b) => shares[b] - shares[a]).slice(0, count);
const nameOf = (at) => `Layer ${layerOf(at)}, head ${at % model.shape.heads}`;

function drawAttention() {
  if (!look) return;
  const isOn = attentionOf(pointedHead), shares = isOn ?? new Float32Array(look.tokens.length), last = strip.lastChild, arcs = [];
  shares.forEach((share, t) => strip.children[t].style.setProperty("--share", `${60 * Math.sqrt(share)}%`));
  const top = (node) => [node.offsetLeft + node.offsetWidth / 2, node.offsetTop + 2];
  const [x, y] = top(last), svg = sight.firstElementChild;
  for (const t of strongest(shares, MAX_ARCS)) {
    if (strip.children[t] === last || shares[t] < 0.01) continue;
    const [toX, toY] = top(strip.children[t]), path = document.createElementNS(svg.namespaceURI, "path");
    path.setAttribute("d", `M${x} ${y} Q${(x + toX) / 2} ${Math.min(y, toY) - Math.min(90, 16 + Math.abs(x - toX) * 0.4)} ${toX} ${toY}`);
    path.setAttribute("stroke-width", 1 + 5 * shares[t]);
    path.setAttribute("opacity", Math.min(1, 0.25 + shares[t]));
    arcs.push(path);
  }
  svg.setAttribute("height", strip.offsetHeight);
  svg.replaceChildren(...arcs);
  const name = pointedHead < 0 ? "All heads" : nameOf(pointedHead);
  const most = strongest(shares, 4).map((t) => `${quoted(look.tokens[t])} (token ${thousands(look.start + t + 1)}) ${percent(shares[t])}`).join(", ");
  $("sees").textContent = isOn ? `${name} ${pointedHead < 0 ? "on average attend" : "attends"} most to ${most}`
    : `${name} ${pointedHead < 0 ? "are" : "is"} switched off.`;
}

function drawHeads() {
  for (const button of heads.querySelectorAll(".cell")) {
    const at = Number(button.dataset.at), shares = attentionOf(at);
    if (!shares) {
      button.setAttribute("aria-label", nameOf(at));
      continue;
    }
    const n = shares.length, count = Math.min(BUCKETS, n);
    const sums = new Float32Array(count);
    shares.forEach((share, t) => { sums[Math.floor(t * count / n)] += share; });
    const stops = [...sums].map((sum, i) => `color-mix(in srgb, var(--mark) ${Math.round(100 * Math.sqrt(sum))}%, transparent) ${100 * i / count}% ${100 * (i + 1) / count}%`);
    button.style.backgroundImage = `linear-gradient(90deg, ${stops.join(", ")})`;
    const most = shares.indexOf(Math.max(...shares));
    button.setAttribute("aria-label", `${nameOf(at)}: ${quoted(look.tokens[most])} ${percent(shares[most])}`);
  }
}

function drawSwitches() {
  for (const button of heads.querySelectorAll("[role=switch]")) {
    const { layer, at } = button.dataset;
    button.setAttribute("aria-checked", !off.layers.has(Number(layer)) && !off.heads.has(Number(at)));
  }
  const { layers, heads: perLayer } = model.shape, all = [...Array(layers).keys()], names = [];
  for (const layer of all.filter((layer) => off.layers.has(layer) && !off.layers.has(layer - 1))) { // Where a range starts.
    const end = all.find((at) => at >= layer && !off.layers.has(at + 1));
    names.push(end > layer ? `${layer}–${end}` : layer);
  }
  const count = [...off.heads].filter((head) => !off.layers.has(layerOf(head))).length, are = count > 1 ? "are" : "is";
  const what = names.length ? [`Layer${off.layers.size > 1 ? "s" : ""} ${names.join(", ")} ${off.layers.size > 1 ? "are" : "is"} switched off.`] : [];
  if (count) what.push(`${count} of ${layers * perLayer} heads ${are} switched off, and the predictions below are made without ${count > 1 ? "them" : "it"}.`);
  $("off").hidden = !what.length;
  $("off").firstElementChild.textContent = what.join(" ");
  drawAttention();
}

// Switches a head. On a touch screen, the first tap only shows it.
function switchHead(at) {
  if (tappedHead !== at && matchMedia("(hover: none)").matches) tappedHead = at;
  else if (!off.layers.has(layerOf(at))) toggle(off.heads, at);
}

function toggle(set, at) {
  if (!set.delete(at)) set.add(at);
  drawSwitches();
  refreshInside();
}

// The layers' opinions and the next token

function drawLens() {
  if (!look) return;
  look.lens.forEach(([token], at) => {
    const [word, share] = lens.children[at].lastElementChild.children;
    word.textContent = shown(token);
    share.textContent = percent(token.probability);
    lens.children[at].style.setProperty("--share", `${100 * token.probability}%`);
  });
  const at = pointedLayer < 0 ? look.lens.length - 1 : pointedLayer;
  $("five").textContent = `${layerName(at)}: ${look.lens[at].map((token) => `${quoted(token)} ${percent(token.probability)}`).join(", ")}`;
}

const layerName = (at) => (at ? `After layer ${at - 1}` : "Before layer 0");

// Returns the probabilities of the most likely tokens, and of all others together, as `gpt sample` draws them. Temperature
// treats the others like the least likely of the listed tokens.
function applySettings(logprobs) {
  const [temperature, k, p] = ["temperature", "top_k", "top_p"].map((id) => $(id).valueAsNumber);
  if (temperature === 0) return { shares: logprobs.map((_, rank) => Number(rank === 0)), others: 0 };
  const weigh = (logprob) => Math.exp((logprob - logprobs[0]) / temperature);
  const rest = Math.max(0, 1 - logprobs.reduce((sum, logprob) => sum + Math.exp(logprob), 0));
  const count = rest < 1e-6 ? 0 : rest / Math.exp(logprobs.at(-1));
  let others = (k > 0 ? Math.min(count, Math.max(0, k - logprobs.length)) : count) * weigh(logprobs.at(-1));
  const shares = logprobs.map((logprob) => (k > 0 && k < logprobs.length && logprob < logprobs[k - 1] ? 0 : weigh(logprob)));
  let total = shares.reduce((sum, share) => sum + share, others), sum = 0;
  if (p < 1) {
    const limit = Math.max(p, 1e-9) * total;
    shares.forEach((share, rank) => { if (sum >= limit) shares[rank] = 0; sum += share; });
    others = Math.max(0, Math.min(others, limit - sum));
    total = shares.reduce((sum, share) => sum + share, others);
  }
  return { shares: shares.map((share) => share / total), others: others / total };
}

// Returns what is wrong with a setting.
function problemOf({ labels: [{ textContent: name }], validity, min, max }) {
  const must = validity.rangeUnderflow ? `${min} or more` : validity.rangeOverflow ? `${thousands(Number(max))} or less`
    : validity.stepMismatch ? "a whole number" : "a number";
  return `${name[0].toUpperCase()}${name.slice(1)} must be ${must}.`;
}

function drawNext() {
  const wrong = ["temperature", "top_k", "top_p"].map($).find((node) => !node.validity.valid);
  $("wrong").textContent = wrong ? problemOf(wrong) : "";
  next.hidden = Boolean(wrong);
  if (!look || wrong) return;
  const { shares, others } = applySettings(look.next.map((token) => token.logprob));
  const rest = shares.slice(SHOWN).reduce((sum, share) => sum + share, others);
  [...next.children].forEach((item, rank) => {
    const token = look.next[rank], share = rank < SHOWN ? shares[rank] : rest;
    item.hidden = rank < SHOWN ? !token : look.next.length <= SHOWN;
    if (item.hidden) return;
    item.firstElementChild.textContent = rank < SHOWN ? shown(token) : "all others";
    item.lastElementChild.textContent = share ? percent(share) : "excluded";
    item.classList.toggle("soft", !share);
    item.style.setProperty("--share", `${100 * share}%`);
  });
}

function drawInside() {
  strip.replaceChildren(...look.tokens.map((token) => element("span", "", shown(token))));
  drawAttention();
  sight.scrollTop = sight.scrollHeight;
  drawHeads();
  drawLens();
  drawNext();
}

// Setup

// Creates the panel's cells and rows, once the model is known.
function setUpInside() {
  inside.hidden = !model.shape;
  if (!model.shape || lens.children.length) return;
  const { layers, heads: count } = model.shape;
  inside.open = model.can_switch && matchMedia("(min-width: 761px)").matches; // A server's time is shared.
  const button = (className, text, data, act) => {
    const node = element("button", className, text);
    Object.assign(node, { type: "button", tabIndex: -1 });
    Object.assign(node.dataset, data);
    if (model.can_switch) node.setAttribute("role", "switch");
    node.addEventListener("click", () => { node.focus(); if (model.can_switch) act(); });
    return node;
  };
  heads.closest("section").style.flexBasis = `${Math.max(235, Math.min(420, 70 + 21 * count))}px`;
  heads.style.gridTemplateColumns = `max-content repeat(${count}, minmax(18px, 1fr))`;
  heads.append(...["head", ...Array(count).keys()].map((name) => element("span", "number", name)));
  for (let layer = 0; layer < layers; layer++) {
    const name = `layer ${layer}`;
    heads.append(model.can_switch ? button("", name, { layer }, () => toggle(off.layers, layer)) : element("span", "", name));
    for (let at = layer * count; at < (layer + 1) * count; at++) {
      const cell = button("cell", "", { layer, at }, () => switchHead(at));
      cell.setAttribute("aria-label", nameOf(at));
      heads.append(cell);
    }
  }
  if (!model.can_switch) for (const node of document.querySelectorAll(".if-switches")) node.remove();
  const row = (parent, ...children) => { const item = element("li"); item.append(...children); parent.append(item); return item; };
  for (let at = 0; at <= layers; at++) {
    const opinion = element("span", "opinion");
    opinion.append(element("span", "word"), element("span", "share"));
    row(lens, element("span", "soft", layerName(at)), opinion).tabIndex = -1;
  }
  for (let rank = 0; rank <= SHOWN; rank++) row(next, element("span", "word"), element("span", "share"));
  rove(heads, count + Number(model.can_switch), ".cell, [role=switch]");
  rove(lens, 1, "li");
  drawSwitches();
}

// Lets arrow keys move the focus among the items of a grid, which has one tab stop.
function rove(node, columns, selector) {
  const items = [...node.querySelectorAll(selector)], steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  items[0].tabIndex = 0;
  node.addEventListener("focusin", ({ target }) => { for (const item of items) item.tabIndex = item === target ? 0 : -1; });
  node.addEventListener("keydown", (event) => {
    const to = items[items.indexOf(event.target) + steps[event.key]];
    if (!to) return;
    event.preventDefault();
    to.focus();
  });
}

const headAt = (node) => Number(node.closest("#heads .cell")?.dataset.at ?? -1);
function pointAt(head) {
  if (head === pointedHead) return;
  pointedHead = head;
  drawAttention();
}
for (const name of ["pointerover", "focusin"]) heads.addEventListener(name, ({ target }) => pointAt(headAt(target)));
heads.addEventListener("pointerleave", () => pointAt(headAt(document.activeElement)));
heads.addEventListener("focusout", () => pointAt(-1));
for (const name of ["pointerover", "focusin"]) lens.addEventListener(name, ({ target }) => {
  pointedLayer = [...lens.children].indexOf(target.closest("li"));
  drawLens();
});
inside.addEventListener("toggle", () => { refreshInside(); drawAttention(); });
$("settings").addEventListener("input", drawNext);
$("off").lastElementChild.addEventListener("click", () => {
  off.heads.clear();
  off.layers.clear();
  (inside.open ? heads.querySelector("[tabindex='0']") : activeField()).focus({ preventScroll: true });
  drawSwitches();
  refreshInside();
});
addEventListener("resize", drawAttention);
