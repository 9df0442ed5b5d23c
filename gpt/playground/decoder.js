// A GPT decoder that reads one token at a time and keeps the keys and values of earlier tokens. docs/model.md, "How a GPT
// works", derives each step; # names its section. Names are those of gpt/model/decoder.py.
//
// All numbers are in one WebAssembly memory, so that kernels.wasm can read them. An address counts bytes, and
// `floats[address / 4]` is the float32 there. The exporter pads rows with zeros to multiples of 16 numbers.

const INITIAL_POSITIONS = 1024; // Positions that the cache has at first; it doubles up to the model's context.
const UNIFORM_SCALE = (1 - 2 ** -24) * 2 ** -63;
const roundUp = (number, unit) => Math.ceil(number / unit) * unit;

class Decoder {
  // `kernels` are the bytes of kernels.wasm, or null to compute everything in JavaScript, which is slower.
  constructor(header, kernels) {
    const { norm: kind, ...shape } = header.shape;
    Object.assign(this, shape, { rms: kind === "rmsnorm", rates: Float64Array.from(shape.rates) });
    const { Cp, Dp, H, Ip, K, L, V } = this;
    this.memory = new WebAssembly.Memory({ initial: Math.ceil((header.bytes + header.halves + (1 << 20)) / 65536) });
    this.halves = header.halves;
    this.end = roundUp(header.bytes + header.halves, 16);
    this.received = 0;
    this.kernels = null;
    try {
      this.kernels = kernels && new WebAssembly.Instance(new WebAssembly.Module(kernels), { page: { memory: this.memory } }).exports;
    } catch {} // The browser has no SIMD.
    const tensor = (name) => {
      const [kind, rows, cols, offset, scales] = header.tensors[name];
      const address = (at) => at === null ? null : at < this.halves ? 2 * at : at + this.halves;
      return { kind: kind === "f16" ? "f32" : kind, rows, cols, at: address(offset), scales: address(scales) };
    };
    const linear = (name) => ({ ...tensor(`${name}.weight`), bias: `${name}.bias` in header.tensors ? tensor(`${name}.bias`).at : null });
    const norm = (name) => `${name}.weight` in header.tensors ? linear(name) : null;
    this.wte = tensor("wte.weight");
    this.wpe = this.positions === "rotary" ? null : tensor("wpe.weight");
    this.blocks = Array.from({ length: L }, (_, l) => {
      const [ln_1, q_norm, k_norm, ln_2] = ["ln_1", "attn.q_norm", "attn.k_norm", "ln_2"].map((name) => norm(`h.${l}.${name}`));
      const [c_attn, c_proj, c_fc, mlp_c_proj] = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"].map((name) => linear(`h.${l}.${name}`));
      return { ln_1, q_norm, k_norm, c_attn, c_proj, ln_2, c_fc, mlp_c_proj, window: this.windows[l] || Infinity };
    });
    this.ln_f = norm("ln_f");
    this.lm_head = "lm_head.weight" in header.tensors ? linear("lm_head") : { ...this.wte, bias: null };

    const widest = Math.max(Cp, H * Dp, Ip);
    this.x = this.allocate(Cp); // The residual stream.
    this.normalized = this.allocate(Cp);
    this.qkv = this.allocate((H + 2 * K) * Dp);
    this.heads = this.allocate(H * Dp); // The heads' outputs, concatenated.
    this.hidden = this.allocate(2 * Ip);
    this.output = this.allocate(Cp);
    this.logits = this.allocate(V);
    this.noise = this.allocate(V);
    this.streams = this.allocate((L + 1) * Cp); // The newest token's residual stream after the embedding and each block.
    this.narrow = this.allocate(widest / 2); // Activations in int16.
    this.off = new Set(); // Heads that add nothing: layer · H + head.
    this.skipped = new Set(); // Layers that add nothing.
    this.room = 0; // Positions of the cache.
    this.length = 0; // Positions read so far.
  }

