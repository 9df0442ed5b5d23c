// A report on runs: overlaid curves, settings, samples and copied spans.
const runs = data.runs, colours = runs.map((_, i) => `--c${i % 8}`), hidden = new Set();
// Returns a run's steps, or its evaluations if it has no steps yet.
const recorded = (run) => run.steps.step.length ? run.steps : run.evals;
const last = (list) => list.length ? list[list.length - 1] : null;
heading(runs.length > 1 ? `${runs.length} runs` : runs[0].name, runs.map((run) => run.run).join(", "));

section("Results", scroller("results", el("table", { id: "results" },
  el("thead", {}, el("tr", {}, ["run", "steps", "tokens", "time", "held-out loss", "best at step", "bits per byte", "tokens/s", "end"]
    .map((name, i) => el("th", { class: i && i < 8 ? "number" : "" }, name)))),
  el("tbody", {}, runs.map((run, i) => {
    const end = run.end || {}, best = run.best || {}, loss = end.val_loss ?? best.val_loss, at = (key) => last(recorded(run)[key]);
    const cells = [withCommas(at("step") ?? 0), at("tokens") === null ? "–" : withCommas(at("tokens")), formatSeconds(end.seconds ?? at("seconds")),
      loss === undefined || loss === null ? "–" : loss < 1e6 ? loss.toFixed(4) : formatNumber(loss), best.step === undefined ? "–" : withCommas(best.step),
      end.bits_per_byte ? end.bits_per_byte.toFixed(4) : "–", last(run.steps.tokens_per_second) === null ? "–" : withCommas(last(run.steps.tokens_per_second))];
    return el("tr", {}, el("th", { scope: "row" }, el("span", { class: "swatch", style: `background:var(${colours[i]})` }), run.name),
      cells.map((cell) => el("td", { class: "number" }, cell)), el("td", {}, run.outcome));
  })))),
  data.warning && el("p", { class: "warn" }, `These runs have ${data.warning}.`),
  runs.filter((run) => run.verdict).map((run) => el("p", { class: "verdict" }, (runs.length > 1 ? `${run.name}: ` : "The model is ") + run.verdict + ".")));

const axes = { step: "steps", tokens: "tokens", seconds: "time" };
let xColumn = "step";
const [unit, unitName] = data.time;
const chartBox = el("div", { id: "curves" });
const heldOutStyle = { dash: "5 4", dots: true };
// Returns the curves of a chart. The loss chart has raw (pale), smoothed and held-out losses.
function series(name) {
  return runs.flatMap((run, i) => {
    if (hidden.has(i)) return [];
    const makeCurve = (columns, column, label, style) => ({ name: label, colour: colours[i], ...style,
      points: columns[xColumn].map((x, at) => [xColumn === "seconds" ? x / unit : x, columns[column][at]]).filter(([x]) => x !== null) });
    if (name !== "loss") return [makeCurve(run.steps, name, runs.length > 1 ? run.name : name)];
    const label = runs.length > 1 ? run.name : "training";
    const curves = data.smooths ? [makeCurve(run.steps, "loss", label, { pale: true })] : [];
    curves.push(makeCurve(run.steps, "smooth", label));
    if (run.evals.step.length) curves.push(makeCurve(run.evals, "val_loss", runs.length > 1 ? `${run.name} held-out` : "held-out",
      { ...heldOutStyle, ...(runs.length === 1 ? { colour: "--c1" } : {}) }));
    const xs = curves.flatMap((curve) => curve.points.map((p) => p[0])), span = [Math.min(...xs), Math.max(...xs)];
    for (const [name, level] of Object.entries(run.levels)) curves.push({ name, colour: "--soft", dash: "1 5", level: true, points: span.map((x) => [x, level]) });
    return curves;
  });
}
function legend() {
  const [trainingColour, heldOutColour] = runs.length > 1 ? ["--soft", "--soft"] : [colours[0], "--c1"];
  return [...(data.smooths ? [["training", { colour: trainingColour, pale: true }]] : []),
    [data.smooths ? "training, smoothed" : "training", { colour: trainingColour }],
    ...(runs.some((run) => run.evals.step.length) ? [["held-out", { colour: heldOutColour, ...heldOutStyle }]] : [])];
}
function draw() {
  const charts = [["loss", `Loss, ${data.unit}${data.loss.cut ? `, ${data.loss.cut}` : ""}`], ["lr", "Learning rate"], ["grad_norm", "Gradient norm, before clipping"], ["tokens_per_second", "Tokens per second"]];
  if (runs.some((run) => run.steps.mfu.some((x) => x !== null))) charts.push(["mfu", "Share of the device's peak (MFU)"]);
  if (runs.every((run) => run.steps.accuracy)) charts.push(["accuracy", "Accuracy"], ["margin", "Margin of rewards"]);
  if (runs.every((run) => run.steps.reward)) charts.push(["equal_groups", "Share of groups with equal rewards"], ["answer_tokens", "Tokens per answer"]);
  const [loss, ...others] = charts.map(([name, title]) => lineChart({ name, title, x: xColumn === "seconds" ? unitName : axes[xColumn], series: series(name),
    logarithmic: name === "grad_norm", height: 220, ...(name === "loss" ? { legend: legend(), height: 380, high: data.loss.high ?? Infinity, logarithmic: data.loss.logarithmic } : {}) }));
  chartBox.replaceChildren(loss, el("div", { class: "charts" }, others));
}
section("Curves", el("div", { class: "controls" }, el("label", { for: "axis" }, "against",
  el("select", { id: "axis", onchange: (event) => { xColumn = event.target.value; draw(); } },
    Object.entries(axes).map(([key, name]) => el("option", { value: key }, name)))),
  runs.length > 1 ? el("span", { class: "legend" }, runs.map((run, i) => el("button", { type: "button", "aria-pressed": "true",
    onclick: (event) => {
      hidden.has(i) ? hidden.delete(i) : hidden.add(i);
      event.currentTarget.setAttribute("aria-pressed", !hidden.has(i));
      draw();
    } }, el("span", { class: "swatch", style: `background:var(${colours[i]})` }), run.name))) : null), chartBox);
