// How weights and ages of what a table holds are spread, and how many entries that is worth.
import {fill, h, patch} from "../dom.js";
import {count, duration, figure, share} from "../format.js";
import {term} from "../help.js";
import {histogram} from "../histogram.js";
import {empty, facts, problem} from "../parts.js";

const FEW = 0.05; // share of the entries that the memory is worth, below which somebody should know

/** {element, set(answer), fail(error)}: three cards. */
export function makeDistribution() {
  const place = h("div.grid", h("p.quiet", "Loading …"));
  return {
    element: h("section.block", place),
    set: (found) => patch(place, found.looked ? [size(found), weights(found), ages(found)] :
      h("section.card", empty("This table holds nothing that can be drawn now."))),
    fail: (error) => fill(place, h("section.card", problem(error))),
  };
}

function size({effective, population, looked, held, unit, servers, missing}) {
  const part = population > 0 && effective !== null ? Math.min(1, effective / population) : null;
  return h("section.card", h("h2", term("ClusterDistribution.effective")),
    h("p.answer", part === null ? "Not known" : `Draws spread as over ${count(Math.round(effective))} equal entries, of ${count(population)} (${share(part)})`),
    part !== null && part < FEW && h("p", "A few entries are drawn again and again: a lower priority_exponent spreads the draws."),
    facts([
      [`${unit} that can be drawn`, count(held)],
      ["looked at for this", looked < held ? `${count(looked)} of them` : "all of them"],
      ["servers", missing.length ? `${servers.length}, ${missing.join(", ")} did not answer` : count(servers.length)],
    ]));
}

function weights({weights: found, weighed}) {
  return h("section.card", h("h2", term("HeldSample.weight", "Weights")),
    h("p.answer", ends(found, figure)), spreadOf(found, "Weights", figure),
    h("p.quiet", weighed));
}

function ages({ages: found}) {
  return h("section.card", h("h2", term("HeldSample.age", "Ages")),
    h("p.answer", ends(found, duration)), spreadOf(found, "Ages", duration),
    h("p.quiet", "Since the entries were recorded."));
}

/** Bars, but for values that are all alike: one bar would only look like a spread. */
const spreadOf = (found, title, format) => (found.least === found.greatest ? null : histogram(found, title, format));

const ends = ({least, greatest}, format) => (least === greatest ? `all ${format(least)}` : `${format(least)} to ${format(greatest)}`);
