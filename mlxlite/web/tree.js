// The messages of a chat as a tree: each has a parent, a branch runs from a root to a leaf.
//
// messages: Map from key to {key, parent, …} in the order of their making. Pure.

/** The messages from the root to `leaf`, which may be null. */
export function branch(messages, leaf) {
  const found = [];
  for (let key = leaf; key !== null && messages.has(key); key = messages.get(key).parent) {
    found.push(messages.get(key));
    if (found.length > messages.size) break; // a circle, which no server should send
  }
  return found.reverse();
}

/** The messages that share a parent with this one, itself among them, oldest first. */
export function siblings(messages, message) {
  return [...messages.values()].filter((other) => other.parent === message.parent);
}

/** The leaf below a message, always along the newest child. */
export function newestLeaf(messages, key) {
  const newest = new Map();
  for (const message of messages.values()) newest.set(message.parent, message.key);
  while (newest.has(key)) key = newest.get(key);
  return key;
}
