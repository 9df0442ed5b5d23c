// The tokens nearest to words, with cosines.
heading("Neighbors", data.model, "Cosine similarity of two rows of the embedding: 1 is the same direction, 0 is unrelated.");
const cards = el("div", { class: "cards narrow" });
document.getElementById("main").append(cards);
for (const group of data.groups) {
  cards.append(section(group.title, el("p", { class: "soft" }, group.note), scroller(`tokens near ${group.title}`, el("table", { class: "bars" },
    el("thead", {}, el("tr", {}, el("th", {}, "token"), el("th", { class: "number" }, "id"), el("th", { class: "number" }, "cosine"), el("td", {}))),
    el("tbody", {}, group.near.map((near) => el("tr", {}, el("th", { scope: "row", class: "mono" }, showSpaces(near.text)),
      el("td", { class: "number" }, near.token), el("td", { class: "number" }, near.cosine.toFixed(4)),
      el("td", {}, el("span", { class: "bar", style: `width:${(100 * Math.max(0, near.cosine)).toFixed(1)}%` })))))))));
}
document.body.dataset.ready = "yes";
