// The page of a run while it trains. Server-sent events bring the lines of its metrics, and what is known of it.
const MOST_POINTS = 300, MOST_STEPS = 4000; // Points of a drawn curve, and steps kept.
const ENDS = { steps: "The training is over.", patience: "The training is over: it had stopped improving.", signal: "The training was interrupted.",
  diverged: "The training has failed: the loss exploded.", reward: "The program that gives the rewards has failed." };
let run = { name: "", texts: [], levels: {}, earlier: [] }, stepEvents = [], evals = [], end = null, connection = "connecting", ready = 0, timer = 0;
let start = null; // Seconds at the first event, when training began.
const memory = {}; // The selected time of the chart.

heading("Watch it learn", "");
const title = document.querySelector("h1"), about = document.querySelector("header + p");
const status = el("p", { id: "status", role: "status" }), numbers = el("div", { class: "numbers", id: "numbers" });
document.getElementById("main").append(status, numbers);

const result = section("Result");
result.hidden = true;
const chart = el("div", { id: "curves" });
section("How well it guesses", chart, explain(
  "The loss is how surprised the model is by the next token, on average: less is better. The line is the text it trains on, the dashed line a text that it never trains on. " +
  "If the dashed line rises while the other falls, it learns its text by heart.",
  "The dotted levels are simple rivals: “uniform” knows nothing at all, “unigram” knows only how frequent each token is, xz is a program that compresses files. Gray lines are earlier runs on the same text."));

const field = el("input", { type: "text", id: "own", maxlength: 200, placeholder: "a sentence of yours" }), answer = el("p", { class: "soft", "aria-live": "polite" });
const form = el("form", { class: "own", onsubmit: async (event) => {
  event.preventDefault();
  try {
    const response = await fetch("/sentence", { method: "POST", body: field.value });
    answer.textContent = response.ok ? `The model will read ${field.value.trim() ? "it" : "its own sentence again"} at the next evaluation.` : await response.text();
  } catch {
    answer.textContent = "The training has ended, or this page has lost it.";
  }
} }, el("label", { for: "own" }, "Watch"), field, el("button", {}, "Read this"), answer);
const film = makeFilm((frame, isNewest) => {
  memory.at = isNewest ? null : (frame.seconds - start) / unit()[0];
  plan();
}, form);

// Events

function cut(step) {
  if (stepEvents.length && stepEvents[stepEvents.length - 1].step > step) {
    stepEvents = stepEvents.filter((event) => event.step <= step);
    evals = evals.filter((event) => event.step <= step);
    film.cut(step + 1);
  }
  end = null;
}
function clear() {
  stepEvents = [];
  evals = [];
  end = null;
  film.cut(0);
}
function apply(event) {
  start ??= event.seconds ?? null;
  switch (event.event) {
    case "run": run = event; break;
    case "restart": clear(); ready = 0; start = null; break;
    case "step": cut(event.step - 1); stepEvents.push(event); break;
    case "eval": cut(event.step); evals = evals.filter((other) => other.step < event.step); evals.push(event); break;
    case "frame": film.cut(event.step); film.add(event); break;
    case "rollback": case "resume": cut(event.step); break;
    case "teacher": clear(); ready++; break;
    case "end": end = event; break;
    case "closed": source.close(); connection = "closed"; break;
  }
}
const source = new EventSource("/events");
source.onopen = () => { connection = "open"; plan(); };
source.onerror = () => { if (connection !== "closed") connection = "lost"; plan(); };
source.onmessage = ({ data: lines }) => {
  for (const line of lines.split("\n")) {
    let event;
    try { event = JSON.parse(line); } catch { continue; } // A damaged line.
    apply(event);
  }
  if (stepEvents.length > MOST_STEPS) stepEvents = stepEvents.filter((_, at) => at % 2 !== stepEvents.length % 2);
  plan();
};
// Redraws soon. Several events cause one redraw.
function plan() { timer ||= setTimeout(() => { timer = 0; draw(); }, 200); }

// Drawing

