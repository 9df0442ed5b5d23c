// The playground: a text to continue, or a conversation. `engine` runs the model. Text is never inserted as markup.

function $(id) {
  return document.getElementById(id);
}

const field = $("text"), question = $("question"), turns = $("turns");
const shade = $("shade"), paper = $("paper"), likely = $("likely");
const MAX_ALTERNATIVES = 10; // Alternatives per token.
const DEFAULTS = { // The settings of `gpt sample`.
  temperature: 0.8, top_k: 0, top_p: 1, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0,
  no_repeat_ngram: 0, min_tokens: 0, max_tokens: 200,
};
const CHUNK = 1000; // Maximum characters of a typed part. Short parts keep redraws small.

// The text is a list of immutable parts. Typed text is {text}.
// A generated token is {text, id, bytes, logprob, top, run, held, returned}. Consecutive tokens share a `run`.
// `run.base` contains the ids before the run, so the model can continue after any token from the same ids.
// `held` contains the bytes of an incomplete character, which the next token completes.
// `returned` is true if the token ends with \r, which a text field shows as \n.
// In a conversation, a question is {role, content, text: ""}.
// An answer is {role, messages, text: ""} with all previous messages. Its tokens have the answer as their `run`.
let parts = [], past = [], future = []; // `past` and `future` contain lists of parts, for undo and redo.
let marks = []; // Elements of the parts; they shade tokens.
let chat = false; // Whether the page shows a conversation.
let other = { parts: [], past: [], future: [], marks: [] }; // Parts, history and marks of the other mode.
let model = { id: "gpt", context_length: Infinity };
let loading = true; // Until the first attempt to load the model has ended.
let job = null; // The running generation: {controller, ended}.
let endTime = -Infinity; // When the last generation ended.
let seen = -1; // Index of the part with open alternatives, or -1.
let hovered = false; // Whether the pointer opened the alternatives.
let editCursor = -1; // Cursor position after an edit. Moving there opens no alternatives.
let follow = true; // Whether the view scrolls as the text grows.
let last = { text: "", parts: [] }; // Text and parts when the page last set the text. Typing does not change this.
let typed = false; // Whether the text differs from `last`, which is then the newest of `past`.
const thousands = (number) => number.toLocaleString("en-US");
const textOf = (list) => list.map((part) => part.text).join("");

// Model

let tokenized = { text: null, ids: [] }; // The last tokenized text.
async function tokenize(text, signal) {
  if (tokenized.text !== text) {
    const ids = await engine.tokenize(text, signal);
    tokenized = { text, ids: ids.length ? ids : [model.end] };
  }
  return tokenized.ids;
}

function fail(error) {
  if (error.name === "AbortError" || !error.message) return;
  $("error").textContent = error.message;
  $("error").hidden = false;
}

function showName(name, facts) {
  $("name").textContent = document.title = name;
  $("facts").textContent = facts.join(" · ");
}

function showLoading(share) {
  const text = `Loading the model … ${Math.floor(100 * share)} %`;
  if (loading && !job && $("status").textContent !== text) $("status").textContent = text;
}

// Shows what is said about the model, examples and its own settings.
function describeModel() {
  $("about").hidden = !model.about.length;
  $("about").lastElementChild.append(...model.about.map((text) => element("p", "", text)));
  $("prompts").append(...model.prompts.slice(0, 3).map((prompt) => {
    const button = element("button", "", prompt);
    button.type = "button";
    button.addEventListener("click", () => begin(prompt));
    return button;
  }));
  for (const [name, value] of Object.entries(model.settings)) {
    if (!$(name)) continue;
    $(name).value = value;
    $(name).dispatchEvent(new Event("input"));
  }
  setUpInside();
  draw();
}

// Shows the text that the model wrote when the page was exported.
function showWritten({ prompt, ids, tokens }) {
  const run = { base: ids }, list = prompt ? [{ text: prompt }] : [];
  for (const token of tokens) addToken(list, token, run);
  setParts(showIncomplete(list, true));
}

