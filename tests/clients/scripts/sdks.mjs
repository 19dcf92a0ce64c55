// The SDKs of OpenAI, Anthropic and Vercel for Node against a gateway: its URL, a model's name.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, model] = process.argv.slice(2);
const require = createRequire(`${process.env.CLIENTS}/package.json`);
const OpenAI = require("openai").default;
const Anthropic = require("@anthropic-ai/sdk").default;
const { generateText, streamText, tool, jsonSchema } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const messages = [{ role: "user", content: "Hi" }];

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const answer = await openai.chat.completions.create({ model, messages, max_tokens: 5 });
assert.equal(answer.usage.completion_tokens, 5);
let text = "";
for await (const chunk of await openai.chat.completions.create({ model, messages, max_tokens: 5, stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.ok(text);
assert.ok((await openai.models.list()).data.some((card) => card.id === model));
assert.equal((await openai.models.retrieve(model)).id, model);
const response = await openai.responses.create({ model, input: "Hi", max_output_tokens: 20 });
assert.ok(response.output_text);
const events = [];
for await (const event of await openai.responses.create({ model, input: "Hi", max_output_tokens: 5, stream: true })) {
  events.push(event.type);
}
assert.ok(events.includes("response.output_text.delta"));
await assert.rejects(openai.chat.completions.create({ model: "none", messages }), OpenAI.NotFoundError);

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const message = await anthropic.messages.create({ model, max_tokens: 5, messages });
assert.equal(message.usage.output_tokens, 5);
const final = await anthropic.messages.stream({ model, max_tokens: 5, messages }).finalMessage();
assert.equal(final.usage.output_tokens, 5);
assert.ok((await anthropic.messages.countTokens({ model, messages })).input_tokens > 0);
await assert.rejects(anthropic.messages.create({ model: "none", max_tokens: 1, messages }), Anthropic.NotFoundError);

const vercel = createOpenAICompatible({ name: "preble", baseURL: `${url}/v1`, includeUsage: true });
const asked = { model: vercel(model), prompt: "Hi", maxOutputTokens: 5, maxRetries: 0 };
assert.equal((await generateText(asked)).usage.outputTokens, 5);
const streamed = streamText(asked);
let spoken = "";
for await (const piece of streamed.textStream) spoken += piece;
assert.ok(spoken);
assert.equal((await streamed.usage).outputTokens, 5);
await assert.rejects(generateText({ ...asked, model: vercel("none") }), { statusCode: 404 });

const at = { type: "integer", enum: [1, 2] };
const inputSchema = jsonSchema({ type: "object", properties: { at }, required: ["at"] });
const look = { tools: { look: tool({ inputSchema }) }, toolChoice: { type: "tool", toolName: "look" } };
const called = await generateText({ ...asked, maxOutputTokens: 100, ...look });
assert.ok(Number.isInteger(called.toolCalls[0].input.at));
const vectors = await openai.embeddings.create({ model: process.env.EMBEDDING_MODEL, input: ["a", "b"] });
assert.equal(vectors.data.length, 2);
console.log("ok");
