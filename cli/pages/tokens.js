// A text split into its tokens.
heading("Tokens", `${data.model}: ${withCommas(data.tokens.length)} tokens of ${withCommas(data.bytes)} bytes, ${(data.bytes / Math.max(1, data.tokens.length)).toFixed(2)} bytes each`);
const readout = el("p", { id: "readout", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
const strip = el("p", { class: "tokens", id: "strip" });
data.tokens.forEach((id, i) => { strip.append(el("span", { class: "token", role: "button", tabindex: i === 0 ? 0 : -1,
  style: `background:color-mix(in srgb, var(--c${i % 6}) 22%, transparent)`, title: `id ${id}`,
  onpointerenter: () => read(i), onfocus: () => read(i), onkeydown: (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const to = Math.min(data.tokens.length - 1, Math.max(0, i + step));
    const tokens = strip.querySelectorAll(".token");
    tokens[i].tabIndex = -1;
    tokens[to].tabIndex = 0;
    tokens[to].focus();
  } }, data.pieces[i]));
  if (data.pieces[i].endsWith("\\n")) strip.append(el("br"));
});
function read(i) { readout.textContent = `token ${i}: “${showSpaces(data.pieces[i])}”, id ${data.tokens[i]}`; }
section("Text", strip, readout);
document.body.dataset.ready = "yes";
