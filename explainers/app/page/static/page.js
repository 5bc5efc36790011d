// The page: what is chosen, and what the server is asked

const props = JSON.parse(document.querySelector("#data").textContent), COLOURS = props.colours, GREY = props.grey;
const $ = (selector) => document.querySelector(selector);
const state = { subject: null, chosen: null, methods: [...props.methods], test: "most", amount: 0, painted: new Set(), points: [] };
const smooth = () => $(".smooth").checked;
const keyOf = (method, { index, against } = state.subject) => `${method} ${[index, ...against].map((each) => JSON.stringify(each))}`;
let maps = new Map(), view = null, openings = 0, drawing = false, outdated = false, leaving = new AbortController();

/** Ask the server; its answer, or an error. It computes one after another, so that slow ones are aborted if they are not shown. */
async function call(name, question, signal) {
  const request = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ name, question }), signal };
  try {
    const reply = await fetch("api", request);
    return reply.ok ? await reply.json() : { error: await reply.text() };
  } catch {
    return { error: "The server does not answer: is it still running?" };
  }
}

/** Ask one of the views of views.py about the opened image; an error is shown, and nothing returned. */
async function ask(name, question, signal) {
  const opened = view;
  const reply = await call(name, { image: opened.key, ...question }, signal);
  if (opened !== view || signal?.aborted) return null;
  if (!reply.error) return reply;
  say(reply.error, true);
  return null;
}

function say(text, error = false) {
  $(".message").textContent = text;
  $(".message").classList.toggle("error", error);
}

/** As many children as needed; those that are there stay. */
function sameNumber(parent, count, build) {
  while (parent.children.length > count) parent.lastChild.remove();
  while (parent.children.length < count) parent.append(build());
  return [...parent.children];
}

const newButton = () => Object.assign(document.createElement("button"), { type: "button" });

function mapFigure() {
  const figure = document.createElement("figure");
  figure.innerHTML = '<canvas role="img"></canvas><figcaption><span class="dot"></span><span class="name"></span><span class="legend"></span></figcaption>';
  return figure;
}

/** Show an image that the server opens, and explain its most probable class. */
async function open(reply) {
  const opening = ++openings;
  leaving.abort();
  view = null;
  $(".opened").hidden = true;
  compare();
  say("Opening the image …");
  const opened = await reply;
  if (opening !== openings) return;
  if (opened.error) return say(opened.error, true);
  const [image, pale] = await Promise.all([decoded(opened.picture), decoded(opened.pale)]);
  if (opening !== openings) return;
  maps = new Map();
  view = { ...opened, image, pale };
  Object.assign(state, { test: "most", amount: Math.round(0.2 * view.rows * view.columns), painted: new Set(), points: [] });
  $('[name="side"]').checked = true;
  $(".opened").hidden = false;
  say("");
  compare();
  $(".ask").hidden = !view.prompts;
  await scorePrompts();
  const first = view?.classes[0] ?? prompts[0];
  $(".explained").hidden = !first;
  if (first) explain(first);
  else if (view) draw();
}

/** Explain a class or text [index, name, score] by all chosen methods, told apart from others, by their indices. */
async function explain(chosen, against = []) {
  const subject = { index: chosen[0], against };
  leaving.abort();
  const { signal } = (leaving = new AbortController());
  Object.assign(state, { subject, chosen, points: [] });
  list();
  await Promise.all(state.methods.map((method) => explainBy(method, subject)));
  if (!signal.aborted) curve();
}

async function explainBy(method, subject) {
  const key = keyOf(method, subject), known = maps.get(key);
  draw();
  if (known) return;
  const reply = await ask("heatmap", { method, ...subject }, leaving.signal);
  if (!reply) return;
  maps.set(key, { tiles: tilesOf(reply.tiles), order: reply.order, legend: reply.legend });
  if (subject !== state.subject) return;
  state.chosen = reply.class;
  list();
  draw();
  test();
}