async function load() {
  try {
    const info = await engine.info(), isNew = model.end === undefined;
    model = info;
    showName(model.id, model.facts);
    if (isNew) describeModel();
    $("modes").hidden = !model.chat;
    $("trace").hidden = !model.can_trace;
    if (chat ? !model.chat : model.chat && isNew && !job) {
      if (!chat) { // Typed while the model was loading.
        question.value = field.value;
        field.value = "";
        handleEdit();
      }
      await setMode(!chat);
    }
    if (isNew && model.written && !field.value) showWritten(model.written);
    count();
  } catch (error) {
    fail(error);
  }
  loading = false;
  buttons();
  if (!job) $("status").textContent = "";
  document.body.dataset.ready = "yes";
}

// The text field and its marks

const level = (probability) => [0.9, 0.5, 0.2, 0.05, 0.01].filter((bound) => probability < bound).length;

function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

function mark(part) {
  const kind = part.role ? `turn ${part.role}` : part.run ? `token s${level(Math.exp(part.logprob))}` : "";
  const node = element(part.role ? "div" : "span", kind, part.role === "user" ? part.content : part.text);
  if (part.role) node.dataset.who = part.role === "user" ? "You" : "Model";
  node.shows = part;
  return node;
}

// Moves the reasoning of an answer, up to </think>, into an element that opens on demand. Some templates end the prompt
// with <think>, so the answer can start without it.
function fold(turn, node) {
  let thoughts = turn.querySelector("details");
  const isOpen = thoughts && !thoughts.lastElementChild.textContent.includes("</think>");
  if (isOpen) thoughts.lastElementChild.append(node);
  else if (!thoughts && node.textContent.includes(">") && /^\s*<think>|<\/think>/.test(turn.textContent)) {
    thoughts = element("details");
    thoughts.append(element("summary"), element("div"));
    thoughts.lastElementChild.append(...turn.childNodes);
    turn.append(thoughts);
  } else return;
  const isDone = thoughts.lastElementChild.textContent.includes("</think>");
  thoughts.firstElementChild.textContent = isDone ? "Reasoning" : "Reasoning …";
}

// Redraws the marks of changed parts.
function draw() {
  let unchanged = 0;
  while (unchanged < parts.length && marks[unchanged]?.shows === parts[unchanged]) unchanged++;
  for (const node of marks.splice(unchanged)) node.remove();
  let turn = chat && marks.findLast((node) => node.shows.role);
  for (const part of parts.slice(unchanged)) {
    const node = mark(part);
    marks.push(node);
    (!chat ? shade : part.role ? turns : turn).append(node);
    if (part.role) turn = node;
    else if (chat) fold(turn, node);
  }
  $("prompts").hidden = Boolean(job || parts.length);
  if (follow && job && seen < 0) paper.scrollTop = paper.scrollHeight; // No scrolling while alternatives are open.
}

function setParts(next) {
  parts = next;
  if (!chat) {
    field.value = textOf(parts);
    field.setSelectionRange(field.value.length, field.value.length);
    setLast();
  }
  close();
  draw();
  paper.scrollTop = paper.scrollHeight;
  count();
}

function setLast() {
  last = { text: field.value, parts: parts.slice() };
  typed = false;
}

// Finds the leading parts that `text` still starts with. Omits short typed parts and invisible tokens at their end.
function matchParts(list, text) {
  let end = 0, n = 0;
  while (n < list.length && text.startsWith(list[n].text, end)) end += list[n++].text.length;
  while (n && (list[n - 1].run ? !list[n - 1].text : list[n - 1].text.length < CHUNK)) end -= list[--n].text.length;
  return { list, n, end };
}

// Splits edited text into parts. Text after an edit loses its probabilities until the edit is reverted. Undo restores the
// text before all edits since the page last set it.
function handleEdit() {
  editCursor = field.selectionStart;
  const text = field.value, [previous, current] = [last.parts, parts].map((list) => matchParts(list, text));
  const { list, n, end } = current.end > previous.end ? current : previous;
  parts = list.slice(0, n);
  for (let at = end; at < text.length;) {
    let stop = Math.min(text.length, at + CHUNK);
    if (/[\ud800-\udbff]/.test(text[stop - 1])) stop++; // Do not split a surrogate pair.
    parts.push({ text: text.slice(at, stop) });
    at = stop;
  }
  if (typed !== (text !== last.text)) typed ? past.pop() : past.push(last.parts);
  typed = text !== last.text;
  future.length = 0;
  if (!loading) $("rate").textContent = $("status").textContent = "";
  close();
  draw();
  buttons();
  count();
}

