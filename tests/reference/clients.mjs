// The server as the JavaScript packages of OpenAI and Vercel meet it.
//
//     node clients.mjs PROGRAM MODEL PACKAGES    # the folder that has node_modules with openai, ai,
//                                                # @ai-sdk/openai, @ai-sdk/openai-compatible and zod

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { resolve as path } from "node:path";
import { createInterface } from "node:readline";

const [program, model, packages] = process.argv.slice(2);
const require = createRequire(path(packages, "package.json"));
const { z } = require("zod");

// No other members may follow: this model never ends them.
const Pet = z.strictObject({ name: z.string().max(8), legs: z.int().min(0).max(8) });
const SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 8 }, legs: { type: "integer", minimum: 0, maximum: 8 } },
  required: ["name", "legs"],
  additionalProperties: false,
};
const HELLO = [{ role: "user", content: "Hello" }];

async function all(stream) {
  const pieces = [];
  for await (const piece of stream) pieces.push(piece);
  return pieces;
}

/** `openai`. */
async function checkOpenai(baseURL) {
  const { default: OpenAI } = require("openai");
  const { zodResponseFormat } = require("openai/helpers/zod");
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  assert.deepEqual((await all(await client.models.list())).map((one) => one.id), ["tiny", "gpt-4o-mini"]);

  const asked = { model: "tiny", messages: HELLO, max_tokens: 8, seed: 5 };
  const chat = await client.chat.completions.create(asked);
  const said = chat.choices[0].message.content;
  assert.equal(chat.usage.completion_tokens, 8);
  assert.equal(chat.choices[0].finish_reason, "length");
  const options = { stream: true, stream_options: { include_usage: true } };
  const pieces = await all(await client.chat.completions.create({ ...asked, ...options }));
  assert.equal(pieces.map((piece) => piece.choices[0]?.delta.content ?? "").join(""), said);
  assert.equal(pieces.at(-1).usage.completion_tokens, 8);
  const stream = client.chat.completions.stream(asked);
  assert.equal(await stream.finalContent(), said);
  const text = await client.completions.create({ model: "tiny", prompt: ["Once", "The dog"], max_tokens: 4 });
  assert.deepEqual(text.choices.map((choice) => choice.index), [0, 1]);

  const long = { ...asked, max_tokens: 200 };
  const response_format = zodResponseFormat(Pet, "pet");
  const parsed = (await client.chat.completions.parse({ ...long, response_format })).choices[0].message.parsed;
  assert.deepEqual(Pet.parse(parsed), parsed);

  // A function is called, and the answer to what it returned follows.
  const adopt = { type: "function", function: { name: "adopt", strict: true, parameters: SCHEMA } };
  const calling = { ...long, tools: [adopt], tool_choice: "required", parallel_tool_calls: false };
  const called = (await client.chat.completions.create(calling)).choices[0];
  assert.equal(called.finish_reason, "tool_calls");
  const [call] = called.message.tool_calls;
  Pet.parse(JSON.parse(call.function.arguments));
  const streamed = await client.chat.completions.stream(calling).finalChatCompletion();
  assert.deepEqual(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);
  const result = { role: "tool", tool_call_id: call.id, content: "Done." };
  const messages = [...HELLO, called.message, result];
  const after = await client.chat.completions.create({ ...asked, messages, tools: [adopt], tool_choice: "none" });
  assert.ok(after.choices[0].message.content);

  // Numbers come in base64 unless the client is told otherwise, and it turns them into a list.
  const input = ["Once upon a time", "The dog"];
  const vectors = (await client.embeddings.create({ model: "tiny", input })).data.map((one) => one.embedding);
  const plain = await client.embeddings.create({ model: "tiny", input, encoding_format: "float" });
  assert.equal(vectors.length, 2);
  plain.data.forEach(({ embedding }, at) => {
    assert.equal(embedding.length, vectors[at].length);
    embedding.forEach((x, i) => assert.ok(Math.abs(x - vectors[at][i]) < 1e-6));
  });

  // The other form of answers repeats what was asked.
  const tool = { type: "function", name: "adopt", strict: true, parameters: SCHEMA };
  const wanted = { model: "tiny", input: "Hello", max_output_tokens: 200, temperature: 0.7 };
  const choice = { tools: [tool], tool_choice: "required", parallel_tool_calls: false };
  const response = await client.responses.create({ ...wanted, ...choice });
  assert.equal(response.output[0].type, "function_call");
  assert.deepEqual(response.tools, [tool]);
  assert.deepEqual([response.tool_choice, response.temperature], ["required", 0.7]);

  for (const [wrong, param] of [
    [{ tools: [{ type: "web_search" }] }, "tools"],
    [{ temperature: -1 }, "temperature"],
    [{ speed: 1 }, "speed"],
  ]) {
    await assert.rejects(client.chat.completions.create({ ...asked, ...wrong }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError, String(error));
      assert.equal(error.param, param);
      return true;
    });
  }
}

