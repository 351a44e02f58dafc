// Elements that several pages share.
import {fill, h} from "./dom.js";
import {term} from "./help.js";

/** A list of facts: [["what", "value" or element], ...]. */
export const facts = (rows) => h("dl.facts", rows.map(([what, value]) => [h("dt", what), h("dd", value)]));

/** Text in place of missing data: the reason, and advice. */
export const empty = (...text) => h("p.empty", ...text);

/** The message of an error. */
export const problem = (error) => h("p.problem", {role: "alert"}, error.message);

/**
 * A table out of columns {title, value(row), number?, term?} and rows; a title with a term explains itself. `instead(row)` is null, or
 * {after, kind, text} for a row of which only the first `after` cells are known: one cell gives the reason in place of the rest.
 */
export function table(caption, columns, rows, instead = () => null) {
  const head = h("tr", columns.map((column) => h(`th${column.number ? ".number" : ""}`, {scope: "col"}, titleOf(column))));
  const body = rows.map((row) => {
    const away = instead(row);
    if (!away) return h("tr", columns.map((column) => cell(column, row)));
    const known = columns.slice(0, away.after).map((column) => cell(column, row));
    return h(`tr.away.${away.kind}`, known, h("td.wrap", {colspan: columns.length - away.after}, away.text));
  });
  return h("div.scroll", {tabindex: "0", role: "region", "aria-label": caption},
    h("table", h("caption.hidden-text", caption), h("thead", head), h("tbody", body)));
}

const titleOf = ({title, term: named}) => (named ? term(named, title) : title);

/** One cell of a table. */
export function cell(column, row) {
  const kind = `td${column.number ? ".number" : ""}${column.wrap ? ".wrap" : ""}`;
  return h(kind, column.value(row));
}

/** A choice of one among [[value, text], ...]; `change` gets the value. */
export function choice(label, options, value, change) {
  const select = h("select", {"aria-label": label, change: () => change(select.value)},
    options.map(([each, text]) => h("option", {value: each, selected: each === value}, text)));
  return select;
}

/** A search field that calls `change` when the reader stops typing. */
export function searchField(label, value, change) {
  let timer = 0;
  const input = h("input", {type: "search", placeholder: label, "aria-label": label, value, spellcheck: "false",
    input: () => {
      clearTimeout(timer);
      timer = setTimeout(() => change(input.value), 250);
    }});
  return input;
}

/**
 * Repeat `work` while the page is open, but never twice at once; return a function that runs it now. `report` gets an error, or
 * null.
 */
export function every(seconds, signal, stream, work, report = (error) => error && console.info(error.message)) {
  let isBusy = false;
  let isWanted = false;
  const run = async () => {
    isWanted = isBusy;
    if (isBusy || signal.aborted) return;
    isBusy = true;
    try {
      await work();
      report(null);
    } catch (error) {
      if (error.name !== "AbortError") report(error);
    } finally {
      isBusy = false;
      if (isWanted) run();
    }
  };
  const timer = setInterval(() => !document.hidden && !stream.isPaused && run(), seconds * 1000);
  signal.addEventListener("abort", () => clearInterval(timer));
  run();
  return run;
}

/** Show an error in an element, or clear the element. */
export const showProblem = (element, error) => fill(element, error && problem(error));

/** A card of one figure: its label, its value and further text. */
export const tile = (label, value, rest, ...more) => h("section.card.tile", h("div.label", label), h("div.value", value), rest && h("div.rate", rest), ...more);

/** A menu of boxes to tick, [{name, label}]; `change` gets a name and whether it is ticked. */
export function tickMenu(title, boxes, chosen, change, isOpen = false) {
  return h("details.menu", {open: isOpen}, h("summary", title), h("div.card", boxes.map(({name, label}) => {
    const box = h("input", {type: "checkbox", checked: chosen.includes(name), change: () => change(name, box.checked)});
    return h("label", box, label);
  })));
}

/** The `route` of a page with parts: calls `open(state, signal)` for each state, after it aborts the part before. */
export function routed(signal, open) {
  let shown = new AbortController();
  signal.addEventListener("abort", () => shown.abort());
  return (state) => {
    shown.abort();
    shown = new AbortController();
    return open(state, shown.signal);
  };
}
