// "Where does this come from?": the passages of the training text that repeat the text around a token.

const origins = $("origins");
let search = new AbortController(); // Stops the last search.

function showOrigin(isShown) {
  for (const [node, hidden] of [[origins, !isShown], [$("list"), isShown], [$("choose"), isShown]]) node.hidden = hidden;
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
    const [start, end] = [found.start, found.start + found.length].map((at) => Math.max(0, at - base.length));
    markPassage(own.slice(start, end));
    origins.replaceChildren(...describeOrigin(found));
  } catch (error) {
    if (signal.aborted) return;
    origins.replaceChildren(element("p", "warn", error.message));
  }
  origins.scrollTop = 0;
  place();
}

function markPassage(passage) {
  const shownParts = new Set(passage);
  for (const node of marks) node.classList.toggle("copied", shownParts.has(node.shows));
}

const tokens = (count) => `${thousands(count)} token${count === 1 ? "" : "s"}`;

function describeOrigin({ length, count, passages, share, span, compared, trained }) {
  const places = count === 1 ? "one place" : `${thousands(count)} places`;
  const summary = length ? `The longest passage around this token that is in the training text has ${tokens(length)}. It is in ${places}.` : "This token is not in the training text.";
  const common = length && length < span ? ` Passages of fewer than ${span} tokens are mostly common phrases.` : "";
  const part = compared < trained ? ` Only its first ${tokens(compared)} were searched.` : "";
  const quotes = element("ol");
  quotes.append(...passages.map((passage) => {
    const item = element("li"), quote = element("q"), where = `document ${thousands(passage.document)}, line ${thousands(passage.line)}`;
    quote.append(passage.before && `…${passage.before}`, element("mark", "", passage.text), passage.after && `${passage.after}…`);
    item.append(quote, element("span", "soft", passage.length === length ? where : `${where}: ${tokens(passage.length)}`));
    return item;
  }));
  const written = chat ? "answer" : "generated text";
  const copied = share === null ? "" : `Of the ${written}'s spans of ${span} tokens, ${(100 * share).toFixed(1)} % are in the training text.`;
  return [element("p", "", summary + common + part), quotes, element("p", "soft", copied)];
}

$("trace").addEventListener("click", () => showOrigin(origins.hidden));
