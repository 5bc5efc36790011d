// The page of an audit: which groups are shown, the photos of one, and the command that takes the marked ones out

const STEP = 50; // rows that are shown at first, and by each click on the button below
const marks = new Set();
let shown = []; // the groups of the chosen class, in the chosen order
let most = STEP;

const ORDERS = {
  suspicion: ({ alarm, suspicion }) => alarm + suspicion,
  share: ({ share }) => share,
  effect: ({ effects: [hidden, random] }) => (hidden ? hidden.mean - (random?.mean ?? 0) : -Infinity),
};

function choose() {
  const [chosen, by] = [$("class").value, ORDERS[$("order").value]];
  shown = data.groups.filter(({ class_index }) => chosen === "" || class_index === Number(chosen));
  shown.sort((one, other) => by(other) - by(one) || one.index - other.index);
  most = STEP;
  render();
}

function render() {
  const visible = shown.slice(0, most);
  const rows = visible.map((group) => row(group, takeBox(group, marks, showMarks)));
  const first = visible.findIndex((group) => !isSuspicious(group));
  if ($("order").value === "suspicion" && first >= 0) {
    const line = first ? `Not suspicious: below ${data.threshold}, or not measured` : "No group is suspicious";
    rows.splice(first, 0, el("p", { class: "threshold" }, line));
  }
  $("groups").replaceChildren(...rows);
  $("found").textContent = `${shown.filter(isSuspicious).length} of ${shown.length} suspicious`;
  $("more").hidden = most >= shown.length;
  $("more").textContent = `Show ${Math.min(STEP, shown.length - most)} more of ${shown.length - most}`;
}

function showMarks() {
  const numbers = [...marks].sort((one, other) => one - other);
  $("repair").hidden = !numbers.length;
  $("marked").textContent = `${numbers.length === 1 ? "group" : "groups"} ${numbers.join(", ")}:`;
  $("command").textContent = `${data.command} --without ${numbers.join(" ")}`;
  $("copy").textContent = "Copy";
}

/** Copy the command, or select it where the browser forbids the clipboard. */
async function copy() {
  getSelection().selectAllChildren($("command"));
  const copied = navigator.clipboard?.writeText($("command").textContent) ?? Promise.reject();
  $("copy").textContent = await copied.then(() => "Copied", () => "Selected");
}

/** Open the group that the address names. */
function visit() {
  const number = new URLSearchParams(location.hash.slice(1)).get("group");
  const group = number !== null && data.groups[number];
  if (group) open(group);
  else $("dialog").close();
}

function open(group) {
  $("which").textContent = nameOf(group);
  $("take").replaceChildren(takeBox(group, marks, () => { showMarks(); render(); }));
  const several = [["With the group", group.examples], ["Without it, or with little of it", group.without]];
  $("photos").replaceChildren(reasonsOf(group), ...several.map(([title, examples]) => part(title, examples)));
  for (const [id, step] of [["previous", -1], ["next", 1]]) {
    const other = neighbour(group, step);
    $(id).disabled = !other;
    $(id).onclick = () => { history.replaceState(null, "", `#group=${other.index}`); visit(); };
  }
  $("dialog").onclose = () => {
    if (location.hash) history.replaceState(null, "", "#");
    linkOf(group)?.focus();
  };
  if (!$("dialog").open) $("dialog").showModal();
  $("dialog").scrollTop = 0;
}

function part(title, examples) {
  const wrong = examples.filter(isWrong).length;
  const figures = examples.map((example) => {
    const mark = isWrong(example) ? { class: "wrong" } : {};
    return el("figure", {}, draw(example), el("figcaption", {}, el("span", mark, describe(example)), el("small", {}, data.images[example.image].name)));
  });
  const photos = { 0: "no photo", 1: "1 photo" }[examples.length] ?? `${examples.length} photos`;
  const count = wrong ? `${photos}, ${wrong} predicted wrong` : photos;
  return el("section", {}, el("h3", {}, title, el("small", {}, count)), el("div", { class: "photos" }, ...figures));
}

const linkOf = ({ index }) => $("groups").querySelector(`[data-group="${index}"] h2 a`);

/** The shown group with photos before or after one. */
function neighbour(group, step) {
  const open = shown.filter(({ examples, without }) => examples.length + without.length);
  return open[open.indexOf(group) + step];
}

/** Left and right change the group whose photos are shown; up and down move the focus between groups. */
function onArrow(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.target.matches("select")) return;
  if ($("dialog").open) {
    $({ ArrowLeft: "previous", ArrowRight: "next" }[event.key])?.click();
    return;
  }
  const step = { ArrowUp: -1, ArrowDown: 1 }[event.key], article = event.target.closest("article");
  const beside = step && article && neighbour(data.groups[article.dataset.group], step);
  if (!beside) return;
  event.preventDefault();
  linkOf(beside)?.focus();
}

function start() {
  document.title = $("title").textContent = data.title;
  for (const id of ["summary", "measured"]) $(id).textContent = data[id];
  $("notes").querySelector("dl").append(...data.notes.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]));
  const classes = new Map(data.groups.map(({ class_index }) => [class_index, data.groups.filter((group) => group.class_index === class_index)]));
  const options = [...classes].map(([number, groups]) => el("option", { value: number }, `${data.classes[number]} (${groups.length})`));
  $("class").append(el("option", { value: "" }, "all"), ...options);
  $("class").onchange = choose;
  follow("order", "change", choose);
  follow("highlight", "change", ({ checked }) => $("dialog").classList.toggle("plain", !checked));
  $("more").onclick = () => { most += STEP; render(); };
  $("copy").onclick = copy;
  $("clear").onclick = () => { marks.clear(); showMarks(); render(); };
  startTools();
  document.onkeydown = onArrow;
  window.onhashchange = visit;
  visit();
}

start();
