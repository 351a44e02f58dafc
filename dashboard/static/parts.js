// Pieces that several pages are made of.
import {fill, h} from "./dom.js";
import {term} from "./help.js";

/** A list of facts: [["what", "value" or element], ...]. */
export const facts = (rows) => h("dl.facts", rows.map(([what, value]) => [h("dt", what), h("dd", value)]));

/** What a page shows where there is nothing: what that means, and what to do. */
export const empty = (...text) => h("p.empty", ...text);

/** What went wrong, for people. */
export const problem = (error) => h("p.problem", {role: "alert"}, error.message);

/**
 * A table out of columns {title, value(row), number?, term?} and rows; a title with a term explains itself. `instead(row)` is null, or
 * {after, kind, text} for a row of which only the first `after` cells are known: one cell says why in place of the rest.
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

/** A search field that waits until somebody stops typing. */
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
 * Do something again and again while the page is there, but never twice at once; returns a function that does it now. `told` gets what
 * went wrong, or null.
 */
export function every(seconds, signal, stream, work, told = (error) => error && console.info(error.message)) {
  let isBusy = false;
  let isWanted = false;
  const run = async () => {
    isWanted = isBusy;
    if (isBusy || signal.aborted) return;
    isBusy = true;
    try {
      await work();
      told(null);
    } catch (error) {
      if (error.name !== "AbortError") told(error);
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

/** Put an error in an element, or take it away. */
export const showProblem = (element, error) => fill(element, error && problem(error));

/** A figure by itself: what it is called, its value, and what more there is to say. */
export const tile = (label, value, rest, ...more) => h("section.card.tile", h("div.label", label), h("div.value", value), rest && h("div.rate", rest), ...more);

/** A menu of boxes to tick, [{name, label}]; `change` gets a name and whether it is ticked. */
export function tickMenu(title, boxes, chosen, change, isOpen = false) {
  return h("details.menu", {open: isOpen}, h("summary", title), h("div.card", boxes.map(({name, label}) => {
    const box = h("input", {type: "checkbox", checked: chosen.includes(name), change: () => change(name, box.checked)});
    return h("label", box, label);
  })));
}

/** The `route` of a page whose parts are opened by its state: `open(state, signal)` is called anew for each, and the one before is ended. */
export function routed(signal, open) {
  let shown = new AbortController();
  signal.addEventListener("abort", () => shown.abort());
  return (state) => {
    shown.abort();
    shown = new AbortController();
    return open(state, shown.signal);
  };
}