  // Reserves `count` floats and returns their address.
  allocate(count) {
    const at = this.end;
    this.end = roundUp(at + 4 * count, 16);
    const missing = this.end - this.memory.buffer.byteLength;
    if (missing > 0) {
      try {
        this.memory.grow(Math.ceil(missing / 65536));
      } catch {
        throw new Error("The browser has too little memory for this model, or for a text of this length.");
      }
    }
    if (missing > 0 || !this.floats) { // Growing the memory detaches its views.
      const buffer = this.memory.buffer;
      [this.floats, this.shorts, this.words] = [new Float32Array(buffer), new Int16Array(buffer), new Uint16Array(buffer)];
      this.bytes = new Int8Array(buffer);
    }
    return at;
  }

  // Stores the next part of the stream of weights. float16 numbers, which come first, become float32.
  load(part) {
    const halves = Math.max(0, Math.min(part.length, this.halves - this.received)), start = this.received / 2;
    for (let i = 0; i < halves; i += 2) this.floats[start + i / 2] = fromHalf(part[i] | part[i + 1] << 8);
    if (halves < part.length) this.bytes.set(part.subarray(halves), this.received + halves + this.halves);
    this.received += part.length;
  }

  // Makes room for a position, up to the model's context. Keys are stored as (K, positions, D), values as (K, D, positions), so
  // that attention is two products of a matrix and a vector.
  reserve(position) {
    if (position < this.room || this.room >= this.T) return;
    const { L, H, K, Dp } = this, old = this.room, previous = this.blocks.map(({ keys, values }) => [keys, values]);
    this.room = roundUp(Math.min(this.T, Math.max(INITIAL_POSITIONS, 2 * old)), 8);
    const { room } = this;
    for (const block of this.blocks) [block.keys, block.values] = [this.allocate(K * Dp * room), this.allocate(K * Dp * room)];
    this.scores = this.allocate(L * H * room);
    for (let l = 0; l < L && old; l++) {
      const { keys, values } = this.blocks[l], [oldKeys, oldValues] = previous[l];
      const copy = (from, to, count) => this.floats.copyWithin(to / 4, from / 4, from / 4 + count);
      for (let k = 0; k < K; k++) copy(oldKeys + 4 * k * old * Dp, keys + 4 * k * room * Dp, old * Dp);
      for (let r = 0; r < K * Dp; r++) copy(oldValues + 4 * r * old, values + 4 * r * room, old);
    }
  }

  // y = W x + b.
  linear(map, x, y) {
    const { kind, rows, cols, at, scales, bias } = map, { floats, kernels } = this;
    if (kernels && kind === "f32") kernels.f32(at, x, y, rows, cols, 0);
    else if (kernels && kind === "bf16") kernels.bf16(at, x, y, rows, cols);
    else if (kernels) kernels.i8(at, this.narrow, y, rows, cols, scales, this.quantize(x, cols));
    else {
      const weights = this.reader(map), X = x / 4;
      for (let r = 0; r < rows; r++) {
        let sum = 0;
        for (let c = 0; c < cols; c++) sum += weights(r * cols + c) * floats[X + c];
        floats[y / 4 + r] = scales === null ? sum : sum * floats[scales / 4 + r];
      }
    }
    if (bias !== null) for (let r = 0; r < rows; r++) floats[y / 4 + r] += floats[bias / 4 + r];
  }

  // Returns a function that reads a tensor's numbers, without their scales.
  reader({ kind, at }) {
    const { floats, bytes, words } = this;
    if (kind === "i8") return (i) => bytes[at + i];
    return kind === "f32" ? (i) => floats[at / 4 + i] : (i) => fromBrain(words[at / 2 + i]);
  }

  // Rounds activations to int16 and returns their scale. Sums of products with int8 weights then fit in int32.
  quantize(x, cols) {
    const { floats, shorts } = this, X = x / 4, to = this.narrow / 2;
    let largest = 0;
    for (let i = 0; i < cols; i++) {
      const size = Math.abs(floats[X + i]);
      if (size > largest) largest = size;
    }
    const top = Math.min(32767, Math.floor((2 ** 31 - 1) / (127 * cols))), scale = Math.fround(largest / top) || 1, inverse = 1 / scale;
    for (let i = 0; i < cols; i++) {
      const value = floats[X + i] * inverse;
      shorts[to + i] = value < 0 ? value - 0.5 : value + 0.5; // Storing cuts the fraction off.
    }
    return scale;
  }

