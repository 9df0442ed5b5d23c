// The position embeddings as an image, and similarity by distance.
heading("Positions", `${data.model}: ${data.kind}, ${data.block_size} places` + (data.table ? ` of ${data.n_embd} numbers` : ""));
let table;
const readout = el("p", { id: "readout", "aria-live": "polite" }, " ");
if (data.table) {
  const [rows, columns] = data.table.shape, values = unpack(data.table.values, Float32Array);
  const maxMagnitude = values.reduce((m, v) => Math.max(m, Math.abs(v)), 1e-30);
  const canvas = el("canvas", { id: "table", tabindex: 0, role: "img", "aria-label": "table of positions: places down, numbers across; arrow keys read it",
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
  table = section("Table", el("p", { class: "soft" }, "Places from top to bottom, numbers of the vector from left to right; blue below zero, red above, on a square-root scale." +
    (data.table.step.some((step) => step > 1) ? ` Every ${data.table.step[0]}th place and every ${data.table.step[1]}th number is shown.` : "")), canvas, readout);
} else table = section("No table", el("p", {}, "These positions are no vectors that are added: queries and keys are turned by an angle that grows with the place."));
const similar = section("Similarity by distance", el("p", { class: "soft" }, data.table ? "The mean cosine of the rows of two places so many tokens apart."
  : "The score of two equal vectors so many tokens apart, whose pairs of numbers weigh the same."),
  lineChart({ name: "similarity", x: "tokens apart", series: [{ name: "similarity", colour: "--c0", points: data.similarity.map((y, x) => [x, y]) }], height: 320 }));
beside([table], [similar]);
document.body.dataset.ready = "yes";
