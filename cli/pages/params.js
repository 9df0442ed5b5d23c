// Parameters per matrix as bars, and a comparison of models.
const shapes = data.shapes;
heading(shapes.length > 1 ? `Parameters of ${shapes.length} models` : `Parameters of ${shapes[0].name}`, data.names);
// Use the longest list, because models without a gate have fewer rows.
const kinds = shapes.map((shape) => shape.rows).reduce((a, b) => b.length > a.length ? b : a).map((row) => row.matrix);
const colourOf = (matrix) => `var(--c${kinds.indexOf(matrix)})`;
const norms = { layernorm: "LayerNorms", rmsnorm: "RMSNorms" };

if (shapes.length > 1) {
  const stacked = (shape) => el("div", { class: "stacked", role: "img",
    "aria-label": shape.rows.map((row) => `${row.matrix} ${percent(row.parameters / shape.total_weights)}`).join(", ") },
    shape.rows.map((row) => el("span", { title: `${row.matrix}: ${withCommas(row.parameters)}, ${percent(row.parameters / shape.total_weights)}`,
      style: `width:${100 * row.parameters / shape.total_weights}%;background:${colourOf(row.matrix)}` })));
  section("Side by side", el("p", { class: "legend" }, kinds.map((kind) => el("span", { class: "legend-item" }, el("span", { class: "swatch", style: `background:${colourOf(kind)}` }), kind))),
    scroller("models side by side", el("table", { id: "compared", class: "bars" },
      el("thead", {}, el("tr", {}, ["model", "layers", "heads", "width", "context", "trainable", "shares of the weights"].map((name, i) => el("th", { class: i && i < 6 ? "number" : "" }, name)))),
      el("tbody", {}, shapes.map((shape) => el("tr", {}, el("th", { scope: "row" }, shape.name),
        ["n_layer", "n_head", "n_embd", "block_size"].map((key) => el("td", { class: "soft", style: "text-align:right" }, withCommas(shape.config[key]))),
        el("td", { class: "number" }, withCommas(shape.trainable)), el("td", {}, stacked(shape))))))));
}
const cards = el("div", { class: "cards" });
document.getElementById("main").append(cards);
for (const shape of shapes) {
  const maxParameters = Math.max(...shape.rows.map((row) => row.parameters));
  const node = section(shape.name, scroller(`matrices of ${shape.name}`, el("table", { class: "bars" },
    el("thead", {}, el("tr", {}, el("th", {}, "Matrix"), el("th", {}, "Dimensions"), el("th", { class: "number" }, "Parameters"), el("th", { class: "number" }, "Share"), el("td", {}))),
    el("tbody", {}, shape.rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.matrix), el("td", {}, row.dimensions),
      el("td", { class: "number" }, withCommas(row.parameters)), el("td", { class: "number" }, percent(row.parameters / shape.total_weights)),
      el("td", {}, el("span", { class: "bar", style: `width:${(100 * row.parameters / maxParameters).toFixed(3)}%;background:${colourOf(row.matrix)}` }))))),
    )), el("p", {}, `${withCommas(shape.total_weights)} weights − ${withCommas(shape.tied)} tied + ${withCommas(shape.positions)} positions + ` +
    `${withCommas(shape.biases)} biases + ${withCommas(shape.layer_norms)} ${norms[shape.config.norm]} = `, el("strong", {}, `${withCommas(shape.trainable)} trainable`)),
    shape.note ? el("p", { class: "soft" }, shape.note + ".") : null);
  node.dataset.shape = shape.name;
  cards.append(node);
}
document.body.dataset.ready = "yes";
