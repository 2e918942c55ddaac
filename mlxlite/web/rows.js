// A list whose rows stay the same elements from one look to the next, so that focus and selection do.

/** Shows `items` in `parent`, one element each. key(item): what tells them apart. make(item): a row,
 * {element, show(item)}. Rows are moved only where their order changed. */
export class Rows {
  #rows = new Map();

  constructor(parent, key, make) {
    this.parent = parent;
    this.key = key;
    this.make = make;
  }

  show(items) {
    const kept = new Map();
    for (const item of items) {
      const key = this.key(item);
      const row = this.#rows.get(key) ?? this.make(item);
      row.show(item);
      kept.set(key, row);
    }
    for (const [key, row] of this.#rows) {
      if (!kept.has(key)) row.element.remove();
    }
    this.#rows = kept;
    let place = this.parent.firstChild;
    for (const row of kept.values()) {
      if (row.element === place) place = place.nextSibling;
      else this.parent.insertBefore(row.element, place);
    }
  }
}

/** Sets a text only if it changed: screen readers say what is set. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
