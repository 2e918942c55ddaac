// Dialogs and short messages. The browser's own <dialog> keeps the focus inside and gives it back.

import { at, button, freshId, h } from "./dom.js";
import { iconButton } from "./icons.js";

export const TITLE_CHARS = 80; // of a chat; the server takes no longer one

/** Opens a dialog; resolves to what `close(value)` was given, or to null.
 * fill(close): the content. kind: a class, such as "sheet". */
export function dialog(title, fill, kind = "") {
  return new Promise((resolve) => {
    let answer = null;
    const close = (value) => {
      answer = value ?? null;
      element.close();
    };
    const name = freshId("dialog");
    const element = h("dialog", { class: `dialog ${kind}`, "aria-labelledby": name },
      h("div", { class: "dialog-head" },
        h("h2", { id: name }, title),
        iconButton("close", "Close", () => close())));
    element.append(...[fill(close)].flat());
    element.addEventListener("close", () => {
      element.remove();
      resolve(answer);
    });
    element.addEventListener("mousedown", (event) => event.target === element && close());
    document.body.append(element);
    element.showModal();
  });
}

/** Asks for a yes; resolves to true or false. */
export async function confirm(title, text, yes, isDangerous = false) {
  const answer = await dialog(title, (close) => [
    h("p", {}, text),
    h("div", { class: "row end" },
      button("Cancel", () => close()), button(yes, () => close(true), isDangerous ? "danger" : "primary")),
  ]);
  return answer === true;
}

/** Asks for a line of text; resolves to it or to null. */
export function ask(title, label, { value = "", type = "text", yes = "Save", note = null, most = 4096 } = {}) {
  return dialog(title, (close) => {
    const id = freshId("ask");
    const field = h("input", { id, type, value, autocomplete: "off", autofocus: true, maxlength: most });
    return h("form", { onsubmit: (event) => { event.preventDefault(); close(field.value.trim() || null); } },
      note && h("p", { class: "muted" }, note),
      h("div", { class: "field" }, h("label", { htmlFor: id }, label), field),
      h("div", { class: "row end" },
        button("Cancel", () => close()),
        h("button", { type: "submit", class: "button primary" }, yes)));
  });
}

/** A message at the edge of the page, gone after a while. act: {label, do} for a button in it. */
export function toast(text, act = null, wait_ms = 6000) {
  let timer = 0;
  const leave = () => {
    clearTimeout(timer);
    element.remove();
  };
  const element = h("div", { class: "toast" }, h("span", {}, text),
    act && button(act.label, () => { leave(); act.do(); }), iconButton("close", "Dismiss", leave, { kind: "small" }));
  const begin = () => (timer = setTimeout(leave, wait_ms));
  // It waits for who is about to use it.
  element.addEventListener("pointerenter", () => clearTimeout(timer));
  element.addEventListener("focusin", () => clearTimeout(timer));
  element.addEventListener("pointerleave", begin);
  element.addEventListener("focusout", begin);
  at("toasts").append(element);
  begin();
  return leave;
}

/** An error as a message at the edge. */
export const tell = (error) => toast(error.message ?? String(error), null, 10_000);
