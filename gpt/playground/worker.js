// The model in a worker, so that the page never freezes. local.js sends requests; this answers them.

const YIELD_MILLISECONDS = 12; // How long the model computes before it looks for messages.
const LENS = 5, NEXT = 200; // Tokens per layer, and of the next token's distribution, in an inspection.

let header = null, tokenizer = null, decoder = null;
let training = null; // The training text, if the page has one.
let weightsSum = 1; // The checksum of the weights so far.

// What the decoder has read: the first `count` of `ids`, from `start` on, with these heads and layers switched off.
const context = { ids: [], count: 0, start: 0, off: "" };

// Makes the decoder read `ids`. It reads again only what differs from what it has read. Beyond the context, learned
// positions start again with the second half of the ids; with RoPE, the oldest token is forgotten.
function read(ids, off = {}) {
  const { T } = decoder, key = JSON.stringify(off), known = Math.min(context.count, ids.length);
  let same = ids === context.ids ? known : 0; // A completion only appends to its ids.
  while (same < known && context.ids[same] === ids[same]) same++;
  const isRewindable = context.start === 0 && decoder.length <= T && ids.length <= T;
  if (key !== context.off || !(isRewindable || (same === context.count && same < ids.length))) {
    decoder.off = new Set((off.heads ?? []).map(([layer, head]) => layer * decoder.H + head));
    decoder.skipped = new Set(off.layers ?? []);
    Object.assign(context, { start: Math.max(0, ids.length - T), off: key });
    decoder.length = 0;
  } else if (isRewindable) decoder.length = Math.min(same, ids.length - 1);
  for (let at = context.start + decoder.length; at < ids.length; at++) {
    if (decoder.length >= T && decoder.positions !== "rotary") {
      at = context.start = ids.length - Math.max(1, T >> 1);
      decoder.length = 0;
    }
    decoder.step(ids[at], at === ids.length - 1);
  }
  Object.assign(context, { ids, count: ids.length });
}

const bytesOf = (id) => [...(tokenizer.bytes[id] ?? [])];

