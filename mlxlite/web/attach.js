// Text files that go with a message: read here, put into its text, and found there again.
//
//   [file: notes.txt]
//   ```
//   …
//   ```
//
// The fence is longer than any in the file, so nothing in a file ends it.

export const MOST_BYTES = 256_000; // of one file
export const MOST_TOTAL = 1_000_000;

/** A File as {name, text}. Raises an Error that says what is wrong with it. */
export async function readText(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`${file.name} has ${Math.ceil(file.size / 1000)} kB; a file may have ${MOST_BYTES / 1000} kB.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no UTF-8 text.`);
  }
  if (text.includes("\u0000")) throw new Error(`${file.name} is no text file.`);
  return { name: file.name.replace(/[\]\r\n]/g, "_"), text };
}

/** The content of a message: files first, then what was typed. */
export function join(files, typed) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/^`{3,}/gm)].map((run) => run[0].length));
    const fence = "`".repeat(longest + 1);
    return `[file: ${name}]\n${fence}\n${text.endsWith("\n") ? text : `${text}\n`}${fence}\n\n`;
  });
  return parts.join("") + typed;
}

const FILE = /^\[file: ([^\]\n]+)\]\n(`{3,})\n([\s\S]*?\n)\2\n\n/;

/** The reverse of `join`, for showing: {files, typed}. */
export function split(content) {
  const files = [];
  let typed = content;
  for (let found = FILE.exec(typed); found; found = FILE.exec(typed)) {
    files.push({ name: found[1], text: found[3] });
    typed = typed.slice(found[0].length);
  }
  return { files, typed };
}
