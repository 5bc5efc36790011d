// Differences: each explainer minus one that the user selects, on the same images

let base = null; // number of the explainer that is subtracted

function renderDifferences() {
  const columns = differingColumns();
  $("differences-task").textContent = data.tasks.length > 1 ? ` of ${state.task.name}` : "";
  const compared = data.explainers.map((_, explainer) => explainer)
    .filter((explainer) => columns.some(({ pairs }) => pairs.explainers.includes(explainer)));
  if (!compared.includes(base)) base = columns.length ? best(columns[0]) : null;
  $("base").replaceChildren(...compared.map((explainer) => el("option", { value: explainer }, data.explainers[explainer].name)));
  $("base").value = String(base);
  const shown = compared.filter((explainer) => explainer !== base && !state.hidden.has(explainer));
  const head = el("tr", {}, ...["Explainer", ...columns.map(({ title }) => title)].map((title) => el("th", { scope: "col" }, title)));
  const lines = shown.map((explainer) =>
    el("tr", {}, el("th", { scope: "row" }, data.explainers[explainer].name), ...columns.map(({ pairs }) => difference(pairs, explainer))));
  $("differences").querySelector("table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...lines));
}

/** The explainer that no other is better than. */
function best({ pairs: { explainers, mean }, title }) {
  const sign = direction(title) || 1;
  return explainers.find((_, row) => mean[row].every((value) => value === null || sign * value >= 0));
}

/** The columns of the table in which explainers of the shown task are compared. */
function differingColumns() {
  const all = state.task?.differences ?? [];
  return all.map((pairs, column) => ({ pairs, title: data.columns[column] })).filter(({ pairs }) => pairs);
}

/** A cell; what is significant is bold and has a star. */
function difference({ explainers, mean, half, significant }, explainer) {
  const [row, column] = [explainer, base].map((each) => explainers.indexOf(each));
  const value = mean[row]?.[column] ?? null;
  if (value === null) return el("td", {}, "\u2013");
  const text = `${value < 0 ? "\u2212" : "+"}${Math.abs(value).toFixed(3)} \u00b1 ${half[row][column].toFixed(3)}`;
  return el("td", {}, significant[row][column] ? el("strong", {}, `${text} *`) : text);
}