// Generated tokens

// Counts the trailing bytes of an incomplete UTF-8 character.
function incompleteBytes(bytes) {
  for (let n = 1; n <= Math.min(3, bytes.length); n++) {
    const byte = bytes[bytes.length - n];
    if (byte >= 0xc0) return n < (byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4) ? n : 0;
    if (byte < 0x80) return 0;
  }
  return 0;
}

const isNarrow = matchMedia("(max-width: 760px)");
const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });

function addToken(list, entry, run, top = entry.top) {
  const previous = list.at(-1);
  const bytes = new Uint8Array([...(previous?.held ?? []), ...entry.bytes]);
  const n = bytes.length - incompleteBytes(bytes);
  const raw = utf8.decode(bytes.subarray(0, n));
  const text = (previous?.returned ? raw.replace(/^\n/, "") : raw).replace(/\r\n?/g, "\n");
  const returned = raw ? raw.endsWith("\r") : Boolean(previous?.returned);
  list.push({ text, id: entry.id, bytes: entry.bytes, logprob: entry.logprob, top, run, held: bytes.subarray(n), returned });
}

// Adds or removes the replacement character for an incomplete character at the end.
function showIncomplete(list, incomplete) {
  const end = list.at(-1);
  if (!end?.held?.length || Boolean(end.signed) === incomplete) return list;
  const sign = utf8.decode(end.held), text = incomplete ? end.text + sign : end.text.slice(0, -sign.length);
  return [...list.slice(0, -1), { ...end, text, signed: incomplete }];
}

// Returns the ids of a run before part `at`.
function idsBefore(run, at) {
  return [...run.base, ...parts.slice(0, at).filter((part) => part.run === run).map((part) => part.id)];
}

// Returns the generated tokens or the answer at the end, if any.
function lastRun() {
  const end = parts.at(-1);
  return end?.role === "assistant" ? end : end?.run;
}

// Returns the ids of the text or conversation if they are known.
function knownIds() {
  const run = lastRun();
  return run?.base && idsBefore(run, parts.length);
}

// Generation

const randomSeed = () => Math.floor(Math.random() * 2 ** 32);

function settings() {
  const seed = $("seed").value ? $("seed").valueAsNumber : randomSeed();
  $("seed").placeholder = `random, last ${seed}`;
  const fields = ["temperature", "top_k", "top_p", "max_tokens"].map((id) => [id, $(id).valueAsNumber]);
  return { ...DEFAULTS, ...model.settings, seed, ...Object.fromEntries(fields), off: switchedOff() };
}

// Returns the text of an answer as the API returns it, without special tokens.
function contentOf(answer) {
  const tokens = parts.filter((part) => part.run === answer && !model.specials.includes(part.id));
  return utf8.decode(new Uint8Array(tokens.flatMap((part) => part.bytes)));
}

function messages() {
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  const turns = parts.filter((part) => part.role);
  return [...system, ...turns.map((part) => ({ role: part.role, content: part.content ?? contentOf(part) }))];
}

// Returns the request that continues the parts, which end with `run`.
async function request(run, signal) {
  run.base ??= await (chat ? engine.template(run.messages, signal) : tokenize(field.value, signal));
  const size = model.context_length, ids = idsBefore(run, parts.length), fields = settings();
  if (chat && run.base.length >= size) {
    throw new Error(`The conversation has ${thousands(run.base.length)} tokens, but the model reads at most ${thousands(size)}. Shorten it or start a new one.`);
  }
  if (chat) fields.max_tokens = Math.min(fields.max_tokens, size - ids.length); // Keeps all messages in the context.
  return { ids, alternatives: MAX_ALTERNATIVES, ...fields };
}