const newest = (list) => list[list.length - 1];
function unit() {
  const longest = (newest(stepEvents)?.seconds ?? 0) - start;
  return longest > 7200 ? [3600, "hours"] : longest > 300 ? [60, "minutes"] : [1, "seconds"];
}
// Returns at most `MOST_POINTS` points, each the mean of equally many.
function thin(points) {
  const size = Math.ceil(points.length / MOST_POINTS) || 1;
  return Array.from({ length: Math.ceil(points.length / size) }, (_, i) => {
    const group = points.slice(i * size, (i + 1) * size), known = group.map((point) => point[1]).filter((y) => y !== null);
    return [newest(group)[0], known.length ? known.reduce((sum, y) => sum + y) / known.length : null];
  });
}
function drawChart() {
  const longest = Math.max(run.planned ?? 0, 2 * (newest(stepEvents)?.seconds ?? 0)); // An earlier run can be much longer.
  const [seconds, name] = unit(), at = (event, key) => [(event.seconds - start) / seconds, event[key]], held = { dash: "5 4", dots: true }, grey = { colour: "--soft", pale: true };
  const curves = [...run.earlier.map(({ name, points }) => ({ name, ...grey, points: points.filter(([x]) => x <= longest).map(([x, y]) => [x / seconds, y]) })),
    { name: "training", colour: "--c0", points: thin(stepEvents.map((event) => at(event, "loss"))) },
    { name: "held-out", colour: "--c1", ...held, points: evals.map((event) => at(event, "val_loss")) }].filter((curve) => curve.points.length);
  const xs = curves.flatMap((curve) => curve.points.map((point) => point[0])), span = [Math.min(...xs), Math.max(...xs)];
  if (curves.length) for (const [name, level] of Object.entries(run.levels)) curves.push({ name, colour: "--soft", dash: "1 5", level: true, points: span.map((x) => [x, level]) });
  const known = newest(stepEvents) ?? {}, kind = "margin" in known ? "nats per preference" : "reward" in known ? "minus the reward" : "nats per token";
  const hadFocus = chart.contains(document.activeElement);
  chart.replaceChildren(lineChart({ name: "loss", title: `Loss, ${kind}`, x: `${name} of training`, series: curves, height: 320, memory,
    legend: [["training", { colour: "--c0" }], ["held-out", { colour: "--c1", ...held }], ...(run.earlier.length ? [["earlier runs", grey]] : [])] }));
  if (hadFocus) chart.querySelector("figure > svg")?.focus({ preventScroll: true });
}
function secondsLeft(last) {
  if (run.planned) return Math.max(0, run.planned - last.seconds);
  return last.tokens / last.tokens_per_second * Math.max(0, run.steps - last.step) / last.step;
}
function draw() {
  const last = newest(stepEvents), best = evals.reduce((best, event) => best && best.val_loss <= event.val_loss ? best : event, null), isOver = end !== null;
  title.textContent = run.name || "Watch it learn";
  about.textContent = run.texts.join(", ");
  document.title = `${isOver ? "" : last && run.steps ? `step ${withCommas(last.step)} · ` : ""}${run.name}`;
  const lost = { lost: "The connection to the training is lost. The page keeps what it has and tries again.", closed: "The command has ended; the page keeps what it has." }[connection];
  const model = !run.teachers ? "" : ready < run.teachers ? ` teacher ${ready + 1} of ${run.teachers}` : " the model: its teachers are ready";
  const phase = isOver ? ENDS[end.reason] ?? end.reason : lost ?? (last ? `Training${model} …` : "Getting ready: the first step comes soon …");
  if (status.textContent !== phase) status.textContent = phase;
  const rows = last ? { step: withCommas(end?.step ?? last.step) + (run.planned ? "" : ` of ${withCommas(run.steps ?? last.step)}`), time: formatSeconds(last.seconds),
    ...(isOver || lost ? {} : { left: `about ${formatSeconds(secondsLeft(last))}` }), "held-out loss": best ? formatNumber(newest(evals).val_loss) + (newest(evals) === best ? " (best)" : "") : "–",
    "tokens per second": withCommas(last.tokens_per_second), "learning rate": formatNumber(last.lr), "gradient norm": last.grad_norm === null ? "–" : formatNumber(last.grad_norm) } : {};
  numbers.replaceChildren(...Object.entries(rows).map(([name, value]) => el("div", { class: "panel" }, el("span", { class: "soft" }, name), el("strong", {}, value))));
  drawChart();
  form.hidden = isOver;
  result.hidden = !isOver;
  if (isOver) drawResult();
}
function drawResult() {
  const finished = end.checkpoint !== null, commands = finished ? [`${run.chat ? "gpt chat" : 'gpt sample "Once upon"'} -m ${run.path}`, `gpt report ${run.path} -o film.html`,
    `gpt inspect attention "Once upon a time" -m ${run.path} -o attention.html`] : [`gpt train --resume ${run.path}`];
  result.replaceChildren(el("h2", {}, finished ? "Result" : "How it ended"),
    ...(finished && run.verdict ? [el("p", { class: "verdict" }, `The model is ${run.verdict}.`)] : []),
    ...(finished && run.sample ? [el("p", { class: "soft" }, "The best checkpoint writes:"), el("pre", {}, run.sample)] : []),
    el("p", { class: "soft" }, finished ? "Now you can:" : "It goes on with:"), el("pre", { id: "commands" }, commands.join("\n")));
}
draw();
document.body.dataset.ready = "yes";
