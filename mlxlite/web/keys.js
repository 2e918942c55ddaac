// Keyboard shortcuts. Single letters count only outside of fields, and can be switched off in the
// dialog that lists them (WCAG 2.1.4).

import { dialog } from "./dialogs.js";
import { h } from "./dom.js";

const SWITCH = "mlxlite-keys";

// key, what it does, as shown; the order is that of the dialog
const KEYS = [
  ["n", "new", "New chat"],
  ["i", "focus", "Write a message"],
  ["e", "editLast", "Edit your last message"],
  ["s", "settings", "Settings of this chat"],
  ["/", "search", "Search all chats"],
  ["[", "previous", "Chat above in the list"],
  ["]", "next", "Chat below in the list"],
  ["?", "help", "This list"],
];

// What fields and buttons do by themselves, to be listed too.
const OTHERS = [
  ["Enter", "Send"],
  ["Shift Enter", "New line"],
  ["↑", "In an empty field: edit your last message"],
  ["Esc", "Stop the answer; leave a field; close a dialog"],
  ["Ctrl Enter", "While editing: send as a new branch"],
];

const isOn = () => localStorage.getItem(SWITCH) !== "off";

/** acts: what each name above does, and `stop`: true if there was something to stop. */
export function listen(acts) {
  addEventListener("keydown", (event) => {
    if (event.isComposing || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (event.key === "Escape") {
      if (acts.stop()) event.preventDefault();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || isField(event.target) || !isOn()) return;
    const found = KEYS.find(([key]) => key === event.key);
    if (!found) return;
    event.preventDefault();
    acts[found[1]]();
  });
}

const isField = (element) => element.matches?.("input, textarea, select, [contenteditable]");

export function showHelp() {
  const row = (keys, does) => {
    const shown = keys.split(" ").map((key) => h("kbd", {}, key));
    return h("tr", {}, h("td", {}, ...shown), h("td", {}, does));
  };
  const head = h("tr", {}, h("th", { scope: "col" }, "Key"), h("th", { scope: "col" }, "Does"));
  const rows = [...KEYS.map(([key, , does]) => row(key, does)), ...OTHERS.map(([keys, does]) => row(keys, does))];
  dialog("Keyboard shortcuts", () => {
    const keep = () => localStorage.setItem(SWITCH, box.checked ? "on" : "off");
    const box = h("input", { type: "checkbox", id: "keys-on", checked: isOn(), onchange: keep });
    return [
      h("table", { class: "keys" }, h("thead", { class: "unseen" }, head), h("tbody", {}, ...rows)),
      h("p", { class: "check" }, box, h("label", { htmlFor: "keys-on" }, "Single letters are shortcuts")),
    ];
  });
}
