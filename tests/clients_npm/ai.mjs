// Vercel's `ai` with its three providers: text and tools, plain and streamed, one after the other.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = `${process.argv[2]}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "x" });
const models = {
  chat: openai.chat("tiny"),
  responses: openai.responses("tiny"),
  anthropic: createAnthropic({ baseURL, apiKey: "x" })("tiny"),
  compatible: createOpenAICompatible({ name: "mlxlite", baseURL, includeUsage: true })("tiny"),
};
const system = "Be brief.";
const question = "What is the weather in two towns?";
const found = {};

for (const [name, model] of Object.entries(models)) {
  const options = { model, system, maxRetries: 0 };
  const plain = await generateText({ ...options, prompt: "hello" });
  const streamed = streamText({ ...options, prompt: "hello", onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  found[name] = {
    plain: plain.text,
    reasoning: plain.reasoningText ?? null,
    finish: plain.finishReason,
    usage: plain.usage,
    streamed: text,
    "streamed reasoning": (await streamed.reasoningText) ?? null,
    "streamed finish": await streamed.finishReason,
    "streamed usage": await streamed.usage,
    warnings: plain.warnings ?? [],
  };
  for (const run of [generateText, streamText]) {
    const asked = [];
    const result = await run({
      ...options,
      prompt: question,
      stopWhen: stepCountIs(4),
      tools: {
        weather: tool({
          description: "The weather of a town",
          inputSchema: z.object({ town: z.string() }),
          execute: async ({ town }) => (asked.push(town), { town, sky: "mild" }),
        }),
      },
    });
    const steps = await result.steps;
    found[name][run === generateText ? "tools" : "tools streamed"] = {
      text: await result.text,
      asked,
      finishes: steps.map((step) => step.finishReason),
    };
  }
}

console.log(JSON.stringify(found));
