// `@anthropic-ai/sdk`: messages, the stream helper, a tool loop by hand and its tool runner.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import * as z from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "x", maxRetries: 0 });
// Above 21,333 tokens it refuses to wait for a whole answer.
const ask = (content) => ({ model: "tiny", max_tokens: 20000, messages: [{ role: "user", content }] });
const weather = {
  name: "weather",
  description: "The weather of a town",
  input_schema: { type: "object", properties: { town: { type: "string" } }, required: ["town"] },
};
const words = (message) =>
  message.content.map((block) => block.text ?? block.thinking ?? block.input).filter(Boolean);
const found = {};

const plain = await client.messages.create({ ...ask("hello"), system: "Be brief." });
found.plain = { words: words(plain), stop: plain.stop_reason, types: plain.content.map((b) => b.type) };
found.usage = plain.usage;

const raw = await client.messages.create({ ...ask("hello"), stream: true });
found.raw = [];
for await (const event of raw) found.raw.push(event.type);

const helper = client.messages.stream(ask("hello"));
found.helper = { text: "", thinking: "" };
helper.on("text", (piece) => (found.helper.text += piece));
helper.on("thinking", (piece) => (found.helper.thinking += piece));
found.helper.final = words(await helper.finalMessage());

found.count = await client.messages.countTokens({
  model: "tiny",
  system: "Be brief.",
  messages: [{ role: "user", content: "hello" }],
});

// ------------------------------------------------------------------------------------ tool loop

const messages = [{ role: "user", content: "What is the weather in two towns?" }];
found.loop = { asked: [], stops: [] };
for (let turn = 0; turn < 4; turn++) {
  const events = client.messages.stream({ model: "tiny", max_tokens: 64000, messages, tools: [weather] });
  const pieces = [];
  events.on("inputJson", (piece) => pieces.push(piece));
  const answer = await events.finalMessage();
  found.loop.stops.push(answer.stop_reason);
  found.loop.final = words(answer);
  messages.push({ role: "assistant", content: answer.content });
  const uses = answer.content.filter((block) => block.type === "tool_use");
  if (!uses.length) break;
  found.loop.pieces = pieces.length;
  found.loop.asked.push(...uses.map((use) => use.input.town));
  messages.push({
    role: "user",
    content: uses.map((use, n) => ({
      type: "tool_result",
      tool_use_id: use.id,
      content: n ? "mild" : [{ type: "text", text: "mild" }],
    })),
  });
}

for (const stream of [false, true]) {
  const asked = [];
  const runner = client.beta.messages.toolRunner({
    ...ask("What is the weather in two towns?"),
    stream,
    tools: [
      betaZodTool({
        name: "weather",
        description: "The weather of a town",
        inputSchema: z.object({ town: z.string() }),
        run: ({ town }) => (asked.push(town), "mild"),
      }),
    ],
  });
  found[stream ? "runner stream" : "runner"] = { final: words(await runner.runUntilDone()), asked };
}

const left = client.messages.stream(ask("hello"));
for await (const event of left) if (event.type === "content_block_delta") break;

// --------------------------------------------------------------------------------------- errors

const failure = (promise) =>
  promise.then(
    () => null,
    (error) => [error.constructor.name, error.status, error.error?.error?.type, !!error.requestID],
  );
const image = { type: "image", source: { type: "base64", media_type: "image/png", data: "AA==" } };
found.errors = [
  await failure(client.messages.create({ ...ask("hello"), temperature: "hot" })),
  await failure(client.messages.create(ask([image]))),
  await failure(client.messages.create({ ...ask("hello"), messages: [] })),
];

console.log(JSON.stringify(found));