draw();

if (runs.length === 1 && runs[0].frames.length) {
  const film = makeFilm();
  runs[0].frames.forEach(film.add);
}
const samples = section("Samples");
runs.forEach((run, i) => {
  if (!run.steps.step.length) return;
  if (runs.length > 1) samples.append(el("h3", {}, run.name));
  if (!run.samples.length) { samples.append(el("p", { class: "soft" }, "This run has no samples.")); return; }
  const text = el("pre", { "data-sample": i }), copyNote = el("p", { class: "soft" }), origins = el("div", { class: "panel origins", "aria-live": "polite" }), output = el("output", {});
  const slider = el("input", { type: "range", id: `sample-${i}`, min: 0, max: run.samples.length - 1, value: run.samples.length - 1, oninput: () => show() });
  function show() {
    const sample = run.samples[+slider.value];
    output.textContent = `step ${withCommas(sample.step)}`;
    text.replaceChildren(...(sample.pieces ?? [sample]).map((piece) => piece.passages ? copiedSpan(piece, origins) : piece.text));
    origins.hidden = true;
    copyNote.textContent = sample.share === undefined ? "" : sample.share === null ? "too short to compare" : `${percent(sample.share)} of its 8-grams are in the training text; ` +
      (sample.longest ? `the longest copied span has ${sample.longest} tokens. Choose a marked span to see where it is there.` : "no span of 8 tokens is");
  }
  samples.append(el("div", { class: "controls" }, el("label", { for: `sample-${i}` }, "sampled at", slider, output)), text, copyNote, origins);
  show();
});
// Returns a copied span of a sample, which shows its passages of the training text when it is chosen.
function copiedSpan({ text, length, count, passages }, origins) {
  const show = ({ currentTarget }) => {
    for (const mark of currentTarget.parentNode.querySelectorAll("mark")) mark.setAttribute("aria-pressed", mark === currentTarget);
    origins.replaceChildren(el("p", {}, `This passage of ${length} tokens is in ${count === 1 ? "one place" : `${withCommas(count)} places`} of the training text.`),
      el("ol", {}, passages.map((passage) => el("li", {}, el("q", {}, passage.before && `…${passage.before}`, el("mark", {}, passage.text), passage.after && `${passage.after}…`),
        el("span", { class: "soft" }, `document ${withCommas(passage.document)}, line ${withCommas(passage.line)}${passage.length < length ? `: ${passage.length} tokens` : ""}`)))));
    origins.hidden = false;
  };
  const press = (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); show(event); } };
  return el("mark", { role: "button", tabindex: 0, "aria-pressed": "false", onclick: show, onkeydown: press }, text);
}

