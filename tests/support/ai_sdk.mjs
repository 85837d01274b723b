// What @ai-sdk/openai-compatible makes of a server, as one line of JSON. Arguments: the base URL.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "local",
  baseURL: process.argv[2],
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const [demo, caller] = [provider("demo"), provider("caller")];
const common = { temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
const prompt = "The capital of France is";

const made = await generateText({ model: demo, prompt, ...common });

const streamed = streamText({ model: demo, prompt, ...common });
const chunks = [];
for await (const chunk of streamed.textStream) chunks.push(chunk);

const asked = [];
const tools = {
  get_weather: tool({
    description: "Weather of a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]), unit: z.string().optional() }),
    execute: async (input) => {
      asked.push(input);
      return "sunny";
    },
  }),
};
const task = { model: caller, prompt: "How is the weather in Paris?", tools, stopWhen: stepCountIs(3), ...common };
const agent = await generateText(task);
const streaming = streamText(task);
const parts = [];
for await (const part of streaming.fullStream) parts.push(part.type);

const City = z.object({ size: z.enum(["small", "large"]), founded: z.union([z.literal(100), z.literal(200)]).nullable() });
const structured = await generateText({ model: demo, prompt: "A city.", output: Output.object({ schema: City }), ...common });

const failed = async (given) => {
  try {
    await generateText({ ...common, ...given });
    return null;
  } catch (error) {
    return APICallError.isInstance(error) ? [error.statusCode, error.message] : [0, String(error)];
  }
};

console.log(
  JSON.stringify({
    text: made.text,
    usage: made.usage.outputTokens,
    chunks,
    streamedUsage: (await streamed.usage).outputTokens,
    asked,
    steps: agent.steps.length,
    answer: agent.text,
    streamedAnswer: await streaming.text,
    parts: [...new Set(parts)],
    structured: structured.output,
    unknown: await failed({ model: provider("other"), prompt }),
    tooLong: await failed({ model: demo, prompt: "word ".repeat(3000) }),
  }),
);
