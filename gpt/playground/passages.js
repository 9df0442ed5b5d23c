// The training text in an exported page, if it has one: finds what gpt/insight/passages.py finds.

const SPAN = 8, MAX_PASSAGES = 5, CONTEXT = 60, BASE = 0x9e3779b1;

class TrainingText {
  // `bytes` contains the ids, padded to 4 bytes, then the starts of documents, and the end.
  constructor({ ids, width, opening }, bytes, tokenizer) {
    this.ids = new (width === 2 ? Uint16Array : Uint32Array)(bytes.buffer, 0, ids);
    this.starts = new Uint32Array(bytes.buffer, Math.ceil(width * ids / 4) * 4);
    Object.assign(this, { opening, tokenizer, breaks: tokenizer.bytes.map((token) => token.filter((byte) => byte === 10).length) });
  }

  // Returns the longest passages around the id `at`, and the share of spans from `first` on that are in the training text.
  trace(ids, at, first) {
    const { ids: train, starts } = this, equal = (i, j) => ids[at + i] === train[j + i];
    let found = [], count = 0, document = 0;
    for (let hit = train.indexOf(ids[at]); hit >= 0; hit = train.indexOf(ids[at], hit + 1)) {
      while (starts[document + 1] <= hit) document++;
      const low = starts[document] + this.opening, high = starts[document + 1];
      let before = 0, after = 1;
      if (hit < low) continue;
      while (before < at && hit - before > low && equal(-before - 1, hit)) before++;
      while (at + after < ids.length && hit + after < high && equal(after, hit)) after++;
      const length = before + after, longest = found[0]?.length ?? 0;
      if (length >= longest) count = length > longest ? 1 : count + 1;
      if (found.length === MAX_PASSAGES && length <= found.at(-1).length) continue;
      found = [...found, { start: at - before, length, position: hit - before, document }].sort((a, b) => b.length - a.length).slice(0, MAX_PASSAGES);
    }
    const { start = at, length = 0 } = found[0] ?? {}, size = train.length, written = ids.slice(first), key = written.join();
    const passages = found.filter((passage) => passage.length >= Math.min(SPAN, length)).map((passage) => this.describe(passage));
    if (this.key !== key) Object.assign(this, { key, lastShare: this.share(written) });
    return { start, length, count, passages, share: this.lastShare, span: SPAN, compared: size, trained: size };
  }

  describe({ length, position, document }) {
    const low = this.starts[document] + this.opening, high = this.starts[document + 1], end = position + length;
    const before = [...this.decode(Math.max(low, position - CONTEXT), position)].slice(-CONTEXT).join("").replace(/^\ufffd+/, "");
    const after = [...this.decode(end, Math.min(high, end + CONTEXT))].slice(0, CONTEXT).join("").replace(/\ufffd+$/, "");
    const line = this.ids.subarray(low, position).reduce((sum, id) => sum + this.breaks[id], 1);
    return { length, before, text: this.decode(position, end), after, document: document + 1, line };
  }

  decode(start, end) {
    const bytes = [...this.ids.subarray(start, end)].flatMap((id) => [...this.tokenizer.bytes[id]]);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes));
  }

  // Returns the share of a text's spans that are in the training text, or null if it has none.
  share(ids) {
    if (ids.length < SPAN) return null;
    const waiting = new Map(), power = [...Array(SPAN)].reduce((product) => Math.imul(product, BASE), 1); // By hash.
    const visit = (list, use) => list.forEach((id, i) => {
      hash = Math.imul(hash, BASE) + id - (i < SPAN ? 0 : Math.imul(power, list[i - SPAN])) | 0;
      if (i >= SPAN - 1) use(i - SPAN + 1);
    });
    let hash = 0, copied = 0;
    visit(ids, (start) => waiting.set(hash, [...(waiting.get(hash) ?? []), start]));
    hash = 0;
    visit(this.ids, (place) => {
      const starts = waiting.get(hash);
      if (!starts) return;
      const rest = starts.filter((start) => ids.slice(start, start + SPAN).some((id, i) => id !== this.ids[place + i]));
      copied += starts.length - rest.length;
      waiting.set(hash, rest.length ? rest : undefined);
    });
    return copied / (ids.length - SPAN + 1);
  }
}
