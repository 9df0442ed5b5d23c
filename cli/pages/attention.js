// Attention of every head, the logit lens and the next-token distribution for one prompt.
const T = data.tokens.length, L = data.layers.length, H = data.heads.length, TRIANGLE = T * (T + 1) / 2;
const weights = unpack(data.patterns, Uint16Array); // Lower triangles, by layer, head and query.
const texts = data.tokens.map((token) => token.text);
const AVERAGE = -1;
const state = { query: T - 1, key: null };
const averages = new Map();

// Returns T (T + 1) / 2 attention weights. Index -1 (AVERAGE) is the mean over layers or heads.
function pattern(layer, head) {
  const name = layer + "/" + head;
  if (averages.has(name)) return averages.get(name);
  const layers = layer === AVERAGE ? [...Array(L).keys()] : [layer];
  const heads = head === AVERAGE ? [...Array(H).keys()] : [head];
  const sum = new Float32Array(TRIANGLE), scale = 1 / (65535 * layers.length * heads.length);
  for (const l of layers) for (const h of heads) {
    const from = (l * H + h) * TRIANGLE;
    for (let i = 0; i < TRIANGLE; i++) sum[i] += weights[from + i] * scale;
  }
  averages.set(name, sum);
  return sum;
}
const share = (layer, head, query, key) => key > query ? 0 : pattern(layer, head)[query * (query + 1) / 2 + key];
const scoreOf = (layer, head) => data.scores[layer * H + head];

const windowOf = (layer) => layer === AVERAGE ? null : data.windows[layer];
const layerName = (layer) => `layer ${data.layers[layer]}` + (windowOf(layer) ? `, window ${withCommas(windowOf(layer))}` : "");

function nameOf(layer, head) {
  if (layer === AVERAGE) return "average of all heads";
  if (head === AVERAGE) return `${layerName(layer)}, average of its heads`;
  return `${layerName(layer)}, head ${data.heads[head]}`;
}
function kindOf(layer, head) {
  if (layer === AVERAGE || head === AVERAGE) return "";
  const mostly = scoreOf(layer, head).mostly;
  return mostly ? KINDS[mostly] : "mixed";
}

function drawSmall(canvas, layer, head) {
  if (layer === AVERAGE || head === AVERAGE) drawTriangle(canvas, T, pattern(layer, head));
  else drawTriangle(canvas, T, weights, 65535, (layer * H + head) * TRIANGLE);
}

// Head buttons in a grid. Tab reaches one button, and arrow keys move to the others.
const cells = [];
function headButton(layer, head, row, column) {
  const canvas = el("canvas", { "aria-hidden": "true" });
  const kindLabel = kindOf(layer, head);
  const button = el("button", {
    type: "button", "data-layer": layer, "data-head": head, "aria-pressed": "false", tabindex: -1,
    "aria-label": nameOf(layer, head) + (kindLabel ? ": " + kindLabel : ""), title: nameOf(layer, head) + (kindLabel ? ": " + kindLabel : ""),
    style: `grid-row:${row};grid-column:${column}`,
    onclick: () => choose(layer, head), onkeydown: (event) => moveFocus(event, row, column),
  }, canvas, layer === AVERAGE || head === AVERAGE ? "average" : scoreOf(layer, head).mostly || "mixed");
  cells.push({ layer, head, row, column, button });
  redraws.push(() => drawSmall(canvas, layer, head));
  drawSmall(canvas, layer, head);
  return button;
}
function moveFocus(event, row, column) {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = cells.find((cell) => cell.row === row + step[0] && cell.column === column + step[1]);
  if (next) { choose(next.layer, next.head); next.button.focus(); }
}

const grid = el("div", { class: "heads", role: "group", "aria-label": "heads", style: `grid-template-columns:auto repeat(${H + 1},minmax(56px,80px))` });
const big = el("canvas", { id: "map", tabindex: 0, role: "img" });
const readout = el("p", { id: "readout", "aria-live": "polite" });
const facts = el("div", { id: "facts" });
const strip = tokenStrip(texts.map(showSpaces), (q) => point(q, null));
strip.id = "strip";
const list = el("table", { id: "attends", class: "bars" });
const geometry = {};