const copying = section("Copying", runs.filter((run) => run.steps.step.length).map((run) => {
  const copied = run.copying, name = runs.length > 1 ? `${run.name}: ` : "";
  if (!copied) return el("p", { class: "soft" }, name + (run.samples.length ? "not measured, because the training tokens are missing." : "no samples."));
  const part = copied.compared === copied.trained ? "" : ` (its first ${withCommas(copied.compared)} of ${withCommas(copied.trained)} tokens)`;
  return [el("p", {}, name + (copied.share === null ? "" : `${percent(copied.share)} of all samples' 8-grams are in the training text${part}; `) +
    (copied.longest ? `the longest copied span has ${copied.longest} tokens, at step ${withCommas(copied.step)}:` : "no span of 8 tokens is.")),
    copied.longest ? el("pre", {}, copied.text) : null];
}).flat());

// Losses, answers and token probabilities of fine-tuned runs and of their base models.
const signed = (number) => `${number > 0 ? "+" : ""}${number.toFixed(4)}`;
const changes = (label, unit, rows) => scroller(label, el("table", {}, el("thead", {}, el("tr", {}, [unit, "before", "after", "change"]
  .map((name, i) => el("th", { class: i ? "number" : "" }, name)))), el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.text),
  [row.before.toFixed(4), row.after.toFixed(4), signed(row.change)].map((cell) => el("td", { class: "number" }, cell)))))));
for (const run of runs.filter((run) => run.before_after)) {
  const { base, tuned, losses, answers, passage, most } = run.before_after, largest = Math.max(...passage.map((token) => Math.abs(token.change))) || 1;
  const strip = el("p", { class: "tokens" });
  for (const token of passage) {
    const shade = `color-mix(in srgb, var(${token.change > 0 ? "--c0" : "--c1"}) ${Math.round(70 * Math.abs(token.change) / largest)}%, transparent)`;
    strip.append(el("span", { class: "token", style: `background:${shade}`, title: `log-probability ${token.before.toFixed(4)} → ${token.after.toFixed(4)}` }, token.text));
    if (token.text.endsWith("\\n")) strip.append(el("br"));
  }
  const swatch = (colour) => el("span", { class: "swatch", style: `background:var(${colour})` });
  section(runs.length > 1 ? `Before and after: ${run.name}` : "Before and after", el("p", { class: "soft" }, `before: ${base}; after: ${tuned}`),
    el("h3", {}, "Loss, nats per token"), changes("losses before and after", "loss on", losses),
    el("h3", {}, "Answers with the same seed"), answers.flatMap((answer) => [el("p", { class: "soft" }, "prompt"), el("pre", {}, answer.prompt),
      el("div", { class: "beside" }, ["before", "after"].map((when) => el("div", {}, el("p", { class: "soft" }, when), el("pre", {}, answer[when]))))]),
    el("h3", {}, "A held-out passage"), el("p", { class: "soft" }, swatch("--c0"), "more likely after ", swatch("--c1"), "less likely after"), strip,
    el("h3", {}, "Most changed log-probabilities"), changes("most changed tokens", "token", most.map((at) => ({ ...passage[at], text: showSpaces(passage[at].text) }))));
}

// Settings that differ come first; the others are folded.
const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].filter((key) => runs.some((run) => (run.settings[key] ?? null) !== null));
const differing = runs.length > 1 ? keys.filter((key) => data.differing.includes(key)) : [], others = keys.filter((key) => !differing.includes(key));
const settings = (label, shown) => scroller(label, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "setting"), runs.map((run) => el("th", {}, run.name)))),
  el("tbody", {}, shown.map((key) => el("tr", {}, el("th", { scope: "row" }, key), runs.map((run) => el("td", { class: "mono" }, String(run.settings[key] ?? "–"))))))));
const settingsSection = section("Settings", differing.length ? settings("settings that differ", differing) : null,
  el("details", {}, el("summary", {}, `${differing.length ? "the other " : ""}${others.length} settings`), settings("other settings", others)));
beside([samples, copying], [settingsSection]);
const events = runs.flatMap((run) => [...run.rollbacks.map((rollback) => `${run.name} rolled back from step ${rollback.failed_step} to ${rollback.step}: ${rollback.why}`),
  ...run.resumes.map((step) => `${run.name} resumed from step ${step}`), ...(run.unread_lines ? [`${run.unread_lines} lines of ${run.name}'s metrics could not be read`] : [])]);
if (events.length) section("Events", el("ul", {}, events.map((line) => el("li", {}, line))));
document.body.dataset.ready = "yes";