/** `ai` with a provider's model: texts, streams, objects and tools. */
async function checkAi(model) {
  const { generateObject, generateText, stepCountIs, streamObject, streamText, tool } = require("ai");
  const asked = { model, prompt: "Hello", maxOutputTokens: 8, temperature: 0, maxRetries: 0 };
  const whole = await generateText(asked);
  assert.ok(whole.text);
  assert.equal(whole.finishReason, "length");
  assert.equal(whole.usage.outputTokens, 8);
  const stream = streamText({ ...asked, onError: ({ error }) => { throw error; } });
  assert.equal((await all(stream.textStream)).join(""), whole.text);
  assert.equal(await stream.finishReason, "length");
  assert.equal((await stream.usage).outputTokens, 8);

  const long = { ...asked, maxOutputTokens: 200 };
  const { object } = await generateObject({ ...long, schema: Pet });
  assert.deepEqual(Pet.parse(object), object);
  const partial = streamObject({ ...long, schema: Pet, onError: ({ error }) => { throw error; } });
  assert.ok((await all(partial.partialObjectStream)).length > 1);
  assert.deepEqual(await partial.object, object);

  // A tool is called and what it returns goes back, in one request and as a stream.
  const got = [];
  const execute = async (pet) => {
    got.push(Pet.parse(pet));
    return { done: true };
  };
  const tools = { adopt: tool({ description: "Adopts a pet.", inputSchema: Pet, strict: true, execute }) };
  // One call of an answer: each provider has a name of its own for that.
  const one = { fracbit: { parallel_tool_calls: false }, openai: { parallelToolCalls: false } };
  const calling = { ...long, tools, providerOptions: one };
  const called = await generateText({
    ...calling,
    stopWhen: stepCountIs(2),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  });
  assert.equal(called.steps.length, 2);
  assert.equal(called.steps[0].finishReason, "tool-calls");
  assert.equal(called.steps[0].toolCalls[0].toolName, "adopt");
  assert.ok(called.text);
  const streamed = streamText({ ...calling, toolChoice: "required", onError: ({ error }) => { throw error; } });
  const kinds = new Set((await all(streamed.fullStream)).map((part) => part.type));
  for (const kind of ["tool-input-start", "tool-input-delta", "tool-call", "tool-result"]) {
    assert.ok(kinds.has(kind), `${kind} in ${[...kinds]}`);
  }
  assert.deepEqual(got[0], got.at(-1));
}

/** The providers of `ai`, and what they refuse. */
async function checkProviders(baseURL) {
  const { APICallError, embedMany, generateText } = require("ai");
  const { createOpenAI } = require("@ai-sdk/openai");
  const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  const compatible = createOpenAICompatible({
    name: "fracbit", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
  });
  for (const model of [compatible("tiny"), openai.chat("tiny"), openai("tiny")]) {
    try {
      await checkAi(model);
    } catch (error) {
      throw new Error(`${model.provider}: ${error?.responseBody ?? ""}`, { cause: error });
    }
  }
  for (const model of [compatible.textEmbeddingModel("tiny"), openai.textEmbeddingModel("tiny")]) {
    const { embeddings, usage } = await embedMany({ model, values: ["Once upon a time", "The dog"] });
    assert.equal(embeddings.length, 2);
    assert.ok(embeddings[0].length > 8 && usage.tokens > 2);
  }
  const wrong = generateText({ model: compatible("other"), prompt: "Hello", maxRetries: 0 });
  await assert.rejects(wrong, (error) => APICallError.isInstance(error) && error.statusCode === 404);
}

const command = ["serve", model, "--port", "0", "--name", "tiny", "--alias", "gpt-4o-mini"];
const serving = spawn(program, command, { stdio: ["ignore", "pipe", "inherit"] });
const ended = new Promise((resolve) => serving.on("exit", resolve));
try {
  const lines = createInterface({ input: serving.stdout });
  const first = await lines[Symbol.asyncIterator]().next();
  const base = first.value.trim().replace("serving at ", "");
  await checkOpenai(base);
  await checkProviders(base);
} finally {
  serving.kill("SIGTERM");
}
assert.equal(await ended, 0);