// Returns the most likely ids, the most likely first, and the logarithm of the sum of all exponentials.
function rank(logits, count) {
  const best = [];
  let largest = -Infinity, sum = 0;
  for (let i = 0; i < logits.length; i++) {
    if (logits[i] > largest) largest = logits[i];
    if (best.length === count && !(logits[i] > logits[best[count - 1]])) continue;
    let at = best.length;
    while (at && logits[best[at - 1]] < logits[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  for (let i = 0; i < logits.length; i++) sum += Math.exp(logits[i] - largest);
  return { best, total: largest + Math.log(sum) };
}

function argmax(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  return best;
}

// Returns a copy of the decoder's logits, without ids that have no token.
function copyLogits() {
  const at = decoder.logits / 4;
  return decoder.floats.slice(at, at + Math.min(decoder.V, tokenizer.tokens.length));
}

// Replaces formats of today's date in the pieces of a chat template, as gpt/exporting/chat_pieces.py does.
function fillInDates(text, now = new Date()) {
  const name = (options) => now.toLocaleString("en-US", options), two = (number) => String(number % 100).padStart(2, "0");
  const codes = {
    A: name({ weekday: "long" }), a: name({ weekday: "short" }), B: name({ month: "long" }), b: name({ month: "short" }),
    d: two(now.getDate()), m: two(now.getMonth() + 1), y: two(now.getFullYear()), Y: now.getFullYear(),
  };
  return text.replace(/\ue000(.*?)\ue001/g, (_, format) => format.replace(/%(.)/g, (_, code) => codes[code]));
}

const methods = {
  tokenize: (text) => tokenizer.prompt(text),
  trace: (...values) => training.trace(...values),

  // Returns the ids of a conversation, up to the start of an answer.
  template(messages) {
    const chat = JSON.parse(fillInDates(JSON.stringify(header.chat)));
    let text = chat.bos + (messages[0]?.role === "system" ? "" : chat.no_system);
    if (messages[0]?.role === "system" && !chat.system) throw new Error("This model takes no system message.");
    for (const { role, content } of messages) text += chat[role][0] + (chat.trims ? content.trim() : content) + chat[role][1];
    return tokenizer.encode(text + chat.answer, true);
  },

  // Sends events with newly generated tokens. The last event has the reason for the end.
  async complete({ ids: prompt, alternatives, max_tokens, seed, off, ...settings }, send, signal) {
    const ids = [...prompt], key = sampleKey(seed, prompt), ends = tokenizer.ends;
    let tokens = [], restTime = performance.now();
    for (let count = 0, finish = max_tokens ? null : "length"; ; count++) {
      if (!finish) {
        read(ids, off);
        const logits = copyLogits(), { best, total } = rank(logits, alternatives);
        if (!Number.isFinite(total)) throw new Error("The model produced NaN or infinite logits, so no token can be chosen.");
        const entry = (id) => ({ id, bytes: bytesOf(id), logprob: logits[id] - total });
        const top = best.map(entry), adjusted = logits.slice();
        adjust(adjusted, ids, count, ends, settings);
        if (settings.temperature > 0) filter(adjusted, settings);
        const id = settings.temperature > 0 ? drawId(adjusted, decoder.uniform(stepKey(key, count), adjusted.length)) : argmax(adjusted);
        tokens.push({ ...entry(id), top });
        if (ends.includes(id)) finish = "stop";
        else ids.push(id);
        if (!finish && count + 1 >= max_tokens) finish = "length";
      }
      if (finish) return send({ tokens, finish, total: ids.length });
      if (performance.now() - restTime < YIELD_MILLISECONDS) continue;
      send({ tokens, finish });
      tokens = [];
      await rest();
      if (signal.aborted) return send({ tokens, finish: null, total: ids.length });
      restTime = performance.now();
    }
  },

  // Returns what the newest token attends to, the most likely next tokens after each layer, and the model's distribution.
  inspect(ids, { off } = {}) {
    read(ids, off);
    const { L, H } = decoder, attention = decoder.attention(), seen = ids.slice(-attention.length / (L * H));
    const ranked = (count) => {
      const logits = copyLogits(), { best, total } = rank(logits, count);
      return best.map((id) => ({ id, bytes: bytesOf(id), logit: logits[id], logprob: logits[id] - total }));
    };
    const lens = Array.from({ length: L + 1 }, (_, l) => {
      decoder.unembed(decoder.streams + 4 * l * decoder.Cp);
      return ranked(LENS).map(({ id, bytes, logprob }) => ({ id, bytes, probability: Math.exp(logprob) }));
    });
    return { tokens: seen.map((id) => ({ id, bytes: bytesOf(id) })), attention, layers: L, heads: H, lens, next: ranked(NEXT) };
  },
};

// Lets messages in. A timer would wait for 4 ms.
const pause = new MessageChannel();
const rest = () => new Promise((resolve) => {
  pause.port1.onmessage = resolve;
  pause.port2.postMessage(null);
});

// Adds a part to an Adler-32 checksum.
function addToSum(part, sum = 1) {
  let a = sum & 65535, b = sum >>> 16;
  for (let at = 0; at < part.length;) {
    for (const end = Math.min(at + 5552, part.length); at < end; at++) b += a += part[at];
    a %= 65521;
    b %= 65521;
  }
  return (b << 16 | a) >>> 0;
}

function start(text, sum, kernels) {
  if (addToSum(new TextEncoder().encode(text)) !== sum) throw new Error("damaged");
  header = JSON.parse(text);
  tokenizer = new Tokenizer(header.tokenizer);
  decoder = new Decoder(header, kernels);
}

function receive(part) {
  if (decoder.received + part.length > header.bytes) throw new Error("damaged");
  decoder.load(part);
  weightsSum = addToSum(part, weightsSum);
}

function receiveText(bytes) {
  if (addToSum(bytes) !== header.text.sum) throw new Error("damaged");
  training = new TrainingText(header.text, bytes, tokenizer);
}

function finish() {
  if (decoder.received !== header.bytes || weightsSum !== header.sum || (header.text && !training)) throw new Error("damaged");
  return { memory: decoder.memory.buffer.byteLength, simd: Boolean(decoder.kernels) };
}

const setup = { start, receive, receiveText, finish }, running = new Map(); // Abort signals of running requests, by number.
let last = Promise.resolve(); // The last completion. Others wait for it.

async function answer({ number, method, values }) {
  const reply = (kind, value) => postMessage({ number, [kind]: value });
  const signal = { aborted: false };
  running.set(number, signal);
  const before = last;
  let done = () => {};
  try {
    if (method === "complete") {
      last = new Promise((resolve) => { done = resolve; });
      await before;
      if (!signal.aborted) await methods.complete(...values, (event) => reply("event", event), signal);
      reply("result");
    } else {
      // An inspection of a prefix can interrupt a completion, which then reads the few dropped tokens again.
      if (method === "inspect" && !(context.start === 0 && decoder.length <= decoder.T && values[0].length <= decoder.T)) await before;
      reply("result", (setup[method] ?? methods[method])(...values));
    }
  } catch (error) {
    reply("error", error.message);
  }
  running.delete(number);
  done();
}

onmessage = ({ data }) => {
  if (data.abort) {
    const signal = running.get(data.number);
    if (signal) signal.aborted = true;
  } else answer(data);
};