function choose(layer, head) {
  state.layer = layer; state.head = head;
  for (const cell of cells) {
    const isChosen = cell.layer === layer && cell.head === head;
    cell.button.setAttribute("aria-pressed", isChosen);
    cell.button.tabIndex = isChosen ? 0 : -1;
  }
  drawBig(); showFacts(); point(state.query, null);
}

const cellSize = () => Math.max(4, Math.min(26, Math.floor(Math.min(620, innerWidth - 140) / T)));
function drawBig() {
  const cell = cellSize(), labels = cell >= 9, font = Math.min(13, cell);
  const margin = labels ? 108 : 26, size = margin + cell * T + 4;
  const context = context2d(big, size, size);
  const values = pattern(state.layer, state.head), span = windowOf(state.layer) || T;
  for (let q = 0; q < T; q++) for (let k = Math.max(0, q - span + 1); k <= q; k++) {
    context.fillStyle = rgb(ramp(values[q * (q + 1) / 2 + k]));
    context.fillRect(margin + k * cell, margin + q * cell, cell, cell);
  }
  context.strokeStyle = colour("--line");
  context.strokeRect(margin - 0.5, margin - 0.5, cell * T + 1, cell * T + 1);
  context.fillStyle = colour("--soft");
  context.font = `${labels ? font : 11}px ui-monospace, "DejaVu Sans Mono", monospace`;
  context.textBaseline = "middle";
  if (labels) for (let i = 0; i < T; i++) {
    context.textAlign = "right";
    context.fillText(clip(texts[i]), margin - 4, margin + (i + 0.5) * cell);
    context.save();
    context.translate(margin + (i + 0.5) * cell, margin - 4);
    context.rotate(-Math.PI / 2);
    context.textAlign = "left";
    context.fillText(clip(texts[i]), 0, 0);
    context.restore();
  } else {
    context.textAlign = "left";
    context.fillText("keys →", margin, 12);
    context.save(); context.translate(12, margin); context.rotate(-Math.PI / 2); context.textAlign = "right";
    context.fillText("← queries", 0, 0); context.restore();
  }
  Object.assign(geometry, { cell, margin });
  big.setAttribute("aria-label", `attention of ${nameOf(state.layer, state.head)}: queries down, keys across; arrow keys move`);
}
const clip = (text) => showSpaces(text).length > 12 ? showSpaces(text).slice(0, 11) + "…" : showSpaces(text);

function drawMarks() { // Redraws the map, with frames around the query's row and the key's cell.
  drawBig();
  const { cell, margin } = geometry, context = big.getContext("2d");
  context.strokeStyle = colour("--hot");
  context.lineWidth = 2;
  context.strokeRect(margin - 1, margin + state.query * cell - 1, cell * (state.query + 1) + 2, cell + 2);
  if (state.key !== null) context.strokeRect(margin + state.key * cell - 1, margin + state.query * cell - 1, cell + 2, cell + 2);
}

// Shows what a token attends to, on the map, in the text and in the list.
function point(query, key) {
  state.query = query;
  state.key = key;
  drawMarks();
  [...strip.children].forEach((token, k) => {
    shade(token, k <= query ? share(state.layer, state.head, query, k) : null);
    token.classList.toggle("query", k === query);
    token.tabIndex = k === query ? 0 : -1;
  });
  const keys = [...Array(query + 1).keys()].sort((a, b) => share(state.layer, state.head, query, b) - share(state.layer, state.head, query, a));
  list.replaceChildren(el("caption", { class: "soft" }, `“${showSpaces(texts[query])}” (${query}) attends to`),
    ...keys.slice(0, 8).map((k) => el("tr", {}, el("th", { scope: "row", class: "mono" }, `${showSpaces(texts[k])} (${k})`),
      el("td", { class: "number" }, percent(share(state.layer, state.head, query, k))),
      el("td", {}, el("span", { class: "bar", style: `width:${(100 * share(state.layer, state.head, query, k)).toFixed(1)}%` })))));
  const target = key === null ? keys[0] : key;
  readout.textContent = `${nameOf(state.layer, state.head)}: “${showSpaces(texts[query])}” (${query}) gives ` +
    `${percent(share(state.layer, state.head, query, target))} to “${showSpaces(texts[target])}” (${target})`;
}

