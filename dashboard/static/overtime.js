// Charts of a page over a range of time that the reader chooses.
import {get} from "./api.js";
import {lineOf, makeChart} from "./charts.js";
import {withGaps} from "./curves.js";
import {h} from "./dom.js";
import {choice, every, showProblem} from "./parts.js";
import {remember} from "./router.js";

const RANGES = [["300", "5 minutes"], ["3600", "1 hour"], ["86400", "1 day"], ["604800", "1 week"], ["all", "the whole run"]];

/** A choice of a range; `change` gets {range}. */
export const rangeChoice = (range, change) => choice("Range", RANGES, range ?? "300", (chosen) => change({range: chosen}));

/** {since, until} for a state of a page: the chosen stretch, or the newest `range` seconds. */
export function spanOf({since, until, range = "300"}, stream) {
  if (since) return {since, until};
  if (range === "all") return {since: 0};
  return {since: Math.max(0, (stream.newest?.time ?? Date.now() / 1000) - Number(range))};
}

/**
 * An element with the choice of a range and charts below it. `kinds` are options of makeChart, `sync` is the name of their cross-hair.
 * `linesOf(names)` gets the names of all known figures and returns the lines of each chart: {figure: title of its line}, or
 * [figures, curves => lines] if lines are calculated; null hides all. `classes` are those of the charts' place, `usual` is the first range.
 */
export function makeOverTime({kinds, linesOf, sync, heading = "Over time", classes = "grid.wide", usual = "300"}, {parameters, stream, signal}) {
  const state = {range: parameters.get("range") ?? usual};
  const message = h("div");
  const charts = kinds.map((kind) => makeChart({...kind, sync}));
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.close()));
  const range = rangeChoice(state.range, (chosen) => {
    Object.assign(state, chosen);
    remember(chosen);
    refresh();
  });
  const element = h("div", {hidden: true}, h("div.bar", heading && h("h2", heading), range), message, h(`div.${classes}`, charts.map((chart) => chart.element)));
  const refresh = every(3, signal, stream, async () => {
    const drawn = linesOf(await get("figures", {}, signal));
    element.hidden = drawn === null;
    if (element.hidden) return;
    const name = drawn.flatMap((each) => (Array.isArray(each) ? each[0] : Object.keys(each)));
    const curves = await get("curves", {name, points: 300, ...spanOf(state, stream)}, signal);
    drawn.forEach((each, at) => {
      const lines = Array.isArray(each) ? each[1](curves) : Object.entries(each).map(([figure, title]) => lineOf(curves, figure, title));
      charts[at].set(...withGaps(curves, lines), {away: curves.away});
    });
  }, (error) => showProblem(message, error));
  return element;
}

/** {figure: title} of the figures that a pattern matches; its first group is the title. */
export const titled = (names, kind) => Object.fromEntries(names.filter((name) => kind.test(name)).map((name) => [name, name.match(kind)[1]]));
