// The tokens nearest to words, or to a sum of words.
heading(data.title, data.model, ...data.notes);
for (const group of data.groups) {
  section(group.title, el("p", { class: "soft" }, group.note), el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "token"), el("th", { class: "number" }, "id"), el("th", { class: "number" }, "cosine"), el("td", {}))),
    el("tbody", {}, group.near.map((near) => el("tr", {}, el("th", { scope: "row", class: "mono" }, shown(near.text)),
      el("td", { class: "number" }, near.token), el("td", { class: "number" }, near.cosine.toFixed(4)),
      el("td", {}, el("span", { class: "bar", style: `width:${(300 * Math.max(0, near.cosine)).toFixed(1)}px` })))))));
}
document.body.dataset.ready = "yes";