function showFacts() {
  if (state.layer === AVERAGE || state.head === AVERAGE) {
    facts.replaceChildren(el("p", { class: "soft" }, "An average of heads has no scores: choose a head above."));
    return;
  }
  const scores = scoreOf(state.layer, state.head);
  const rows = Object.keys(data.kinds).map((kind) => el("tr", { class: scores.mostly === kind ? "differs" : "" },
    el("th", { scope: "row" }, data.kinds[kind]),
    el("td", { class: "number" }, percent(scores.prompt[kind])), el("td", { class: "number" }, percent(scores.chance.prompt[kind])),
    el("td", { class: "number" }, percent(scores.probe[kind])), el("td", { class: "number" }, percent(scores.chance.probe[kind]))));
  facts.replaceChildren(
    el("p", {}, "Mostly: ", el("strong", { id: "mostly" }, kindOf(state.layer, state.head)),
      `; entropy ${scores.entropy.toFixed(2)} bits, ${scores.distance.toFixed(1)} tokens back on average`),
    scroller("scores of the head", el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "attention to"), el("th", { class: "number" }, "here"),
      el("th", { class: "number" }, "even"), el("th", { class: "number" }, "random twice"), el("th", { class: "number" }, "even"))),
      el("tbody", {}, rows))),
    el("p", { class: "soft" }, "A query's share of attention, averaged over the queries that have such a key. “even” is the share under " +
      "uniform attention. “random twice” is measured on a repeated sequence of random tokens."));
}

big.addEventListener("pointermove", (event) => {
  const box = big.getBoundingClientRect();
  const k = Math.floor((event.clientX - box.left - geometry.margin) / geometry.cell);
  const q = Math.floor((event.clientY - box.top - geometry.margin) / geometry.cell);
  if (q >= 0 && q < T && k >= 0 && k <= q && (q !== state.query || k !== state.key)) point(q, k);
});
big.addEventListener("keydown", (event) => {
  const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!step) return;
  event.preventDefault();
  const q = Math.min(T - 1, Math.max(0, state.query + step[0]));
  point(q, Math.min(q, Math.max(0, (state.key === null ? q : state.key) + step[1])));
});

heading("Attention", `${data.model}: ${T} token${T === 1 ? "" : "s"}` + (data.dropped ? `, the last of ${T + data.dropped}: the rest exceeds the context` : ""));
for (let l = -1; l < L; l++) {
  if (l === AVERAGE && L * H === 1) continue;
  const row = l + 2;
  grid.append(el("span", { class: "label", style: `grid-row:${row};grid-column:1` }, l === AVERAGE ? "all" : layerName(l)));
  if (l === AVERAGE || H > 1) grid.append(headButton(l, AVERAGE, row, 2));
  if (l !== AVERAGE) for (let h = 0; h < H; h++) grid.append(headButton(l, h, row, 3 + h));
}
const heads = section("Heads", el("p", { class: "soft" }, "Each square is a head, with queries down and keys across. Darker (in dark mode: brighter) means more attention, on a " +
  "square-root scale. Layers run from top to bottom, heads from left to right, both from 0. Click, or use the arrow keys."),
  scroller("heads", grid));
const head = section("Head", el("div", { class: "row" }, scroller("attention of a head", big), facts), readout);
const text = section("Text", el("p", { class: "soft" }, "Point at a token, or use the arrow keys, to color the tokens it attends to."), strip, list);
if (H <= 6) { // More heads need the whole width.
  beside([heads], [head]);
  head.parentElement.style.flexBasis = `${108 + 4 + T * cellSize()}px`; // Width of the map.
}

// Logit lens
const lensTable = el("table", { class: "lens", id: "lens" });
function drawLens() {
  const { ids, probabilities } = data.lens;
  lensTable.replaceChildren(...lensRows(texts, [...ids.keys()], ids.length - 1, (l, t) => ({
    text: data.texts[ids[l][t][0]], share: probabilities[l][t][0],
    title: ids[l][t].map((id, i) => `${showSpaces(data.texts[id])}  ${percent(probabilities[l][t][i])}`).join("\n"),
  })));
}
redraws.push(drawLens);
drawLens();
const lensBox = scroller("logit lens", lensTable);
section("Logit lens", el("p", { class: "soft" }, "The residual stream after each block, read through the last norm and the unembedding: the most " +
  "likely next token after each token (columns), colored by its probability. The last row is the model's prediction. Point at a cell for the top five."),
  lensBox);

