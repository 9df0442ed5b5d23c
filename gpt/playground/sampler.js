// Chooses tokens from logits as `gpt sample` does: the same filters in the same order, and with the same seed the same
// random numbers (gpt/decoding/logits.py).

const EXCLUDED = -Infinity;

// Applies penalties and the minimum length to logits. `ids` are all ids so far, the last `count` of them generated.
function adjust(logits, ids, count, ends, settings) {
  const { repetition_penalty: repetition, presence_penalty: presence, frequency_penalty: frequency } = settings;
  if (repetition && repetition !== 1) for (const id of new Set(ids)) logits[id] = logits[id] < 0 ? logits[id] * repetition : logits[id] / repetition;
  if (presence || frequency) {
    const counts = new Map();
    for (const id of ids.slice(ids.length - count)) counts.set(id, (counts.get(id) ?? 0) + 1);
    for (const [id, times] of counts) logits[id] -= Math.fround(presence + frequency * times);
  }
  const excluded = findRepeats(ids, settings.no_repeat_ngram);
  if (count < settings.min_tokens) excluded.push(...ends);
  const values = excluded.map((id) => logits[id]);
  for (const id of excluded) logits[id] = EXCLUDED;
  if (excluded.length && !logits.some((logit) => logit > EXCLUDED)) excluded.forEach((id, i) => { logits[id] = values[i]; });
}

// Returns the next ids that would repeat an n-gram.
function findRepeats(ids, n) {
  const found = [], tail = ids.length - n + 1;
  for (let start = 0; n > 0 && start + n <= ids.length; start++) {
    let same = 0;
    while (same < n - 1 && ids[start + same] === ids[tail + same]) same++;
    if (same === n - 1) found.push(ids[start + n - 1]);
  }
  return found;
}

// Applies temperature, top-k, top-p and min-p to logits. Excluded ids get -Infinity.
function filter(logits, { temperature, top_k, top_p, min_p }) {
  const n = logits.length, largest = logits.reduce((a, b) => Math.max(a, b), EXCLUDED);
  for (let i = 0; i < n; i++) logits[i] = Math.fround(logits[i] - largest) / temperature;
  if (!(top_k > 0 && top_k < n) && !(top_p > 0 && top_p < 1) && !(min_p > 0)) return;
  const sorted = logits.slice().sort().reverse();
  const dropBelow = (threshold) => { for (let i = 0; i < n; i++) if (logits[i] < threshold) logits[i] = EXCLUDED; };
  let kept = n;
  if (top_k > 0 && top_k < n) {
    dropBelow(sorted[top_k - 1]);
    for (kept = top_k; kept < n && sorted[kept] === sorted[top_k - 1]; kept++);
  }
  if (top_p > 0 && top_p < 1) {
    let total = 0, sum = 0, count = 0;
    for (let i = 0; i < kept; i++) total += Math.exp(sorted[i]);
    while (count < kept && sum < top_p * total) sum += Math.exp(sorted[count++]);
    const threshold = sorted[count - 1];
    let tied = count - sorted.indexOf(threshold); // Lower ids win ties.
    for (let i = 0; i < n; i++) if (logits[i] < threshold || (logits[i] === threshold && tied-- <= 0)) logits[i] = EXCLUDED;
  }
  if (min_p > 0) dropBelow(Math.log(min_p));
}

// Returns the id with the largest sum of logit and Gumbel noise, which is a sample from the softmax (Gumbel 1954).
function drawId(logits, uniform) {
  const bits = new Int32Array(uniform.buffer, uniform.byteOffset, uniform.length);
  let best = -1, most = EXCLUDED;
  for (let i = 0; i < logits.length; i++) {
    // The noise is at most -log(u), which the exponent of u bounds. For most ids even that is too little.
    if (logits[i] + 0.694 * (127 - (bits[i] >> 23)) < most) continue;
    const noise = Math.fround(-Math.log(-Math.fround(Math.log1p(-uniform[i]))));
    const noisy = Math.fround(logits[i] + noise);
    if (noisy > most) [best, most] = [i, noisy];
  }
  return best;
}

// Returns the random key of a sample, and of its token `step`, as unsigned 64-bit integers.
const sampleKey = (seed, ids) => firstWord(sha256(new TextEncoder().encode(`${seed}/0/${ids.join(",")}`)));
function stepKey(key, step) {
  const bytes = new DataView(new ArrayBuffer(16));
  bytes.setBigUint64(0, key, true);
  bytes.setBigUint64(8, BigInt(step), true);
  return firstWord(sha256(new Uint8Array(bytes.buffer)));
}

function firstWord(digest) {
  return new DataView(digest.buffer).getBigUint64(0, true);
}

// Fractions of the square and cube roots of the first primes, as 32-bit integers.
const primes = [];
for (let number = 2; primes.length < 64; number++) if (primes.every((prime) => number % prime)) primes.push(number);
const fraction = (root) => Math.floor(root % 1 * 2 ** 32);
const SHA_START = primes.slice(0, 8).map((prime) => fraction(Math.sqrt(prime)));
const SHA_CONSTANTS = primes.map((prime) => fraction(Math.cbrt(prime)));

// SHA-256 (FIPS 180-4). The browser's own is asynchronous and takes longer than a small model's step.
function sha256(message) {
  const padded = new Uint8Array(roundUp(message.length + 9, 64)), data = new DataView(padded.buffer);
  padded.set(message);
  padded[message.length] = 128;
  data.setUint32(padded.length - 8, message.length / 2 ** 29);
  data.setUint32(padded.length - 4, message.length << 3);
  const state = Int32Array.from(SHA_START, (word) => word | 0), words = new Int32Array(64);
  const turn = (word, by) => word >>> by | word << 32 - by;
  for (let at = 0; at < padded.length; at += 64) {
    for (let i = 0; i < 64; i++) {
      if (i < 16) words[i] = data.getInt32(at + 4 * i);
      else {
        const a = words[i - 15], b = words[i - 2];
        words[i] = words[i - 16] + (turn(a, 7) ^ turn(a, 18) ^ a >>> 3) + words[i - 7] + (turn(b, 17) ^ turn(b, 19) ^ b >>> 10);
      }
    }
    let [a, b, c, d, e, f, g, h] = state;
    for (let i = 0; i < 64; i++) {
      const first = h + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) + (e & f ^ ~e & g) + SHA_CONSTANTS[i] + words[i] | 0;
      const second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) + (a & b ^ a & c ^ b & c) | 0;
      [a, b, c, d, e, f, g, h] = [first + second | 0, a, b, c, d + first | 0, e, f, g];
    }
    [a, b, c, d, e, f, g, h].forEach((word, i) => { state[i] += word; });
  }
  const digest = new DataView(new ArrayBuffer(32));
  state.forEach((word, i) => digest.setInt32(4 * i, word));
  return digest;
}
