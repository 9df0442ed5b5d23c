// The position embeddings as an image, and similarity by distance.
heading("Positions", `${data.model}: ${data.kind}, ${data.block_size} places` + (data.table ? ` of ${data.n_embd} numbers` : ""));
let table;
const readout = el("p", { id: "readout", "aria-live": "polite" }, " ");
if (data.table) {
  const [rows, columns] = data.table.shape, values = unpack(data.table.values, Float32Array);
  const maxMagnitude = values.reduce((m, v) => Math.max(m, Math.abs(v)), 1e-30);
  const canvas = el("canvas", { id: "table", tabindex: 0, role: "img", "aria-label": "position table: positions down, dimensions across; arrow keys move",
    style: `width:100%;height:${Math.max(300, Math.min(rows, 900))}px;image-rendering:pixelated` });
  const draw = () => {
    canvas.width = columns; canvas.height = rows;
    const image = new ImageData(columns, rows), low = ends[0], cold = [40, 90, 200], hot = [210, 60, 30];
    for (let i = 0; i < values.length; i++) {
      const x = Math.sqrt(Math.abs(values[i]) / maxMagnitude), end = values[i] < 0 ? cold : hot;
      for (let c = 0; c < 3; c++) image.data[4 * i + c] = Math.round(low[c] + (end[c] - low[c]) * x);
      image.data[4 * i + 3] = 255;
    }
    canvas.getContext("2d").putImageData(image, 0, 0);
  };
  const at = { row: 0, column: 0 };
  const read = () => { readout.textContent = `place ${at.row * data.table.step[0]}, number ${at.column * data.table.step[1]}: ${formatNumber(values[at.row * columns + at.column])}`; };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    at.row = Math.min(rows - 1, Math.max(0, Math.floor((event.clientY - box.top) / box.height * rows)));
    at.column = Math.min(columns - 1, Math.max(0, Math.floor((event.clientX - box.left) / box.width * columns)));
    read();
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    at.row = Math.min(rows - 1, Math.max(0, at.row + step[0]));
    at.column = Math.min(columns - 1, Math.max(0, at.column + step[1]));
    read();
  });
  redraws.push(draw);
  draw();
  table = section("Table", el("p", { class: "soft" }, "Positions from top to bottom, dimensions from left to right; blue below zero, red above, on a square-root scale." +
    (data.table.step.some((step) => step > 1) ? ` Shown: every ${data.table.step[0]}th position and every ${data.table.step[1]}th dimension.` : "")), canvas, readout);
} else table = section("No table", el("p", {}, "RoPE adds no vectors: it rotates queries and keys by an angle that grows with the position."));
const similar = section("Similarity by distance", el("p", { class: "soft" }, data.table ? "Mean cosine similarity of two rows of the table, by their distance in tokens."
  : "Score of two equal vectors with uniform pairs, by their distance in tokens."),
  lineChart({ name: "similarity", x: "tokens apart", series: [{ name: "similarity", colour: "--c0", points: data.similarity.map((y, x) => [x, y]) }], height: 320 }));
beside([table], [similar]);
document.body.dataset.ready = "yes";