// Next token
const logits = unpack(data.next.logits, Float32Array);
const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a] || a - b);
const controls = {};
function control(name, label, attributes) {
  const output = el("output", {});
  const input = el("input", { id: name, type: "range", ...attributes, oninput: () => drawNext() });
  controls[name] = { input, output };
  return el("label", { for: name }, label, input, output);
}
// Returns probabilities by rank after temperature, top-k and top-p, in this order, as in `gpt sample`.
function distribution(temperature, k, p) {
  const greedy = temperature === 0;
  const unnormalized = order.map((id) => greedy ? 0 : Math.exp((logits[id] - logits[order[0]]) / temperature));
  if (greedy) unnormalized[0] = 1;
  const why = order.map((id, rank) => k > 0 && k < order.length && logits[id] < logits[order[k - 1]] ? "top-k" : null);
  const sum = (keep) => unnormalized.reduce((total, value, rank) => keep(rank) ? total + value : total, 0);
  const afterK = sum((rank) => why[rank] === null);
  if (p > 0 && p < 1) {
    let before = 0;
    for (let rank = 0; rank < order.length && why[rank] === null; rank++) {
      if (rank > 0 && before >= p) why[rank] = "top-p";
      before += unnormalized[rank] / afterK;
    }
  }
  const total = sum((rank) => why[rank] === null);
  return { probabilities: unnormalized.map((value, rank) => why[rank] === null ? value / total : 0), why, kept: greedy ? 1 : why.filter((reason) => reason === null).length };
}
const nextTable = el("table", { id: "next", class: "bars" }), nextFacts = el("p", { id: "next-facts", "aria-live": "polite" });
function drawNext() {
  const temperature = +controls.temperature.input.value, k = +controls["top-k"].input.value, p = +controls["top-p"].input.value;
  const { probabilities, why, kept } = distribution(temperature, k, p);
  const model = distribution(1, 0, 0).probabilities;
  controls.temperature.output.textContent = temperature === 0 ? "0: greedy" : temperature.toFixed(2);
  controls["top-k"].output.textContent = k || "off";
  controls["top-p"].output.textContent = p > 0 && p < 1 ? p.toFixed(2) : "off";
  const bits = -probabilities.reduce((total, x) => x > 0 ? total + x * Math.log2(x) : total, 0);
  nextFacts.textContent = `${withCommas(kept)} of ${withCommas(order.length)} tokens can be drawn, ${Math.abs(bits).toFixed(2)} bits; greedy takes “${showSpaces(data.texts[order[0]])}”`;
  const rows = order.slice(0, 25).map((id, rank) => el("tr", { "data-id": id },
    el("th", { scope: "row", class: "mono" }, showSpaces(data.texts[id])),
    el("td", { class: "number" }, percent(model[rank])), el("td", { class: "number now" }, percent(probabilities[rank])),
    el("td", {}, el("span", { class: "bar" + (why[rank] ? " out" : ""), style: `width:${(100 * (why[rank] ? model[rank] : probabilities[rank])).toFixed(2)}%` })),
    el("td", { class: "soft why" }, why[rank] ? "excluded by " + why[rank] : rank === 0 ? "greedy" : "")));
  nextTable.replaceChildren(el("thead", {}, el("tr", {}, el("th", {}, "next token"), el("th", { class: "number" }, "model"),
    el("th", { class: "number" }, "drawn with"), el("td", {}), el("td", {}))), el("tbody", {}, rows));
}
const next = section("Next token", el("div", { class: "controls panel" },
  control("temperature", "temperature", { min: 0, max: 2, step: 0.05, value: 1 }),
  control("top-k", "top-k", { min: 0, max: Math.min(100, order.length), step: 1, value: 0 }),
  control("top-p", "top-p", { min: 0, max: 1, step: 0.01, value: 0 })), nextFacts, scroller("next token", nextTable));
beside([text], [next]);
lensBox.scrollLeft = lensBox.scrollWidth; // The last column is the answer.
addEventListener("resize", drawMarks);
drawNext();
redraws.push(() => { showFacts(); point(state.query, state.key); });
choose(...data.clearest);
document.body.dataset.ready = "yes";
