// Every figure's name with what it means and its formula: where the bubbles lead.
import {fill, h} from "../dom.js";
import {empty, searchField} from "../parts.js";
import {TERMS} from "../terms.js";

const FIRST = Object.fromEntries(Object.entries(TERMS).reverse().map(([name, {title, text}]) => [`${title}: ${text}`, name])); // rows share figures

export function openGlossary({root, parameters}) {
  const list = h("div.glossary");
  const draw = (text) => {
    const wanted = text.toLowerCase();
    const found = Object.entries(TERMS).filter(([name, each]) => FIRST[`${each.title}: ${each.text}`] === name).filter(([, {title, text: said}]) => `${title} ${said}`.toLowerCase().includes(wanted));
    fill(list, found.length ? found.map(([name, each]) => entry(name, each)) : empty("No term is like this. Search for less."));
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

/** The name under which the list has a term: of those with the same words the first. */
const shownFor = (name) => TERMS[name] && FIRST[`${TERMS[name].title}: ${TERMS[name].text}`];

function entry(name, {title, text, formula, docs}) {
  return h("section.card", {id: `term-${name}`}, h("h2", title), h("p", text), formula && h("p", h("code", formula)),
    docs && h("p.quiet", `More in docs/${docs}.`));
}
