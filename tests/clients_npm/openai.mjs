// The `openai` package: chat, its tool runner, responses, completions, errors. Prints what it got.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "x", maxRetries: 0 });
const model = "tiny";
const ask = (content) => ({ model, messages: [{ role: "user", content }] });
const schema = { type: "object", properties: { town: { type: "string" } }, required: ["town"] };
const found = {};

found.models = [];
for await (const each of client.models.list()) found.models.push(each.id);
found.model = (await client.models.retrieve(found.models[0])).id;

// ---------------------------------------------------------------------------------------- chat

const plain = await client.chat.completions.create(ask("hello"));
found.chat = { ...plain.choices[0].message, finish: plain.choices[0].finish_reason, usage: plain.usage };

const stream = await client.chat.completions.create({
  ...ask("hello"),
  stream: true,
  stream_options: { include_usage: true },
});
found.stream = { text: "", reasoning: "", finish: [], usage: [] };
for await (const chunk of stream) {
  const choice = chunk.choices[0];
  found.stream.text += choice?.delta.content ?? "";
  found.stream.reasoning += choice?.delta.reasoning ?? "";
  if (choice?.finish_reason) found.stream.finish.push(choice.finish_reason);
  if (chunk.usage) found.stream.usage.push(chunk.usage);
}

const helper = client.chat.completions.stream(ask("hello"));
const snapshots = [];
helper.on("content", (_, snapshot) => snapshots.push(snapshot));
found.helper = { final: await helper.finalContent(), last: snapshots.at(-1), many: snapshots.length > 1 };

for (const streams of [false, true]) {
  const asked = [];
  const runner = client.chat.completions.runTools({
    ...ask("What is the weather in two towns?"),
    stream: streams,
    tools: [
      {
        type: "function",
        function: {
          name: "weather",
          description: "The weather of a town",
          parameters: schema,
          parse: JSON.parse,
          function: ({ town }) => (asked.push(town), { town, sky: "mild" }),
        },
      },
    ],
  });
  found[streams ? "runTools stream" : "runTools"] = {
    final: await runner.finalContent(),
    asked,
    roles: runner.messages.map((message) => message.role),
    total: (await runner.totalUsage()).completion_tokens,
  };
}

const left = await client.chat.completions.create({ ...ask("hello"), stream: true });
for await (const _ of left) break; // closes the connection in mid-stream

// ----------------------------------------------------------------------------------- responses

const first = await client.responses.create({ model, input: "hello", instructions: "Be brief." });
const second = await client.responses.create({
  model,
  input: "and now?",
  previous_response_id: first.id,
});
const items = [];
for await (const item of client.responses.inputItems.list(second.id, { order: "asc" })) items.push(item.type);
found.responses = {
  text: first.output_text,
  types: first.output.map((item) => item.type),
  again: (await client.responses.retrieve(first.id)).output_text,
  items,
};
await client.responses.delete(first.id);

const tools = [{ type: "function", name: "weather", parameters: schema, strict: false }];
const input = [{ role: "user", content: "What is the weather in two towns?" }];
found["responses loop"] = { asked: [], turns: 0 };
for (let turn = 0; turn < 4; turn++) {
  const events = client.responses.stream({ model, input, tools });
  const kinds = [];
  for await (const event of events) kinds.push(event.type);
  const answer = await events.finalResponse();
  found["responses loop"].turns += 1;
  found["responses loop"].text = answer.output_text;
  found["responses loop"].ends = [kinds[0], kinds.at(-1)];
  input.push(...answer.output);
  const calls = answer.output.filter((item) => item.type === "function_call");
  if (!calls.length) break;
  for (const { call_id, arguments: text } of calls) {
    found["responses loop"].asked.push(JSON.parse(text).town);
    input.push({ type: "function_call_output", call_id, output: "mild" });
  }
}

// --------------------------------------------------------------------------------- completions

const completion = await client.completions.create({ model, prompt: ["one", "two"], max_tokens: 50 });
found.completions = completion.choices.map((choice) => [choice.index, choice.text]);
found["completions stream"] = "";
for await (const chunk of await client.completions.create({ model, prompt: "one", stream: true })) {
  found["completions stream"] += chunk.choices[0]?.text ?? "";
}

// -------------------------------------------------------------------------------------- errors

const failure = (promise) =>
  promise.then(
    () => null,
    (error) => [error.constructor.name, error.status, error.param, error.type],
  );
found.errors = [
  await failure(client.chat.completions.create({ ...ask("hello"), temperature: "hot" })),
  await failure(client.models.retrieve("unknown")),
  await failure(client.responses.retrieve("resp_0")),
  await failure(client.responses.create({ model, input: [{ role: "nobody", content: "a" }] })),
];

console.log(JSON.stringify(found));