  // #layernorm and #rmsnorm, of `size` numbers.
  norm({ at, bias }, x, y, size = this.C, rms = this.rms) {
    const { floats } = this, X = x / 4, Y = y / 4, weight = at / 4;
    let mean = 0, square = 0;
    if (!rms) for (let i = 0; i < size; i++) mean += floats[X + i] / size;
    for (let i = 0; i < size; i++) square += (floats[X + i] - mean) ** 2;
    const scale = 1 / Math.sqrt(square / size + this.eps);
    for (let i = 0; i < size; i++) floats[Y + i] = (floats[X + i] - mean) * scale * floats[weight + i] + (bias === null ? 0 : floats[bias / 4 + i]);
  }

  // #rotary-positions-rope: rotates the pairs (i, i + D/2) of a head.
  rotate(head, position) {
    const { floats, rates } = this, half = this.D / 2;
    for (let i = head / 4; i < head / 4 + half; i++) {
      const angle = position * rates[i - head / 4], cos = Math.fround(Math.cos(angle)), sin = Math.fround(Math.sin(angle));
      const a = floats[i], b = floats[i + half];
      floats[i] = a * cos - b * sin;
      floats[i + half] = b * cos + a * sin;
    }
  }

  // #embedding and #positions: adds a row of a table to the residual stream.
  embed(table, row) {
    const { floats, C } = this, { cols, scales } = table, weights = this.reader(table), scale = scales === null ? 1 : floats[scales / 4 + row];
    for (let i = 0; i < C; i++) floats[this.x / 4 + i] += weights(row * cols + i) * scale;
  }

  // #the-residual-stream: reads an id. Then computes the logits of the next one, unless `wanted` is false.
  step(id, wanted = true) {
    const { floats: before, C, L, x, output } = this, position = this.length;
    before.fill(0, x / 4, x / 4 + C);
    this.embed(this.wte, id);
    if (this.wpe) this.embed(this.wpe, position);
    this.reserve(position);
    const { floats } = this;
    const add = () => { for (let i = 0; i < C; i++) floats[x / 4 + i] += floats[output / 4 + i]; };
    const keep = (l) => floats.copyWithin(this.streams / 4 + l * this.Cp, x / 4, x / 4 + C);
    keep(0);
    for (let l = 0; l < L; l++) {
      const block = this.blocks[l];
      this.norm(block.ln_1, x, this.normalized);
      this.linear(block.c_attn, this.normalized, this.qkv);
      this.attend(l, position);
      if (!this.skipped.has(l)) {
        this.linear(block.c_proj, this.heads, output);
        add();
        this.norm(block.ln_2, x, this.normalized);
        this.linear(block.c_fc, this.normalized, this.hidden);
        this.activate();
        this.linear(block.mlp_c_proj, this.hidden, output);
        add();
      }
      keep(l + 1);
    }
    this.length++;
    if (wanted) this.unembed(x);
  }

  // #unembedding: computes logits from a residual stream.
  unembed(x) {
    this.norm(this.ln_f, x, this.normalized);
    this.linear(this.lm_head, this.normalized, this.logits);
  }

  // #mlp and #swiglu: GELU, or SwiGLU, whose gate is the first half.
  activate() {
    const { floats, I, Ip } = this, from = this.hidden / 4;
    if (this.gated) for (let i = from; i < from + I; i++) floats[i] = floats[i] / (1 + Math.exp(-floats[i])) * floats[Ip + i];
    else for (let i = from; i < from + I; i++) { // u / (1 + exp(-2z)) is u (1 + tanh(z)) / 2, and exp is faster.
      const u = floats[i];
      floats[i] = u / (1 + Math.exp(-1.5957691216057308 * (u + 0.044715 * u * u * u)));
    }
  }