// Continues the text or conversation. Returns whether anything changed.
async function write(from = parts) {
  if (job || loading || !$("settings").reportValidity()) return false;
  const controller = new AbortController(), before = parts.slice();
  let ended;
  job = { controller, ended: new Promise((done) => { ended = done; }) };
  $("error").hidden = true;
  field.readOnly = follow = true;
  past.push(before);
  $("status").textContent = "Writing …";
  setParts(showIncomplete(from, false));
  buttons();
  let outcome = "Stopped.", frame = 0, length = field.value.length, tokenCount = 0, eventTime = 0, rateTime = 0, drawTime = 0;
  let complete = false;
  const startTime = performance.now();
  const showRate = () => {
    const rate = (1000 * tokenCount / (eventTime - startTime)).toFixed(1);
    $("rate").textContent = tokenCount ? `${thousands(tokenCount)} token${tokenCount > 1 ? "s" : ""}, ${rate} per second.` : "";
    rateTime = eventTime;
  };
  const flush = () => {
    const start = performance.now();
    frame = 0;
    if (parts.length === marks.length) return;
    if (!chat) {
      const fresh = textOf(parts.slice(marks.length));
      field.setRangeText(fresh, length, length, field.selectionStart === length ? "end" : "preserve");
      length += fresh.length;
    }
    draw();
    if (eventTime - rateTime >= 250) {
      showRate();
      count();
    }
    drawTime = performance.now() - start;
  };
  try {
    if (model.end === undefined) await load();
    let run = parts.at(-1)?.run;
    if (chat && !run) parts.push(run = { role: "assistant", messages: messages(), text: "" });
    run ??= {};
    flush();
    for await (const { tokens, finish } of engine.complete(await request(run, controller.signal), controller.signal)) {
      if (finish) complete = true;
      if (finish === "length") outcome = "Stopped at the maximum length.";
      if (finish === "stop") { // Drop end-of-text, the last token.
        const end = tokens.pop();
        outcome = `The model ended ${chat ? "its answer" : "the text"}${end ? ` (probability ${percent(Math.exp(end.logprob))})` : ""}.`;
      }
      for (const token of tokens) addToken(parts, token, run);
      eventTime = performance.now();
      tokenCount += tokens.length;
      frame ||= setTimeout(flush, Math.max(16, 2 * drawTime)); // Slow drawing of a long text must not block the page.
    }
  } catch (error) {
    if (error.name !== "AbortError") outcome = "";
    fail(error);
  }
  clearTimeout(frame);
  flush();
  parts = chat && !complete && !parts.at(-1)?.run ? before : showIncomplete(parts, true); // Removes a question without an answer.
  const changed = parts.length !== before.length || parts.some((part, at) => part !== before[at]);
  if (changed) future.length = 0;
  else past.pop();
  if (!chat) {
    if (textOf(parts) !== field.value) setParts(parts);
    setLast();
  }
  draw();
  showRate();
  $("status").textContent = outcome;
  field.readOnly = false;
  job = null;
  endTime = performance.now();
  count();
  buttons();
  ended();
  return changed;
}

async function stop() {
  job?.controller.abort();
  await job?.ended;
}

async function moveHistory(from, to) {
  await stop();
  if (!from.length) return;
  to.push(parts);
  follow = true;
  setParts(from.pop());
  $("rate").textContent = "";
  $("status").textContent = from === past ? "Undone." : "Redone.";
  buttons();
}

function buttons() {
  $("undo").setAttribute("aria-disabled", !past.length);
  $("redo").setAttribute("aria-disabled", !future.length);
  for (const id of ["again", "fresh"]) $(id).setAttribute("aria-disabled", !parts.length);
  $("fresh").textContent = chat ? "New conversation" : "Clear";
  $("go").setAttribute("aria-disabled", loading);
  $("go").textContent = job ? "Stop" : chat ? "Send" : "Continue";
  turns.setAttribute("aria-busy", Boolean(job)); // Screen readers wait for the whole answer.
}

// Conversation

async function setMode(chatting) {
  await stop();
  if (chat === chatting) return;
  close();
  chat = chatting;
  [{ parts, past, future, marks }, other] = [other, { parts, past, future, marks }];
  document.body.classList.toggle("chat", chat);
  for (const [id, on] of [["chat", chat], ["plain", !chat]]) $(id).setAttribute("aria-pressed", on);
  for (const id of ["rate", "status"]) $(id).textContent = "";
  draw();
  buttons();
  count();
  if (!$("settings").contains(document.activeElement)) activeField().focus();
}

const activeField = () => (chat ? question : field);

async function send() {
  const content = question.value;
  question.focus();
  if (job || !content.trim()) return;
  question.value = "";
  const sent = await write([...parts, { role: "user", content, text: "" }]);
  if (!sent) question.value = [content, question.value].filter(Boolean).join("\n");
}

