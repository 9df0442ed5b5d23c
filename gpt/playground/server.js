// The engine of `gpt serve`: the model runs on the server that delivered this page.

const engine = (() => {
  async function ask(path, body, signal) {
    const key = sessionStorage.getItem("gpt-key");
    const headers = { ...(body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
    const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal })
      .catch((error) => { throw error.name === "AbortError" ? error : new Error("The server cannot be reached. Is it still running?"); });
    if (answer.ok) return answer;
    const failure = await answer.json().catch(() => null);
    if (answer.status === 401) {
      $("key-says").textContent = key ? "That is not this server's API key." : "This server requires an API key.";
      $("key").hidden = false;
      $("secret").focus();
      throw new Error(""); // The page already asks for the key.
    }
    throw new Error(failure?.error?.message ?? `The server answered ${answer.status} ${answer.statusText}`);
  }

  // The model of this page, if the server has several.
  const chosen = new URLSearchParams(location.search).get("model");
  const withModel = (body) => body && { ...(chosen && { model: chosen }), ...body };
  const get = async (path, body, signal) => (await ask(path, withModel(body), signal)).json();

  function showModels(names, current) {
    if (names.length < 2 || $("models").options.length) return;
    $("models").append(...names.map((name) => new Option(name, name, false, name === current)));
    $("models").hidden = false;
    $("models").addEventListener("change", () => { location.search = new URLSearchParams({ model: $("models").value }); });
  }

  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        return { done: true };
      });
      if (done) throw new Error("The connection was lost. The text so far is kept.");
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        if (!block.startsWith("data: ")) continue;
        if (block === "data: [DONE]") return;
        const event = JSON.parse(block.slice(6));
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  }

  $("key").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem("gpt-key", $("secret").value);
    $("secret").value = "";
    load();
  });

  return {
    async info() {
      const { data: models } = await get("v1/models");
      const { id, context_length, layers, heads, can_trace, sampling } = models.find((each) => each.id === chosen) ?? models[0];
      showModels(models.map((each) => each.id), id);
      const facts = [`context: ${thousands(context_length)} tokens`];
      showName(id, facts); // These need no API key.
      const tokenizer = await get("tokenizer_info" + (chosen ? `?${new URLSearchParams({ model: chosen })}` : ""));
      $("key").hidden = true;
      return {
        id, context_length, facts, end: tokenizer.eos_token_id, ends: tokenizer.eos_token_ids,
        specials: tokenizer.special_token_ids, chat: Boolean(tokenizer.chat_template), prompts: [], settings: sampling,
        about: [`layers: ${layers}, attention heads per layer: ${heads}, vocabulary: ${thousands(tokenizer.vocab_size)} tokens`],
        shape: { layers, heads }, can_switch: false, can_trace,
      };
    },

    tokenize: async (text, signal) => (await get("tokenize", { prompt: text }, signal)).tokens,
    trace: (ids, at, first, signal) => get("trace", { ids, at, first }, signal),
    template: async (messages, signal) => (await get("tokenize", { messages }, signal)).tokens,

    async *complete({ ids, alternatives, off, ...settings }, signal) {
      const body = { prompt: ids.slice(-model.context_length), logprobs: alternatives, token_details: true, stream: true, ...settings };
      for await (const { choices: [choice] } of events(await ask("v1/completions", withModel(body), signal))) {
        const tokens = choice.logprobs?.content ?? [];
        yield { tokens: tokens.map(({ top_logprobs: top, ...token }) => ({ ...token, top })), finish: choice.finish_reason ?? null };
      }
    },

    async inspect(ids, options, signal) {
      const { attention, ...inspection } = await get("inspect", { ids: ids.slice(-model.context_length) }, signal);
      const bytes = Uint8Array.from(atob(attention), (letter) => letter.charCodeAt(0));
      return { ...inspection, attention: new Float32Array(bytes.buffer) };
    },
  };
})();
