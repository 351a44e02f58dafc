// Where episodes start from: the best states that were found, how good they are, and how the best one came about.
import {get} from "../api.js";
import {lineOf, makeChart} from "../charts.js";
import {withGaps} from "../curves.js";
import {fill, h, patch} from "../dom.js";
import {count, figure, NONE} from "../format.js";
import {term} from "../help.js";
import {choice, every, facts, showProblem, table} from "../parts.js";
import {RANGES, spanOf} from "../ranges.js";
import {remember} from "../router.js";

const IS_BEST = /^starts\.(.+)\.best$/;

const COLUMNS = [
  {title: "Steps from the first", value: ({step}) => (step ? count(step) : "first"), number: true},
  {title: "Cost", value: ({cost}) => figure(cost), number: true},
  {title: "Less than before", value: ({gain}) => (gain === null ? NONE : figure(gain)), number: true},
];

export function openStarts({root, parameters, stream, signal}) {
  const state = Object.fromEntries(parameters);
  const [cards, message, over, lineages] = [h("div", h("p.quiet", "Loading …")), h("div"), h("div", {hidden: true}), h("div")];
  const best = makeChart({title: "Best cost", unit: "of all start states; less is better", named: "StartsRow.best", sync: "starts"});
  const charts = new Map(); // of lineages, by name
  signal.addEventListener("abort", () => [best, ...charts.values()].forEach((chart) => chart.close()));
  const range = choice("Range", RANGES, state.range ?? "3600", (chosen) => {
    state.range = chosen;
    remember({range: chosen});
    refresh();
  });
  fill(over, h("div.bar", h("h2", "Over time"), range), message, h("div.wide-chart", best.element), lineages);
  fill(root, cards, over);
  const refresh = every(3, signal, stream, async () => {
    try {
      const names = (await get("figures", {}, signal)).filter((name) => IS_BEST.test(name));
      over.hidden = !names.length && !stream.newest?.starts.length;
      if (over.hidden) return;
      const found = await get("curves", {name: names, points: 300, ...spanOf(state, stream)}, signal);
      best.set(...withGaps(found, names.map((name) => lineOf(found, name, name.match(IS_BEST)[1]))), {away: found.away});
      showProblem(message, null);
    } catch (error) {
      if (error.name !== "AbortError") showProblem(message, error);
    }
  });
  return {
    update({starts}) {
      patch(cards, starts.length ? h("div.grid", starts.map(archive)) : nothing());
      drawLineages(lineages, charts, starts.filter(({lineage}) => lineage.length));
    },
  };
}

function archive({name, node, kept, draws, best, first}) {
  const gain = best !== null && first !== null ? first - best : null;
  const answer = best === null ? "No state was kept yet" : gain ? `The best costs ${figure(best)}, ${figure(gain)} less than the first` : `The best costs ${figure(best)}, as the first`;
  return h("section.card", h("h2", `Start states ${name}`), h("p.answer", answer), facts([
    [term("StartsRow.best"), figure(best)],
    ["Cost of the first", figure(first)],
    [term("StartsRow.kept"), count(kept)],
    [term("StartsRow.draws"), count(draws)],
    ["At", node],
  ]));
}

/** How each best state came about: cost over steps from the first state, and the same as a table. */
function drawLineages(place, charts, starts) {
  const names = starts.map(({name}) => name);
  for (const [name, chart] of charts) {
    if (names.includes(name)) continue;
    chart.close();
    charts.delete(name);
  }
  for (const {name, lineage} of starts) {
    if (!charts.has(name)) charts.set(name, makeChart({title: `How the best of ${name} came about`, unit: "cost over steps from the first state", named: "StartsRow.lineage", isTime: false}));
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
  h("p", "Episodes may start from good states that were found before, in place of the environment's own start. A node that keeps such states shows them here, with the best one and how it came about, if its pages are named to this dashboard."));
