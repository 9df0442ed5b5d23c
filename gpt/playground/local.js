// The engine of an exported page: the model is in the file and runs in a worker.

const DAMAGED = "This file is damaged: it is incomplete or was changed. Get it again from where it came from.";

const engine = (() => {
  const fromBase64 = (text) => Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const waiting = new Map(); // Requests without an answer, by number.
  let worker = null, number = 0;

  // Sends a request to the worker. Calls `receive` with each event; resolves with the result.
  function call(method, values, { signal, receive, transfer = [] } = {}) {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) return reject(new DOMException("", "AbortError"));
      const own = ++number;
      signal?.addEventListener("abort", () => {
        worker.postMessage({ number: own, abort: true });
        waiting.delete(own);
        reject(new DOMException("", "AbortError"));
      }, { once: true });
      waiting.set(own, { resolve, reject, receive });
      worker.postMessage({ number: own, method, values }, transfer);
    });
  }

  function handle({ data }) {
    const request = waiting.get(data.number);
    if (!request) return; // It was aborted.
    if ("event" in data) return request.receive(data.event);
    waiting.delete(data.number);
    if ("error" in data) request.reject(new Error(data.error === "damaged" ? DAMAGED : data.error));
    else request.resolve(data.result);
  }

  function failAll(message) {
    for (const { reject } of waiting.values()) reject(new Error(message));
    waiting.clear();
  }

  async function start() {
    const parts = document.getElementsByClassName("weights"), count = () => Number(parts[0]?.dataset.of);
    const arriving = setInterval(() => showLoading((parts.length - 1) / count() / 2 || 0), 200);
    if (document.readyState === "loading") await new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));
    clearInterval(arriving);
    const total = count();
    const node = document.getElementById("model-header");
    if (!node) throw new Error(DAMAGED);
    worker = new Worker(URL.createObjectURL(new Blob([`"use strict";(${runWorker})()`], { type: "text/javascript" })));
    worker.onmessage = handle;
    worker.onerror = (event) => failAll(event.message || "The browser could not start the model.");
    await call("start", [node.textContent, Number(node.dataset.sum), fromBase64(KERNELS)]);
    for (const part of document.querySelectorAll("script.weights, script.text")) {
      showLoading(1 - parts.length / total / 2);
      let bytes;
      try {
        bytes = fromBase64(part.textContent);
      } catch {
        throw new Error(DAMAGED);
      }
      part.remove(); // Frees its memory.
      await call(part.className === "text" ? "receiveText" : "receive", [bytes], { transfer: [bytes.buffer] });
    }
    await call("finish", []);
    const { tokenizer, shape, text, chat, name, facts, about, prompts, written, settings } = JSON.parse(node.textContent);
    return {
      id: name, context_length: shape.T, end: tokenizer.eot, ends: tokenizer.ends, specials: tokenizer.specials,
      chat: Boolean(chat), facts, about, prompts, written, settings, shape: { layers: shape.L, heads: shape.H }, can_switch: true,
      can_trace: Boolean(text),
    };
  }

  let started = null;
  const ready = () => started ??= start();
  return {
    info: ready,
    tokenize: async (text, signal) => { await ready(); return call("tokenize", [text], { signal }); },
    template: async (messages, signal) => { await ready(); return call("template", [messages], { signal }); },
    inspect: async (ids, options, signal) => { await ready(); return call("inspect", [ids, options], { signal }); },
    trace: async (ids, at, first, signal) => { await ready(); return call("trace", [ids, at, first], { signal }); },
    async *complete(request, signal) {
      await ready();
      const events = [];
      let wake = () => {}, isDone = false, failure = null;
      const receive = (event) => { events.push(event); wake(); };
      call("complete", [request], { signal, receive }).catch((error) => { failure = error; }).then(() => { isDone = true; wake(); });
      for (;;) {
        while (events.length) yield events.shift();
        if (failure) throw failure;
        if (isDone) return;
        await new Promise((resolve) => { wake = resolve; });
      }
    },
  };
})();
