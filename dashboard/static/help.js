// Explained names: a dotted underline, and a bubble with the meaning, opened by pointer, touch or keyboard.
import {fill, h} from "./dom.js";
import {ago, bytes, count, duration, figure, share} from "./format.js";
import {address} from "./router.js";
import {TERMS} from "./terms.js";

const DELAY = 350; // ms for which the pointer rests on a name before its bubble opens
const EDGE = 8; // px between a bubble and the window's edge

/** An explained name, shown as `text`; plain text if TERMS has no entry. */
export function term(name, text = TERMS[name]?.title ?? name) {
  return TERMS[name] ? h("button.term", {type: "button", "data-term": name, "aria-haspopup": "dialog"}, text) : text;
}

const FORMATS = {bytes, count, share, s: duration, ago: (time) => ago(time, Date.now() / 1000)};

/** A column of a table for a figure such as "TableRow.held_bytes": {name, title, term, format, value, number}, changed by `overrides`. */
export function column(named, overrides = {}) {
  const {title, unit} = TERMS[named];
  const name = named.split(".")[1];
  const format = overrides.format ?? FORMATS[unit] ?? figure;
  return {name, title, term: named, format, value: (row) => format(row[name]), number: true, ...overrides};
}

/** Meaning and formula of a name, for an attribute. */
export const explained = (name) => (TERMS[name] ? [TERMS[name].text, TERMS[name].formula].filter(Boolean).join(" ") : null);

/** Open a bubble for each explained name of the document from now on. */
export function startHelp() {
  const bubble = h("div.bubble", {id: "help", popover: "auto", role: "dialog"});
  document.body.append(bubble);
  let timer = 0;
  let isPinned = false; // by a click: it stays when the pointer leaves
  const named = ({target}) => target.closest?.(".term");
  const show = (button) => {
    draw(bubble, button.dataset.term);
    if (!bubble.matches(":popover-open")) bubble.showPopover();
    place(bubble, button.getBoundingClientRect());
  };
  document.addEventListener("pointerover", (event) => {
    clearTimeout(timer);
    const button = named(event);
    if (button && event.pointerType === "mouse") timer = setTimeout(() => show(button), DELAY);
    else if (!isPinned && !bubble.contains(event.target)) timer = setTimeout(() => bubble.hidePopover(), DELAY);
  });
  document.addEventListener("click", (event) => {
    const button = named(event);
    isPinned = Boolean(button);
    if (button) show(button);
  });
  bubble.addEventListener("toggle", ({newState}) => {
    if (newState === "closed") isPinned = false;
  });
  addEventListener("hashchange", () => bubble.hidePopover());
}

function draw(bubble, name) {
  const {title, text, formula, docs} = TERMS[name];
  bubble.setAttribute("aria-label", title);
  fill(bubble, h("b", title), h("p", text), formula && h("p", h("code", formula)),
    h("p.quiet", h("a", {href: address("glossary", {term: name})}, "All terms"), docs && ` · more in docs/${docs}`));
}

/** Place the bubble below a name, or above it if there is no room below; always within the window. */
function place(bubble, {left, top, bottom}) {
  const {width, height} = bubble.getBoundingClientRect();
  const isBelow = bottom + height + 2 * EDGE < innerHeight;
  bubble.style.left = `${Math.max(EDGE, Math.min(left, innerWidth - width - EDGE))}px`;
  bubble.style.top = `${isBelow ? bottom + EDGE : Math.max(EDGE, top - height - EDGE)}px`;
}
