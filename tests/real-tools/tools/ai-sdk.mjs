// The AI SDK with three providers: chat, responses and messages.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { MODEL, OPENAI_API_KEY: apiKey, OPENAI_BASE_URL: baseURL } = process.env;
const compatible = createOpenAICompatible({ name: "tidemill", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const models = {
    chat: compatible(MODEL),
    responses: createOpenAI({ baseURL, apiKey }).responses(MODEL),
    messages: createAnthropic({ baseURL, apiKey })(MODEL),
};
const person = z.object({ name: z.string(), age: z.number().int(), mood: z.enum(["good", "bad"]) });
const getWeather = tool({
    description: "The weather in a city, now.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `It is sunny in ${city}, 12 degrees.`,
});
const ask = { maxOutputTokens: 100, temperature: 0, maxRetries: 0 };
const seen = [];
for (const [name, model] of Object.entries(models)) {
    const stream = streamText({ model, prompt: "Say hello.", ...ask, onError: ({ error }) => { throw error; } });
    assert.ok((await stream.text).length > 0);
    assert.ok((await stream.usage).outputTokens > 0, name);
    const { output } = await generateText({ model, prompt: "Ada is 36 and in a good mood.", output: Output.object({ schema: person }), ...ask });
    person.parse(output);
    const steps = (await generateText({
        model,
        prompt: "What is the weather in Oslo?",
        tools: { getWeather },
        toolChoice: "required",
        prepareStep: ({ stepNumber }) => (stepNumber > 0 ? { toolChoice: "none" } : {}),
        stopWhen: stepCountIs(2),
        ...ask,
    })).steps;
    const [call] = steps[0].toolCalls;
    assert.deepEqual([steps.length, call.toolName, Object.keys(call.input)], [2, "getWeather", ["city"]]);
    assert.ok(steps[0].toolResults[0].output.startsWith("It is sunny"));
    seen.push(`${name}: ${JSON.stringify(call.input)}, ${JSON.stringify(output)}`);
}
const { embeddings } = await embedMany({ model: compatible.embeddingModel("embedder"), values: ["the sea", "a boat"], maxRetries: 0 });
assert.equal(embeddings.length, 2);
console.log(seen.join("; "));
