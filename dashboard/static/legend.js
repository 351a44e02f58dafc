// The legend of a chart: a button for each line with its colour and the value that is pointed at. A line goes and comes by it.
import {fill, h, say} from "./dom.js";

/** {element, hidden, set(lines), tell(values)}; `change(name, isShown)` is called when somebody lets a line go or come. */
export function legendOf(change) {
  const element = h("div.legend");
  const hidden = new Set();
  let values = [];
  const toggle = (button, name) => {
    const isShown = hidden.delete(name);
    if (!isShown) hidden.add(name);
    button.setAttribute("aria-pressed", String(isShown));
    change(name, isShown);
  };
  const entry = ({name, tint}) => {
    const swatch = h("span.swatch");
    swatch.style.background = tint;
    const value = h("b");
    const button = h("button", {type: "button", "aria-pressed": String(!hidden.has(name)), title: "Hide or show", click: () => toggle(button, name)},
      swatch, h("span", name), value);
    return {button, value};
  };
  return {
    element,
    hidden,
    set(lines) {
      const made = lines.map(entry);
      values = made.map(({value}) => value);
      fill(element, made.map(({button}) => button));
    },
    tell(texts) {
      texts.forEach((text, at) => values[at] && say(values[at], text));
    },
  };
}
