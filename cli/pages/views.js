// Views of how a model reads a text, for several pages: tokens, attention patterns and the logit lens.

// Returns a row of tokens. Tab reaches one of them, and arrow keys move to the others. `choose` is called with the token
// that the pointer or the focus is on.
function tokenStrip(texts, choose, attributes = () => ({})) {
  const strip = el("p", { class: "tokens" });
  const focus = (i) => {
    [...strip.querySelectorAll(".token")].forEach((token, at) => { token.tabIndex = at === i ? 0 : -1; });
    strip.querySelectorAll(".token")[i].focus();
  };
  texts.forEach((text, i) => {
    strip.append(el("span", { class: "token", role: "button", tabindex: i ? -1 : 0, "aria-label": `token ${i}: ${showSpaces(text)}`, ...attributes(i),
      onpointerenter: () => choose(i), onfocus: () => choose(i), onkeydown: (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, Home: -texts.length, End: texts.length }[event.key];
        if (!step) return;
        event.preventDefault();
        focus(Math.min(texts.length - 1, Math.max(0, i + step)));
      } }, text));
  });
  return strip;
}

// Colours an element by a share from 0 to 1, or not at all if it is null.
function shade(node, share) {
  const parts = share === null ? null : ramp(share);
  node.style.background = parts ? rgb(parts) : "none";
  node.style.color = parts ? readable(parts) : "";
}

// Draws T (T + 1) / 2 attention weights as a square of T queries and T keys. A weight of 1 is `one`.
function drawTriangle(canvas, T, weights, one = 1, from = 0) {
  const image = new ImageData(T, T), pixels = new Uint32Array(image.data.buffer);
  pixels.fill(pixel(ends[0]));
  for (let q = 0, at = from; q < T; q++) for (let k = 0; k <= q; k++, at++) pixels[q * T + k] = steps[Math.round(weights[at] * 1024 / one)];
  canvas.width = canvas.height = T;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Returns the head and body of a logit lens. `layers` has the number of blocks before each row, `last` that of all blocks.
// `cell` returns a cell's token, probability and title.
function lensRows(texts, layers, last, cell) {
  const name = (blocks) => blocks === 0 ? "embedding" : blocks === last ? `after ${blocks - 1}: output` : `after ${blocks - 1}`;
  return [el("thead", {}, el("tr", {}, el("td", {}), texts.map((text) => el("th", { scope: "col", class: "mono" }, showSpaces(text))))),
    el("tbody", {}, layers.map((blocks, row) => el("tr", {}, el("th", { scope: "row" }, name(blocks)), texts.map((_, t) => {
      const { text, share, title } = cell(row, t), node = el("td", { class: "mono", title }, showSpaces(text));
      shade(node, share ** 2);
      return node;
    }))))];
}
const KINDS = { previous: "previous token", first: "first token", itself: "itself", same: "same token", matching: "matching earlier pattern" };
