// Names that explain themselves: a dotted line below a name, and a bubble with what it means, by pointer, touch or keyboard.
import {fill, h} from "./dom.js";
import {ago, bytes, count, duration, figure, share} from "./format.js";
import {address} from "./router.js";
import {TERMS} from "./terms.js";

const DELAY = 350; // ms that a pointer rests on a name before its bubble comes
const EDGE = 8; // px between a bubble and the window's edge

/** A name that explains itself; `text` where it is called otherwise here. Without an entry in TERMS it is text. */
export function term(name, text = TERMS[name]?.title ?? name) {
  return TERMS[name] ? h("button.term", {type: "button", "data-term": name, "aria-haspopup": "dialog"}, text) : text;
}

const FORMATS = {bytes, count, share, s: duration, ago: (time) => ago(time, Date.now() / 1000)};

/** A column of a table for a figure of its rows, "TableRow.held_bytes": {name, title, term, format, value, number} and what is given beside. */
export function column(named, given = {}) {
  const {title, unit} = TERMS[named];
  const name = named.split(".")[1];
  const format = given.format ?? FORMATS[unit] ?? figure;
  return {name, title, term: named, format, value: (row) => format(row[name]), number: true, ...given};
}

/** Sentences about a name, for an attribute. */
export const explained = (name) => (TERMS[name] ? [TERMS[name].text, TERMS[name].formula].filter(Boolean).join(" ") : null);

/** From now on every name in the document has its bubble. */
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

/** Below a name, or above it where there is no room; always within the window. */
function place(bubble, {left, top, bottom}) {
  const {width, height} = bubble.getBoundingClientRect();
  const isBelow = bottom + height + 2 * EDGE < innerHeight;
  bubble.style.left = `${Math.max(EDGE, Math.min(left, innerWidth - width - EDGE))}px`;
  bubble.style.top = `${isBelow ? bottom + EDGE : Math.max(EDGE, top - height - EDGE)}px`;
}