function draw() {
  if (!state.subject) return;
  const columns = state.methods.length + 1;
  $(".opened").style.setProperty("--columns", Math.max(columns, 3));
  $(".opened").style.setProperty("--curve", columns > 2 ? 2 : 1);
  const figures = sameNumber($(".maps"), columns, mapFigure);
  paint(figures[0].firstChild, view.image);
  figures[0].firstChild.setAttribute("aria-label", view.name);
  figures[0].querySelector(".name").textContent = view.name;
  figures[0].querySelector(".dot").hidden = true;
  showLegend(figures[0].querySelector(".legend"), { colours: [], words: [view.unseen] });
  state.methods.forEach((method, i) => {
    const [canvas, caption] = figures[i + 1].children;
    const map = maps.get(keyOf(method));
    figures[i + 1].classList.toggle("waiting", !map);
    paint(canvas, view.pale, map?.tiles, view.box);
    canvas.setAttribute("aria-label", `heatmap of ${state.chosen[1]} by ${method}: ${map?.legend.words.join(", ") ?? "computed now"}`);
    canvas.dataset.shown = map ? keyOf(method) : "";
    caption.querySelector(".name").textContent = map ? method : `${method} …`;
    showLegend(caption.querySelector(".legend"), map?.legend);
    caption.style.setProperty("--colour", COLOURS[i]);
  });
}

/** Ask for the curves of the chosen methods; while an answer is awaited, only the latest question is kept. */
async function curve() {
  state.points = [];
  points();
  $(".curve").classList.add("waiting");
  test();
  outdated = true;
  if (drawing) return;
  drawing = true;
  while (outdated && view) {
    outdated = false;
    const side = state.test === "least" ? "least" : "most", { subject, methods } = state;
    const reply = await ask("curves", { methods, side, ...subject }, leaving.signal);
    if (!reply || subject !== state.subject || methods !== state.methods || (state.test === "least") !== (side === "least")) continue;
    $(".curve").classList.remove("waiting");
    $(".curve div").innerHTML = reply.svg;
    $(".curve .axis").textContent = reply.axis;
    points();
  }
  drawing = false;
}

/** A score: decimal places of a probability or similarity, or the digits of a value. */
const written = (score, places) => (view.digits ? String(+score.toPrecision(view.digits)) : score.toFixed(places));

/** List the texts and classes, and beside the explained one those that it can be told apart from. */
function list() {
  const { index: own, against } = state.subject, place = view.classes.findIndex(([index]) => index === own);
  if (!isText(own)) view.classes.splice(place < 0 ? view.classes.length : place, 1, state.chosen); // one that was searched for stays
  const shown = [...prompts].sort((one, other) => other[2] - one[2]).concat(view.classes);
  sameNumber($(".classes"), shown.length, newButton).forEach((button, i) => {
    const [index, name, score] = shown[i];
    const value = document.createElement("b");
    value.textContent = score === null ? "" : written(score, 2);
    button.replaceChildren(name, value);
    button.style.setProperty("--probability", view.digits ? 0 : Math.min(Math.max(score ?? 0, 0), 1));
    button.dataset.index = index;
    button.setAttribute("aria-pressed", index === own);
    button.onclick = () => explain(shown[i]);
  });
  const others = shown.filter(([index]) => index !== own && isText(index) === isText(own));
  $(".contrast").hidden = !others.length;
  $(".contrast b").textContent = state.chosen[1];
  sameNumber($(".others"), others.length, newButton).forEach((button, i) => {
    const [index, name] = others[i], pressed = against.includes(index);
    button.textContent = pressed ? `${name} ✕` : name;
    button.dataset.index = index;
    button.setAttribute("aria-label", name);
    button.setAttribute("aria-pressed", pressed);
    button.onclick = () => explain(state.chosen, others.map(([each]) => each).filter((each) => against.includes(each) !== (each === index)));
  });
}

async function save() {
  const reply = await ask("picture", { methods: state.methods, smooth: smooth(), ...state.subject });
  if (reply) Object.assign(document.createElement("a"), { href: reply.url, download: reply.file }).click();
}

$(".smooth").onchange = () => view && (draw(), drawAlike());
listenToTexts();
$(".save").onclick = save;
$(".hidden-count").oninput = () => ((state.amount = +$(".hidden-count").value), test());
$(".clear").onclick = () => (state.painted.clear(), test());
document.querySelectorAll('[name="side"]').forEach((radio) => {
  radio.onchange = () => ((state.test = radio.value), $(".tests").replaceChildren(), curve());
});
listenToChoices();
document.querySelectorAll('[role="tab"]').forEach((tab, _, tabs) => {
  tab.onclick = () =>
    tabs.forEach((each) => {
      each.setAttribute("aria-selected", each === tab);
      $(`#${each.getAttribute("aria-controls")}`).hidden = each !== tab;
    });
});
