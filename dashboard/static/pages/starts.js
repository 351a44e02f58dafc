// Start states: archives of good states from which episodes start, the cost of the best state, and its ancestors.
import {makeChart} from "../charts.js";
import {fill, h, patch} from "../dom.js";
import {count, figure, NONE} from "../format.js";
import {term} from "../help.js";
import {makeOverTime, titled} from "../overtime.js";
import {facts, table} from "../parts.js";

const IS_BEST = /^starts\.(.+)\.best$/;

const COLUMNS = [
  {title: "Steps from the first", value: ({step}) => (step ? count(step) : "first"), number: true},
  {title: "Cost", value: ({cost}) => figure(cost), number: true},
  {title: "Improvement", value: ({gain}) => (gain === null ? NONE : figure(gain)), number: true},
];

const BEST = {title: "Best cost", unit: "of all start states; lower is better", named: "StartsRow.best"};

export function openStarts(page) {
  const {root, stream, signal} = page;
  const [cards, lineages] = [h("div", h("p.quiet", "Loading …")), h("div")];
  const charts = new Map(); // of lineages, by name
  signal.addEventListener("abort", () => charts.forEach((chart) => chart.close()));
  const linesOf = (names) => (names.some((name) => IS_BEST.test(name)) || stream.newest?.starts.length ? [titled(names, IS_BEST)] : null);
  fill(root, cards, makeOverTime({kinds: [BEST], linesOf, sync: "starts", classes: "wide-chart", usual: "3600"}, page), lineages);
  return {
    update({starts}) {
      patch(cards, starts.length ? h("div.grid", starts.map(archive)) : nothing());
      drawLineages(lineages, charts, starts.filter(({lineage}) => lineage.length));
    },
  };
}

function archive({name, node, kept, draws, best, first}) {
  const gain = best !== null && first !== null ? first - best : null;
  const answer = best === null ? "No state was kept yet" : gain ? `The best costs ${figure(best)}, ${figure(gain)} less than the first` : `The best costs ${figure(best)}, the same as the first`;
  return h("section.card", h("h2", `Start states ${name}`), h("p.answer", answer), facts([
    [term("StartsRow.best"), figure(best)],
    ["Cost of the first", figure(first)],
    [term("StartsRow.kept"), count(kept)],
    [term("StartsRow.draws"), count(draws)],
    ["At", node],
  ]));
}

/** Draw the ancestors of each best state: a chart of cost over steps from the first state, and a table. */
function drawLineages(place, charts, starts) {
  const names = starts.map(({name}) => name);
  for (const [name, chart] of charts) {
    if (names.includes(name)) continue;
    chart.close();
    charts.delete(name);
  }
  for (const {name, lineage} of starts) {
    if (!charts.has(name)) charts.set(name, makeChart({title: `How the best of ${name} was found`, unit: "cost over steps from the first state", named: "StartsRow.lineage", isTime: false}));
    charts.get(name).set(lineage.map(([, step]) => step), [{name: "cost", values: lineage.map(([cost]) => cost)}]);
  }
  const key = names.join("\n");
  if (place.dataset.key !== key) {
    place.dataset.key = key;
    fill(place, names.map((name) => h("div.grid.wide", charts.get(name).element, h("div.lineage"))));
  }
  starts.forEach(({name, lineage}, at) => patch(place.children[at].lastChild, table(`Ancestors of the best of ${name}`, COLUMNS, rowsOf(lineage))));
}

/** The best state first. */
const rowsOf = (lineage) => lineage.map(([cost, step], place) => ({cost, step, gain: place ? lineage[place - 1][0] - cost : null})).reverse();

const nothing = () => h("section.card", h("h2", "No node keeps start states"),
  h("p", "Episodes may start from good states that were found before, in place of the environment's own start. This page shows such states, the best one and its ancestors. Give this dashboard the addresses of the pages of the nodes that keep them."));
