// How weights and ages of what a table holds are spread, and how many entries that is worth.
import {fill, h} from "../dom.js";
import {count, duration, figure, share} from "../format.js";
import {histogram} from "../histogram.js";
import {empty, facts, problem} from "../parts.js";

const FEW = 0.05; // share of the entries that the memory is worth, below which somebody should know

/** {element, set(answer), fail(error)}: three cards. */
export function makeDistribution() {
  const place = h("div.grid", h("p.quiet", "Loading …"));
  return {
    element: h("section.block", place),
    set: (found) => fill(place, found.looked ? [size(found), weights(found), ages(found)] :
      h("section.card", empty("This table holds nothing that can be drawn now."))),
    fail: (error) => fill(place, h("section.card", problem(error))),
  };
}

function size({effective, population, looked, held, storage, servers, missing}) {
  const part = population > 0 && effective !== null ? Math.min(1, effective / population) : null;
  const kind = storage === "episodes" ? "entries" : "samples";
  return h("section.card", h("h2", "Effective size"),
    h("p.answer", part === null ? "Not known" : `Worth ${count(Math.round(effective))} of ${count(population)} entries (${share(part)})`),
    h("p.quiet", "1 / Σp²: as many entries of equal chances would be drawn again as often."),
    part !== null && part < FEW && h("p", "A few entries are drawn again and again: a lower priority_exponent spreads the draws."),
    facts([
      [`${kind} that can be drawn`, count(held)],
      ["looked at for this", looked < held ? `${count(looked)} of them` : "all of them"],
      ["servers", missing.length ? `${servers.length}, ${missing.join(", ")} did not answer` : count(servers.length)],
    ]));
}

function weights({weights: found, storage}) {
  return h("section.card", h("h2", "Weights"),
    h("p.answer", ends(found, figure)), histogram(found, "Weights"),
    h("p.quiet", storage === "episodes" ? "Of stored entries; draws are in proportion to them." :
      "Of held samples, which actors drew in proportion to them."));
}

function ages({ages: found}) {
  return h("section.card", h("h2", "Ages"),
    h("p.answer", ends(found, duration)), histogram(found, "Ages", duration),
    h("p.quiet", "Since the entries were recorded."));
}

const ends = ({least, greatest}, format) => (least === greatest ? `all ${format(least)}` : `${format(least)} to ${format(greatest)}`);
