// The film of a run: at each of its evaluations, what it writes and how it reads a sentence.
const FRAME_TIME = 400; // Milliseconds per frame while the film plays.
const explain = (...paragraphs) => el("details", {}, el("summary", {}, "What do I see?"), paragraphs.map((text) => el("p", {}, text)));
const whenOf = (frame) => frame.step ? `after ${withCommas(frame.step)} steps, ${formatSeconds(frame.seconds)}` : "before the first step";

// Adds the film's sections to the page. `onMove` is called with the frame that is shown, and whether that is the newest.
// `form` is a way to choose another sentence. Returns functions that add a frame and remove the frames from a step on.
function makeFilm(onMove = () => {}, form = null) {
  const frames = [], state = { at: -1, follows: true, token: -1, head: 0, timer: 0 };
  const play = el("button", { type: "button", onclick: () => state.timer ? stop() : start() }, "Play");
  const slider = el("input", { type: "range", id: "frame", min: 0, max: 0, value: 0, "aria-label": "evaluation", oninput: () => { stop(); go(+slider.value); } });
  const when = el("output", { for: "frame" }, "no evaluation yet");
  const now = el("pre", { id: "now" }), then = el("pre", { id: "then" }), thenTitle = el("h3", {});
  const sentence = el("div", { id: "sentence" }), readout = el("p", { class: "soft readout", id: "token", "aria-live": "polite" }, "\u00a0");
  const history = el("canvas", { class: "history", role: "img" }), historyBox = el("div", {}, el("h3", {}, "At every evaluation, from top to bottom"), history);
  const grid = el("div", { class: "heads", role: "group", "aria-label": "heads" }), looks = el("div", { id: "looks" }), lookNote = el("p", { class: "soft" });
  const lens = el("table", { class: "lens", id: "layers" });

  const film = section("Watch it learn", el("div", { class: "controls panel film" }, play, slider, when),
    explain("While it trains, the model is examined again and again. Each time, it writes a little and reads the same sentence. The slider goes back to the earlier times; " +
      "Play shows all of them." + (form ? " If the slider is at the right end, the page follows the training." : "")));
  const writes = section("What it writes", el("div", { class: "beside" }, el("div", {}, el("h3", {}, "Newest"), now), el("div", {}, thenTitle, then)),
    explain("The model continues the same words, each time with the same random numbers: only what it has learned differs. First it knows nothing, then it learns letters and spaces, then words, then which words go together."));
  const reads = section("A sentence", form, sentence, readout, historyBox,
    explain("The text is cut into tokens: words or pieces of words. The shade of a token is the probability that the model gave to it when it had read only the tokens before it: how much it expected it. " +
      "While the model learns, the tokens take on color. A token that nobody could guess stays pale.", "In the picture, each row is an evaluation and each column a token."));
  const attends = section("Where it looks", el("div", { class: "row" }, scroller("heads", grid), el("div", { class: "looks" }, lookNote, looks)),
    explain("To guess the next token, a model looks back at earlier ones. It has several heads that do so, each in its own way. Every square is a head: a row for each token that looks, a column for each token that it can look at. " +
      "At the beginning, heads look everywhere. Lines beside the diagonal mean “the token before”. Choose a head and a token, and see in the sentence what it looks at."));
  const layers = section("What each layer would say", scroller("the most likely next token after each layer", lens),
    explain("A model computes in layers. This table asks after each of them: if you had to guess now, which token comes next? Columns are the tokens of the sentence, the last row is the model's answer, and color is how sure it is. " +
      "A good guess is the token at the head of the column to the right."));
  const sections = [film, writes, reads, attends, layers];

  function start() {
    if (frames.length < 2) return;
    if (state.at === frames.length - 1) go(0);
    play.textContent = "Pause";
    state.timer = setInterval(() => state.at < frames.length - 1 ? go(state.at + 1) : stop(), FRAME_TIME);
  }
  function stop() {
    clearInterval(state.timer);
    state.timer = 0;
    play.textContent = "Play";
  }
  function go(at) {
    state.at = at;
    state.follows = at === frames.length - 1;
    draw();
    onMove(frames[at], state.follows);
  }

  // Returns the probability of each token; the first has none.
  const sharesOf = (frame) => [null, ...frame.probabilities];
  const weightsOf = (frame) => frame.weights ??= unpack(frame.attention, Uint8Array);
  const isSame = (frame, other) => frame.pieces.join("\n") === other.pieces.join("\n");

  function draw() {
    const frame = frames[state.at], newest = frames[frames.length - 1];
    for (const part of sections.slice(1)) part.hidden = !frame;
    attends.hidden = layers.hidden = !frame?.heads.length;
    slider.max = Math.max(0, frames.length - 1);
    slider.value = Math.max(0, state.at);
    when.textContent = frame ? whenOf(frame) : "no evaluation yet";
    slider.setAttribute("aria-valuetext", when.textContent);
    if (!frame) return;
    now.replaceChildren(...continued(newest));
    then.replaceChildren(...continued(frame));
    thenTitle.textContent = whenOf(frame)[0].toUpperCase() + whenOf(frame).slice(1);
    drawSentence(frame);
    if (frame.heads.length) {
      drawHeads(frame);
      lens.replaceChildren(...lensRows(frame.pieces, frame.layers, frame.layers[frame.layers.length - 1], (row, t) => {
        const text = frame.lens[row][t], share = frame.lens_probabilities[row][t];
        return { text, share, title: `${showSpaces(text)}  ${percent(share)}` };
      }));
    }
  }
  const continued = ({ prompt, text }) => text.startsWith(prompt) ? [el("span", { class: "soft" }, prompt), text.slice(prompt.length)] : [text];

  // Keeps the elements of the strip while the sentence is the same, so that they keep the focus.
  function stripIn(box, frame, choose) {
    if (box.dataset.text !== frame.pieces.join("\n")) {
      box.dataset.text = frame.pieces.join("\n");
      box.replaceChildren(tokenStrip(frame.pieces.map(showSpaces), choose));
    }
    return [...box.querySelectorAll(".token")];
  }
  function drawSentence(frame) {
    const shares = sharesOf(frame);
    stripIn(sentence, frame, (t) => { state.token = t; drawToken(); }).forEach((token, t) => shade(token, shares[t]));
    const rows = frames.filter((other) => isSame(other, frame)), T = frame.pieces.length;
    const image = new ImageData(T, rows.length), pixels = new Uint32Array(image.data.buffer);
    rows.forEach((row, y) => sharesOf(row).forEach((share, x) => { pixels[y * T + x] = steps[Math.round(1024 * (share ?? 0))]; }));
    history.width = T;
    history.height = rows.length;
    history.getContext("2d").putImageData(image, 0, 0);
    history.style.height = `${Math.min(240, 12 * rows.length)}px`;
    history.setAttribute("aria-label", `the probability of ${T} tokens at ${rows.length} evaluations`);
    drawToken();
  }
  function drawToken() {
    const frame = frames[state.at], t = state.token, share = sharesOf(frame)[t];
    const earlier = frames.filter((other) => isSame(other, frame))[0];
    readout.textContent = !(t in frame.pieces) ? "Point at a token, or use the arrow keys." : share === null ? `“${showSpaces(frame.pieces[t])}” comes first: there is nothing to guess it from.`
      : `“${showSpaces(frame.pieces[t])}”: ${percent(share)} ${whenOf(frame)}; ${percent(sharesOf(earlier)[t])} ${whenOf(earlier)}.`;
  }

  function drawHeads(frame) {
    const T = frame.pieces.length, size = T * (T + 1) / 2, columns = frame.heads.filter(([layer]) => layer === frame.heads[0][0]).length;
    if (grid.children.length !== frame.heads.length) {
      state.head = 0;
      grid.style.gridTemplateColumns = `repeat(${columns}, minmax(64px, 96px))`;
      grid.replaceChildren(...frame.heads.map((_, at) => el("button", { type: "button", onclick: () => { state.head = at; drawLooks(frames[state.at]); } },
        el("canvas", { "aria-hidden": "true" }), el("span", {}))));
    }
    [...grid.children].forEach((button, at) => {
      const [layer, head] = frame.heads[at], kind = KINDS[frame.kinds[at]] ?? "mixed";
      drawTriangle(button.firstChild, T, weightsOf(frame), 255, at * size);
      button.lastChild.textContent = kind;
      button.title = `layer ${layer}, head ${head}: ${kind}`;
      button.setAttribute("aria-label", button.title);
    });
    drawLooks(frame);
  }
  function drawLooks(frame) {
    const T = frame.pieces.length, size = T * (T + 1) / 2, query = state.token in frame.pieces ? state.token : T - 1;
    const from = state.head * size + query * (query + 1) / 2, [layer, head] = frame.heads[state.head];
    [...grid.children].forEach((button, at) => button.setAttribute("aria-pressed", at === state.head));
    stripIn(looks, frame, (t) => { state.token = t; drawLooks(frames[state.at]); drawToken(); }).forEach((token, t) => {
      shade(token, t <= query ? weightsOf(frame)[from + t] / 255 : null);
      token.classList.toggle("query", t === query);
    });
    lookNote.textContent = `Layer ${layer}, head ${head}: what “${showSpaces(frame.pieces[query])}” looks at.`;
  }

  redraws.push(draw);
  draw();
  return {
    add(frame) {
      frames.push(frame);
      if (state.follows && !state.timer) go(frames.length - 1);
      else draw();
    },
    cut(step) {
      if (!frames.some((frame) => frame.step >= step)) return;
      frames.splice(frames.findIndex((frame) => frame.step >= step));
      stop();
      state.follows = true;
      state.at = frames.length - 1;
      draw();
    },
  };
}