  // #queries-keys-values to #heads-and-the-output-matrix: softmax(q kᵀ / √D) v in each head, within the layer's window
  // (#windows). With RoPE, a position beyond the context replaces the oldest one.
  attend(l, position) {
    const { floats, D, Dp, H, K, T, room } = this, { keys, values, q_norm, k_norm, window } = this.blocks[l];
    const column = position % T, count = Math.min(position + 1, T), padded = roundUp(count, 8), scale = 1 / Math.sqrt(D);
    for (let i = 0; i < H + K; i++) {
      const head = this.qkv + 4 * i * Dp;
      if (q_norm) this.norm(i < H ? q_norm : k_norm, head, head, D, true);
      if (this.positions === "rotary") this.rotate(head, position);
    }
    for (let k = 0; k < K; k++) {
      const key = this.qkv / 4 + (H + k) * Dp, value = key + K * Dp;
      floats.copyWithin(keys / 4 + (k * room + column) * Dp, key, key + Dp);
      for (let d = 0; d < Dp; d++) floats[values / 4 + (k * Dp + d) * room + column] = floats[value + d];
    }
    for (let head = 0; head < H; head++) {
      const k = Math.floor(head * K / H), scores = this.scores + 4 * (l * H + head) * room, start = scores / 4, end = start + count;
      this.product(keys + 4 * k * room * Dp, this.qkv + 4 * head * Dp, scores, count, Dp, Dp);
      for (let c = 0; c < count && window < count; c++) {
        const age = (column - c + T) % T; // How many positions back the key is.
        if (age >= window) floats[start + c] = -Infinity;
      }
      let largest = -Infinity, sum = 0;
      for (let i = start; i < end; i++) if (floats[i] > largest) largest = floats[i];
      for (let i = start; i < end; i++) sum += floats[i] = Math.exp((floats[i] - largest) * scale);
      for (let i = start; i < end; i++) floats[i] /= sum;
      floats.fill(0, end, start + padded);
      const output = this.heads + 4 * head * Dp;
      if (this.off.has(l * H + head)) floats.fill(0, output / 4, output / 4 + Dp);
      else this.product(values + 4 * k * Dp * room, scores, output, Dp, padded, room);
    }
  }

  // y = W x in float32, for rows that start `stride` numbers apart.
  product(w, x, y, rows, cols, stride) {
    if (this.kernels) return this.kernels.f32(w, x, y, rows, cols, 4 * (stride - cols));
    const { floats } = this;
    for (let r = 0; r < rows; r++) {
      let sum = 0;
      for (let c = 0; c < cols; c++) sum += floats[w / 4 + r * stride + c] * floats[x / 4 + c];
      floats[y / 4 + r] = sum;
    }
  }

  // Returns `count` uniform numbers in [0, 1): the words of SplitMix64 (Steele et al. 2014) seeded with `key`.
  uniform(key, count) {
    const at = this.noise / 4;
    if (this.kernels) this.kernels.uniform(key, this.noise, count);
    else for (let i = 0; i < count; i++) {
      const wrap = (number) => BigInt.asUintN(64, number);
      let z = key = wrap(key + 0x9E3779B97F4A7C15n);
      z = wrap((z ^ z >> 30n) * 0xBF58476D1CE4E5B9n);
      z = wrap((z ^ z >> 27n) * 0x94D049BB133111EBn);
      this.floats[at + i] = Math.fround(Number((z ^ z >> 31n) >> 1n)) * UNIFORM_SCALE;
    }
    return this.floats.subarray(at, at + count);
  }

  // Returns each head's attention of the newest token, oldest token first: (L, H, tokens).
  attention() {
    const { floats, L, H, T, room } = this, count = Math.min(this.length, T), oldest = this.length > T ? this.length % T : 0;
    const result = new Float32Array(L * H * count);
    for (let i = 0; i < L * H; i++) for (let t = 0; t < count; t++) result[i * count + t] = floats[this.scores / 4 + i * room + (oldest + t) % count];
    return result;
  }
}

const scratch = new DataView(new ArrayBuffer(4));
function fromBrain(bits) {
  scratch.setUint32(0, bits << 16);
  return scratch.getFloat32(0);
}

function fromHalf(bits) {
  const sign = bits >> 15 ? -1 : 1, exponent = bits >> 10 & 31, fraction = bits & 1023;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * fraction / 1024); // Never infinite or NaN.
}