// Starts from an example.
async function begin(prompt) {
  activeField().value = prompt;
  if (chat) return send();
  handleEdit();
  field.focus();
  await write();
}

async function regenerate() {
  await stop();
  const at = parts.findLastIndex((part) => part.role === "user");
  if (at >= 0) await write(parts.slice(0, at + 1));
}

// Replaces the parts; undo restores them.
function change(next, why) {
  past.push(parts);
  future.length = 0;
  setParts(next);
  $("rate").textContent = "";
  $("status").textContent = why;
  buttons();
}

async function clear() {
  await stop();
  if (!parts.length) return;
  change([], "");
  activeField().focus();
}

// Shows the number of tokens, and whether it exceeds the context. Tokenizes new text when typing pauses.
let countTimer = 0;
function count(n = knownIds()?.length) {
  clearTimeout(countTimer);
  refreshInside();
  if (n === undefined && !chat) {
    countTimer = setTimeout(async () => {
      const text = field.value;
      const ids = job || model.end === undefined ? null : await tokenize(text).catch(() => null);
      if (ids && !job && !chat && text === field.value) count(text ? ids.length : 0);
    }, 300);
    return;
  }
  const size = model.context_length;
  $("length").textContent = n === undefined ? "" : `The ${chat ? "conversation" : "text"} has ${thousands(n)} token${n === 1 ? "" : "s"}.`;
  const warning = n > size ? `The text is longer than the model's context of ${thousands(size)} tokens, so the model does not see its beginning.` : "";
  if ($("forgotten").textContent !== warning) $("forgotten").textContent = warning;
}

// Alternatives

const percent = (probability) => probability && probability < 0.00005 ? "< 0.01 %" : `${(100 * probability).toFixed(2)} %`;

