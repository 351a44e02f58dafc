// Elements from values. Text is always set as text, so that data from actors is never markup.

/** An element: h("p.quiet", {title: "..."}, "text", child, [children]). Functions are listeners; null is left out. */
export function h(kind, ...rest) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag || "div");
  if (classes.length) element.className = classes.join(" ");
  if (isAttributes(rest[0])) setAll(element, rest.shift());
  element.append(...rest.flat(3).filter(isShown));
  return element;
}

/** An element of SVG, with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  setAll(element, attributes);
  element.append(...children);
  return element;
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(3).filter(isShown));
  return element;
}

/** Like fill, but equal children stay, with a selection, the focus and the scroll position. */
export function patch(element, ...children) {
  const wanted = document.createElement("div");
  fill(wanted, ...children);
  patchChildren(element, wanted);
}

function patchChildren(element, wanted) {
  const fresh = [...wanted.childNodes];
  while (element.childNodes.length > fresh.length) element.lastChild.remove();
  fresh.forEach((node, index) => {
    const old = element.childNodes[index];
    if (!old) element.append(node);
    else if (old.nodeName !== node.nodeName) old.replaceWith(node);
    else patchNode(old, node);
  });
}

function patchNode(old, node) {
  if (old.nodeType === Node.TEXT_NODE) return say(old, node.textContent);
  const isUnfolded = old.nodeName === "DETAILS" && old.open; // by the reader
  for (const {name} of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
  for (const {name, value} of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (isUnfolded) old.open = true;
  patchChildren(old, node);
}

/** Change a text only if it differs, so that a selection stays and no layout is needed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function isAttributes(value) {
  return value !== null && typeof value === "object" && !(value instanceof Node) && !Array.isArray(value);
}

function isShown(child) {
  return child !== null && child !== undefined && child !== false;
}

function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
}
