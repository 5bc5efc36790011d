// Results: the table of all tasks, and the curves of the shown one

const BOX = { width: 380, height: 250, left: 46, right: 370, top: 10, bottom: 212 };
let order = null; // column and direction by which the user sorts the table

function renderResults() {
  renderTable();
  renderDifferences();
  renderCurves();
}

function renderTable() {
  const shown = data.tasks.map((task) => task.rows.filter(({ explainer }) => !state.hidden.has(explainer)));
  const lines = shown.flatMap((rows, index) => rows.map((row) => line(row, rows, data.tasks[index].name)));
  if (order) lines.sort((one, other) => compare(one.values[order.column], other.values[order.column], order.sign));
  $("table").classList.toggle("one-task", data.tasks.length === 1);
  const titles = ["Task", "Explainer", ...data.columns];
  const head = el("thead", {}, el("tr", {}, ...titles.map(titleCell)));
  $("table").querySelector("table").replaceChildren(head, el("tbody", {}, ...lines.map(({ element }) => element)));
}

/** A row of the table; `rows` are those of its task. */
function line(row, rows, task) {
  const name = data.explainers[row.explainer].name;
  const cells = row.text.map((text, column) => {
    const best = row.values[column] !== null && row.values[column] === bestOf(rows, column);
    return el("td", {}, best ? el("strong", {}, text) : text);
  });
  const head = [el("td", {}, task), el("th", { scope: "row" }, name)];
  return { values: [task, name, ...row.values], element: el("tr", {}, ...head, ...cells) };
}

/** 1 if high values are better, -1 if low ones are, 0 if the title does not say. */
const direction = (title) => title.includes("\u2191") - title.includes("\u2193");

function bestOf(rows, column) {
  const sign = direction(data.columns[column]);
  const values = rows.map((row) => row.values[column]).filter((value) => value !== null);
  return sign && values.length ? sign * Math.max(...values.map((value) => sign * value)) : undefined;
}

function titleCell(title, column) {
  const sorted = order?.column === column;
  const button = el("button", { type: "button" }, title);
  button.onclick = () => {
    const first = column > 1 && direction(title) >= 0 ? -1 : 1; // the best, or the first of the alphabet
    order = { column, sign: sorted ? -order.sign : first };
    renderTable();
    $("table").querySelectorAll("thead button")[column].focus();
  };
  const sort = sorted ? (order.sign > 0 ? "ascending" : "descending") : "none";
  return el("th", { scope: "col", "aria-sort": sort }, button);
}

/** Missing values are last in both directions. */
function compare(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null);
  return sign * (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
}

function renderCurves() {
  const rows = (state.task?.rows ?? []).filter(({ explainer }) => !state.hidden.has(explainer));
  const measured = rows.filter(({ curves }) => curves.some(({ length }) => length));
  $("curves-task").textContent = data.tasks.length > 1 ? ` of ${state.task.name}` : "";
  $("charts").replaceChildren(...data.curves.map((title, index) => chart(title, linesOf(rows, index))).filter(Boolean));
  $("legend").replaceChildren(...measured.map(({ explainer }) => {
    const entry = el("span", {}, ...key(explainer));
    entry.onpointerenter = () => highlight(explainer);
    entry.onpointerleave = () => highlight(null);
    return entry;
  }));
}

/** The points [sparsity, value] of every explainer that has this curve. */
function linesOf(rows, curve) {
  const points = ({ sparsity, curves }) => curves[curve].map((value, level) => [sparsity[level], value]);
  const known = ([sparsity, value]) => sparsity !== undefined && value !== null;
  const lines = rows.map((row) => ({ explainer: row.explainer, points: points(row).filter(known) }));
  return lines.filter(({ points }) => points.length);
}

function chart(title, lines) {
  if (!lines.length) return null;
  const values = lines.flatMap(({ points }) => points.map(([, value]) => value));
  const marks = ticks(Math.min(...values), Math.max(...values));
  const place = {
    column: (sparsity) => BOX.left + sparsity * (BOX.right - BOX.left),
    row: (value) => BOX.bottom - ((value - marks[0]) / (marks.at(-1) - marks[0])) * (BOX.bottom - BOX.top),
  };
  const paths = lines.map(({ explainer, points }) => {
    const corners = points.map(([sparsity, value]) => `${place.column(sparsity)},${place.row(value)}`).join(" ");
    return svg("polyline", { points: corners, class: "line", "data-explainer": explainer, ...stroke(explainer) });
  });
  const dot = svg("circle", { r: 4, class: "dot", visibility: "hidden" });
  const label = `${title} against sparsity of ${lines.map(({ explainer }) => data.explainers[explainer].name).join(", ")}`;
  const view = { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": label };
  const picture = svg("svg", view, ...axes(marks, place), ...paths, dot);
  const reading = el("p", { class: "reading" });
  picture.onpointermove = (event) => read(nearest(event, picture, lines, place), dot, reading, place);
  picture.onpointerleave = () => read(null, dot, reading, place);
  return el("figure", {}, el("figcaption", {}, title), picture, reading);
}

/** Round numbers of which the first and the last enclose an interval. */
function ticks(low, high) {
  const span = high - low || Math.abs(high) || 1;
  const power = 10 ** Math.floor(Math.log10(span / 4));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= span / 5);
  const first = Math.floor(low / step);
  const count = Math.max(Math.ceil(high / step) - first, 1);
  return Array.from({ length: count + 1 }, (_, index) => Number(((first + index) * step).toPrecision(6)));
}

function axes(marks, place) {
  const rows = marks.flatMap((value) => [
    svg("line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: place.row(value), y2: place.row(value) }),
    svg("text", { x: BOX.left - 6, y: place.row(value) + 4, "text-anchor": "end" }, String(value)),
  ]);
  const columns = [0, 0.25, 0.5, 0.75, 1].map((value) =>
    svg("text", { x: place.column(value), y: BOX.bottom + 16, "text-anchor": "middle" }, String(value)));
  const middle = (BOX.left + BOX.right) / 2;
  return [...rows, ...columns, svg("text", { x: middle, y: BOX.bottom + 33, "text-anchor": "middle" }, "sparsity |S*| / N")];
}

/** The point of all lines next to the pointer. */
function nearest(event, picture, lines, { column, row }) {
  const pointer = new DOMPoint(event.clientX, event.clientY).matrixTransform(picture.getScreenCTM().inverse());
  const all = lines.flatMap(({ explainer, points }) => points.map(([sparsity, value]) => ({ explainer, sparsity, value })));
  const distance = ({ sparsity, value }) => Math.hypot(column(sparsity) - pointer.x, row(value) - pointer.y);
  return all.reduce((best, point) => (distance(point) < distance(best) ? point : best));
}

/** Mark a point of a chart and write its value; null marks none. */
function read(point, dot, reading, { column, row }) {
  highlight(point && point.explainer);
  dot.setAttribute("visibility", point ? "visible" : "hidden");
  reading.textContent = "";
  if (!point) return;
  fill(dot, { cx: column(point.sparsity), cy: row(point.value), fill: data.explainers[point.explainer].colour });
  const name = data.explainers[point.explainer].name;
  reading.textContent = `${name}: ${point.value.toFixed(3)} at sparsity ${point.sparsity.toFixed(2)}`;
}

function highlight(explainer) {
  for (const line of $("charts").querySelectorAll(".line")) {
    line.classList.toggle("dim", explainer !== null && Number(line.dataset.explainer) !== explainer);
  }
}
