// A text split into its tokens.
heading("Tokens", `${data.model}: ${withCommas(data.tokens.length)} tokens of ${withCommas(data.bytes)} bytes, ${(data.bytes / Math.max(1, data.tokens.length)).toFixed(2)} bytes each`);
const readout = el("p", { id: "readout", "aria-live": "polite" }, "Point at a token, or use the arrow keys.");
const strip = tokenStrip(data.pieces, read, (i) => ({ style: `background:color-mix(in srgb, var(--c${i % 6}) 22%, transparent)`, title: `id ${data.tokens[i]}` }));
strip.id = "strip";
[...strip.children].forEach((token, i) => { if (data.pieces[i].endsWith("\\n")) token.after(el("br")); });
function read(i) { readout.textContent = `token ${i}: “${showSpaces(data.pieces[i])}”, id ${data.tokens[i]}`; }
section("Text", strip, readout);
document.body.dataset.ready = "yes";
