// Glossary: name, meaning and formula of every figure. The bubbles link here.
import {fill, h} from "../dom.js";
import {empty, searchField} from "../parts.js";
import {TERMS} from "../terms.js";

const FIRST = Object.fromEntries(Object.entries(TERMS).reverse().map(([name, {title, text}]) => [`${title}: ${text}`, name])); // several rows have the same figures

export function openGlossary({root, parameters}) {
  const list = h("div.glossary");
  const draw = (text) => {
    const wanted = text.toLowerCase();
    const matches = Object.entries(TERMS).filter(([name, each]) => FIRST[`${each.title}: ${each.text}`] === name).filter(([, {title, text: meaning}]) => `${title} ${meaning}`.toLowerCase().includes(wanted));
    fill(list, matches.length ? matches.map(([name, each]) => entry(name, each)) : empty("No term matches. Shorten the search."));
  };
  fill(root, h("div.bar", searchField("Find a term", "", draw)), list);
  draw("");
  const route = (state) => {
    const named = document.getElementById(`term-${shownFor(state.get("term"))}`);
    list.querySelector(".here")?.classList.remove("here");
    named?.classList.add("here");
    named?.scrollIntoView({block: "center"});
  };
  route(parameters);
  return {route};
}

/** Name under which the list shows a term: the first of the terms with the same title and meaning. */
const shownFor = (name) => TERMS[name] && FIRST[`${TERMS[name].title}: ${TERMS[name].text}`];

function entry(name, {title, text, formula, docs}) {
  return h("section.card", {id: `term-${name}`}, h("h2", title), h("p", text), formula && h("p", h("code", formula)),
    docs && h("p.quiet", `More in docs/${docs}.`));
}