// Returns a token's text with escaped spaces, control characters and invalid bytes, or the name of a special token.
function shown({ id, bytes }) {
  if (!bytes.length) return `‹token ${id}›`;
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
    if (model.specials.includes(id)) return `‹${text}›`;
    const names = { " ": "·", "\n": "\\n", "\r": "\\r", "\t": "\\t" };
    return text.replace(/[ \n\r\t]/g, (c) => names[c]).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);
  } catch {
    return bytes.map((byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`).join("");
  }
}

const quoted = (token) => (model.specials.includes(token.id) ? shown(token) : `“${shown(token)}”`);

function open(at, byPointer = false) {
  const part = parts[at];
  if (!part?.run || !marks[at]) return;
  hovered = byPointer;
  likely.classList.toggle("glance", byPointer);
  if (!byPointer && !$("opened").textContent) $("opened").textContent = "Alternatives to this token are shown. Alt+Down moves to them.";
  if (at !== seen) {
    marks[seen]?.classList.remove("seen");
    marks[at].classList.add("seen");
    seen = at;
    const rank = part.top.findIndex((alternative) => alternative.id === part.id);
    const rankText = rank < 0 ? `not among the ${part.top.length} most likely` : rank ? `rank ${rank + 1}` : "the most likely";
    $("chosen").textContent = `${quoted(part)} ${percent(Math.exp(part.logprob))}, ${rankText}`;
    $("list").replaceChildren(...(rank < 0 ? [...part.top, part] : part.top).map((alternative) => choice(alternative, part)));
    for (const [id, by] of [["before", -1], ["after", 1]]) $(id).setAttribute("aria-disabled", nearestToken(at, by) < 0);
    refreshOrigin();
  }
  likely.hidden = false;
  place();
  const hidden = marks[seen]?.getBoundingClientRect().bottom - likely.offsetTop; // Below a sheet on a narrow screen.
  if (isNarrow.matches && !byPointer && hidden > 0) scrollBy(0, hidden + 8);
}

function choice(alternative, part) {
  const item = element("li"), button = element("button"), probability = Math.exp(alternative.logprob);
  button.type = "button";
  button.append(element("span", "word", shown(alternative)), element("span", "share", percent(probability)));
  button.style.setProperty("--share", `${100 * probability}%`);
  button.tabIndex = alternative.id === part.id ? 0 : -1;
  if (alternative.id === part.id) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => pick(seen, alternative));
  item.append(button);
  return item;
}

// Places the alternatives inside the window, below the token, or above if they do not fit.
function place() {
  const box = marks[seen].getClientRects()[0], view = paper.getBoundingClientRect();
  if (!box || box.bottom < view.top || box.top > view.bottom) return close();
  const { offsetWidth: width, offsetHeight: height } = likely, { clientWidth, clientHeight } = document.documentElement;
  const below = box.bottom + height + 4 <= clientHeight || box.top < height + 4;
  likely.style.left = `${Math.max(8, Math.min(box.left, clientWidth - width - 8))}px`;
  likely.style.top = `${below ? box.bottom + 2 : box.top - height - 2}px`;
}

function close() {
  if (likely.contains(document.activeElement)) activeField().focus();
  marks[seen]?.classList.remove("seen");
  likely.hidden = true;
  $("opened").textContent = "";
  seen = -1;
  refreshOrigin();
}

// Replaces a token, drops the text after it, and continues. In a conversation, end-of-text ends the answer.
async function pick(at, entry) {
  const { run, top } = parts[at], next = parts.slice(0, at);
  await stop();
  activeField().focus();
  if (chat && model.ends.includes(entry.id)) return change(showIncomplete(next, true), "The answer ends here.");
  addToken(next, entry, run, top);
  await write(next);
}

function partAtCursor() {
  if (field.selectionStart !== field.selectionEnd) return -1;
  let end = 0;
  return parts.findIndex((part) => (end += part.text.length) > field.selectionStart);
}

function walk(by) {
  if (!origins.hidden) return origins.focus();
  const buttons = [...$("list").querySelectorAll("button")], at = buttons.indexOf(document.activeElement);
  const to = at < 0 ? buttons.findIndex((button) => button.tabIndex === 0) : at + by;
  buttons[Math.max(0, Math.min(buttons.length - 1, to))].focus();
}

// Returns the index of the nearest generated token in a direction, or -1.
function nearestToken(at, by) {
  do at += by; while (parts[at] && !parts[at].run);
  return parts[at] ? at : -1;
}

function stepToken(by) {
  const to = nearestToken(seen, by);
  if (to < 0) return;
  const inside = $("list").contains(document.activeElement);
  marks[to].scrollIntoView({ block: "nearest" });
  open(to);
  if (inside) walk(0);
}

// User input

field.addEventListener("input", handleEdit);
document.addEventListener("selectionchange", () => {
  if (document.activeElement !== field || field.selectionStart === editCursor) return;
  editCursor = -1;
  const at = partAtCursor();
  if (parts[at]?.run) open(at);
  else if (!hovered) close();
});

// Returns the index of the generated token at a point, or -1.
const tokenAt = (x, y) => marks.indexOf(document.elementsFromPoint(x, y).find((node) => node.shows?.run));

let hoverTimer = 0; // Delays alternatives until the pointer rests.
const closeIfLeft = () => { if (hovered) close(); };
for (const node of [field, turns]) {
  node.addEventListener("pointermove", ({ pointerType, clientX, clientY }) => {
    clearTimeout(hoverTimer);
    if (pointerType !== "mouse" || (seen >= 0 && !hovered)) return;
    hoverTimer = setTimeout(() => {
      const at = tokenAt(clientX, clientY);
      if (at < 0) closeIfLeft();
      else if (at !== seen) open(at, true);
    }, 120);
  });
  node.addEventListener("pointerleave", () => {
    clearTimeout(hoverTimer);
    hoverTimer = setTimeout(closeIfLeft, 300);
  });
  node.addEventListener("click", ({ clientX, clientY }) => {
    clearTimeout(hoverTimer);
    if (node === field ? field.selectionStart === field.selectionEnd : getSelection().isCollapsed) open(tokenAt(clientX, clientY));
  });
}
document.addEventListener("pointerdown", ({ target }) => { if (!likely.contains(target) && target !== field) close(); });
likely.addEventListener("focusout", ({ relatedTarget }) => {
  if (relatedTarget && relatedTarget !== field && !likely.contains(relatedTarget)) close();
});
$("close").addEventListener("click", close);
$("before").addEventListener("click", () => stepToken(-1));
$("after").addEventListener("click", () => stepToken(1));
paper.addEventListener("scroll", () => {
  follow = paper.scrollTop + paper.clientHeight > paper.scrollHeight - 30;
  if (seen >= 0) place();
});
for (const name of ["scroll", "resize"]) addEventListener(name, () => seen >= 0 && place());

function actionFor({ key, ctrlKey, metaKey, altKey, shiftKey, isComposing, keyCode }) {
  const mod = ctrlKey || metaKey, focused = document.activeElement;
  if (isComposing || keyCode === 229) return null; // The key belongs to an input method.
  if (loading && key === "Enter" && focused === field) return () => {};
  if (mod && key === "Enter") return () => (chat ? send() : write());
  if (key === "Enter" && !shiftKey && focused === question) return send;
  if (key === "Escape") return () => { close(); stop(); };
  if (altKey && key === "ArrowDown" && [field, question, turns].includes(focused)) return () => {
    const at = chat ? seen : partAtCursor();
    open(parts[at]?.run ? at : parts.findLastIndex((part) => part.run && part.text));
    if (seen >= 0) walk(0);
  };
  if (likely.contains(focused)) {
    const actions = { ArrowDown: [walk, 1], ArrowUp: [walk, -1], ArrowLeft: [stepToken, -1], ArrowRight: [stepToken, 1] };
    if (actions[key] && !(focused === origins && actions[key][0] === walk)) return () => actions[key][0](actions[key][1]);
  }
  const inputs = ["INPUT", "TEXTAREA"]; // Elements in which the browser handles undo.
  const editing = focused === field ? !job && field.value !== last.text : inputs.includes(focused.tagName);
  const isRedo = key.toLowerCase() === "y" || (key.toLowerCase() === "z" && shiftKey);
  if (mod && !editing && isRedo && future.length) return () => moveHistory(future, past);
  if (mod && !editing && !isRedo && key === "z" && past.length) return () => moveHistory(past, future);
  return null;
}

document.addEventListener("keydown", (event) => {
  const action = actionFor(event);
  if (!action) return;
  event.preventDefault();
  action();
});
$("go").addEventListener("click", () => {
  if (job) stop();
  else if (performance.now() - endTime > 500) (chat ? send : write)(); // A late click was meant for "Stop".
});
$("again").addEventListener("click", regenerate);
$("fresh").addEventListener("click", clear);
$("chat").addEventListener("click", () => setMode(true));
$("plain").addEventListener("click", () => setMode(false));
$("undo").addEventListener("click", () => moveHistory(past, future));
$("redo").addEventListener("click", () => moveHistory(future, past));

for (const range of document.querySelectorAll("input[type=range]")) {
  const number = range.previousElementSibling;
  range.value = number.value;
  range.ariaLabel = `${number.labels[0].textContent}, slider`;
  range.addEventListener("input", () => { number.value = range.value; });
  number.addEventListener("input", () => { if (number.value) range.value = number.value; });
}
for (const label of document.querySelectorAll("#settings label")) {
  let node = label;
  while ((node = node.nextElementSibling).tagName !== "P") node.setAttribute("aria-describedby", `${label.htmlFor}-hint`);
  node.id = `${label.htmlFor}-hint`;
}
const showTune = () => { $("tune").open = !isNarrow.matches; };
isNarrow.addEventListener("change", showTune);
showTune();
$("settings").addEventListener("invalid", () => { $("tune").open = true; }, true);
$("settings").addEventListener("input", () => {
  for (const node of $("settings").querySelectorAll("input")) node.setAttribute("aria-invalid", !node.validity.valid);
});
if (/Mac|iPhone|iPad/.test(navigator.platform)) $("mod").textContent = "⌘";
field.focus(); // The autofocus attribute would act later and could steal the focus.
$("status").textContent = "Loading the model …";
load();
$("error").hidden = true; // Until here, it explains why this script did not run.

// For scripts and the console: continues a prompt as `gpt sample` does.
window.gpt = {
  async generate(prompt = "", settings = {}) {
    if (model.end === undefined) await load();
    const ids = await tokenize(prompt), fresh = [];
    const request = { ids, alternatives: 0, seed: randomSeed(), ...DEFAULTS, ...settings };
    for await (const { tokens, finish } of engine.complete(request)) {
      fresh.push(...tokens);
      if (finish === "stop") fresh.pop(); // End-of-text
    }
    return { ids: fresh.map((token) => token.id), text: utf8.decode(new Uint8Array(fresh.flatMap((token) => token.bytes))) };
  },
};
