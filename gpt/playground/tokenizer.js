// A byte-level BPE tokenizer that gives the ids of `gpt tokenize`: a pattern splits the text into pieces, and in each piece
// neighboring tokens merge, the pair with the lowest rank first.

// The characters that spell bytes in vocabularies, as in GPT-2's: printable characters spell themselves.
const SPELLING = [];
for (let byte = 0, next = 256; byte < 256; byte++) {
  const isPrintable = (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  SPELLING.push(String.fromCharCode(isPrintable ? byte : next++));
}

class Tokenizer {
  constructor(values) {
    Object.assign(this, values);
    const byteOf = new Map(SPELLING.map((letter, byte) => [letter, byte]));
    const added = new Map(Object.entries(values.added).map(([word, id]) => [id, word]));
    const utf8 = new TextEncoder();
    this.bytes = values.tokens.map((token, id) => added.has(id) ? utf8.encode(added.get(id)) : Uint8Array.from(token ?? "", (letter) => byteOf.get(letter)));
    this.idOf = new Map(values.tokens.flatMap((token, id) => token === null || added.has(id) ? [] : [[token, id]]));
    this.byteIds = SPELLING.map((letter) => this.idOf.get(letter));
    this.pattern = new RegExp(values.pattern, "gu");
    this.ranks = values.merges && new Map(); // From a pair of ids to its rank and the merged id.
    for (let i = 0; values.merges && i < values.merges.length; i += 3) {
      const [left, right, merged] = values.merges.slice(i, i + 3);
      this.ranks.set(left * 2 ** 26 + right, [i, merged]);
    }
    this.cache = new Map(); // Ids of short pieces.
    const words = (list) => list.length ? new RegExp(list.sort((a, b) => b.length - a.length).map(escape).join("|"), "g") : null;
    const escape = (word) => word.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");
    this.wordPattern = words(Object.keys(values.words));
    this.specialPattern = words(Object.keys(values.added));
  }

  // Returns the ids of a text. Special tokens are ordinary text without `specials`.
  encode(text, specials = false) {
    const pattern = specials ? this.specialPattern : this.wordPattern, ids = [];
    let end = 0;
    for (const match of pattern ? text.matchAll(pattern) : []) {
      this.encodeOrdinary(text.slice(end, match.index), ids);
      ids.push(this.added[match[0]]);
      end = match.index + match[0].length;
    }
    this.encodeOrdinary(text.slice(end), ids);
    return ids;
  }

  // Returns the ids of a prompt: with the token that starts a text, if the model has one. They are never empty.
  prompt(text) {
    const ids = [...(this.bos === null ? [] : [this.bos]), ...this.encode(text, this.special_prompt)];
    return ids.length ? ids : [this.eot];
  }

  encodeOrdinary(text, ids) {
    const utf8 = new TextEncoder();
    for (const [piece] of (this.nfc ? text.normalize("NFC") : text).matchAll(this.pattern)) {
      let found = this.cache.get(piece);
      if (!found) {
        const bytes = [...utf8.encode(piece)];
        const whole = this.skips_merges ? this.idOf.get(bytes.map((byte) => SPELLING[byte]).join("")) : undefined;
        found = whole === undefined ? this.merge(bytes.map((byte) => this.byteIds[byte]).filter((id) => id !== undefined)) : [whole];
        if (piece.length < 32) this.cache.set(piece, found);
      }
      for (const id of found) ids.push(id);
    }
  }

  // Returns the rank of a pair and the merged id. Without a list of merges, both are the id of the joined token.
  pair(left, right) {
    if (this.ranks) return this.ranks.get(left * 2 ** 26 + right);
    const id = this.idOf.get(this.tokens[left] + this.tokens[right]);
    return id === undefined ? undefined : [id, id];
  }

  // Merges the ids of a piece. A heap has the possible merges, the lowest rank first, then the leftmost.
  merge(ids) {
    const next = ids.map((_, i) => i + 1), before = ids.map((_, i) => i - 1), heap = [];
    const less = (a, b) => a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]);
    const push = (at) => {
      if (at < 0 || next[at] >= ids.length) return;
      const right = ids[next[at]], found = this.pair(ids[at], right);
      if (!found) return;
      let i = heap.push([found[0], at, ids[at], right, found[1]]) - 1;
      for (let parent; i && less(heap[i], heap[parent = i - 1 >> 1]); i = parent) [heap[i], heap[parent]] = [heap[parent], heap[i]];
    };
    const pop = () => {
      const top = heap[0], last = heap.pop();
      if (heap.length) heap[0] = last;
      for (let i = 0, child; (child = 2 * i + 1) < heap.length; i = child) {
        if (child + 1 < heap.length && less(heap[child + 1], heap[child])) child++;
        if (!less(heap[child], heap[i])) break;
        [heap[i], heap[child]] = [heap[child], heap[i]];
      }
      return top;
    };
    for (let at = 0; at < ids.length; at++) push(at);
    while (heap.length) {
      const [, at, left, right, merged] = pop();
      if (ids[at] !== left || ids[next[at]] !== right) continue; // One of them has merged since.
      ids[at] = merged;
      ids[next[at]] = -1;
      next[at] = next[next[at]];
      if (next[at] < ids.length) before[next[at]] = at;
      push(before[at]);
      push(at);
    }
    return ids.filter((id) => id >= 0);
  }
}
