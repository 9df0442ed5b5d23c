// "Where does this come from?": the passages of the training text that repeat the text around a token.

const origins = $("origins");
let search = new AbortController(), copied = []; // Stops the last search. Marks of the passage.

function showOrigin(isShown) {
  origins.hidden = !isShown;
  $("list").hidden = $("choose").hidden = isShown;
  $("trace").setAttribute("aria-expanded", isShown);
  $("trace").textContent = isShown ? "Back to the alternatives" : "Where does this come from?";
  refreshOrigin();
  place();
}

// Looks up the open token. Without one, ends the search.
async function refreshOrigin() {
  search.abort();
  search = new AbortController();
  markPassage([]);
  if (origins.hidden || seen < 0) return;
  const { signal } = search, part = parts[seen], { base } = part.run, own = parts.filter(({ run }) => run === part.run);
  try {
    const ids = [...base, ...own.map(({ id }) => id)];
    const found = await engine.trace(ids, base.length + own.indexOf(part), base.length, signal);
    if (signal.aborted) return;
    markPassage(own.filter((_, i) => i + base.length >= found.start && i + base.length < found.start + found.length));
    origins.replaceChildren(...describeOrigin(found));
  } catch (error) {
    if (signal.aborted) return;
    origins.replaceChildren(element("p", "warn", error.message));
  }
  likely.scrollTop = 0;
  place();
}

function markPassage(passage) {
  for (const node of copied) node.classList.remove("copied");
  copied = passage.length ? marks.filter((node) => passage.includes(node.shows)) : [];
  for (const node of copied) node.classList.add("copied");
}

const tokens = (count) => `${thousands(count)} token${count === 1 ? "" : "s"}`;

function describeOrigin({ length, count, passages, share, span, compared, trained }) {
  const places = `has ${tokens(length)}. It is in ${count === 1 ? "one place" : `${thousands(count)} places`}.`;
  const summary = length ? `The longest passage around this token that is in the training text ${places}` : "This token is not in the training text.";
  const common = length && length < span ? ` Passages of fewer than ${span} tokens are mostly common phrases.` : "";
  const part = compared < trained ? ` Only its first ${tokens(compared)} were searched.` : "", quotes = element("ol");
  quotes.append(...passages.map((passage) => {
    const item = element("li"), quote = element("q"), where = `document ${thousands(passage.document)}, line ${thousands(passage.line)}`;
    quote.append(passage.before && `…${passage.before}`, element("mark", "", passage.text), passage.after && `${passage.after}…`);
    item.append(quote, element("span", "soft", passage.length === length ? where : `${where}: ${tokens(passage.length)}`));
    return item;
  }));
  const sum = share === null ? "" : `Of the ${chat ? "answer" : "generated text"}'s spans of ${span} tokens, ${percent(share)} are in the training text.`;
  return [element("p", "", summary + common + part), quotes, element("p", "soft", sum)];
}

$("trace").addEventListener("click", () => showOrigin(origins.hidden));
