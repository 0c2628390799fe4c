// Makes and finds elements. Text enters the page only as text nodes, here and nowhere else.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (`on*` are listeners) and children; strings become text nodes, null is left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** What this tab remembers; nothing where the browser forbids it. */
export const memory = {
  get(name, storage = "sessionStorage") {
    try {
      return window[storage].getItem(`pegainfer.${name}`) ?? "";
    } catch {
      return "";
    }
  },
  set(name, value, storage = "sessionStorage") {
    try {
      window[storage].setItem(`pegainfer.${name}`, value);
    } catch {
      // a browser that keeps nothing still works
    }
  },
};

const number = new Intl.NumberFormat("en");
export const count = (value) => number.format(value);
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`;
export const rate = (value) => (value >= 100 ? count(Math.round(value)) : value.toFixed(1));
export const seconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`);
