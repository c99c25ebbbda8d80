// Vercel's `ai` against a scripted server: `python -m tests.clients.scripted`, then `npm test`.

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import {
  APICallError,
  Output,
  embed,
  embedMany,
  generateObject,
  generateText,
  isStepCount,
  jsonSchema,
  streamObject,
  streamText,
  tool,
} from 'ai';
import { z } from 'zod';

globalThis.AI_SDK_LOG_WARNINGS = false;
const URL = process.env.GLLM_URL ?? 'http://127.0.0.1:8471';
const REASONING_URL = process.env.GLLM_REASONING_URL ?? 'http://127.0.0.1:8472';
const NAME = 'fake/model';
const DEFAULT = 'Hello wörld 🎉, how are you?';

function providers(url) {
  const options = { baseURL: `${url}/v1`, apiKey: 'none' };
  const compatible = createOpenAICompatible({
    name: 'gllm', includeUsage: true, supportsStructuredOutputs: true, ...options,
  });
  const openai = createOpenAI(options);
  return {
    compatible: compatible(NAME),
    chat: openai.chat(NAME),
    responses: openai.responses(NAME),
    anthropic: createAnthropic(options)(NAME),
    embeddings: compatible.embeddingModel(NAME),
    completion: compatible.completionModel(NAME),
  };
}

const plain = providers(URL);
const reasoning = providers(REASONING_URL);
const CHATS = ['compatible', 'chat', 'responses', 'anthropic'];
const say = (text) => `Answer exactly: ${text}`;
/** JSON with the spaces that chat templates write. */
function spaced(value) {
  if (Array.isArray(value)) return `[${value.map(spaced).join(', ')}]`;
  if (value === null || typeof value !== 'object') return JSON.stringify(value);
  const members = Object.entries(value).map(([key, one]) => `"${key}": ${spaced(one)}`);
  return `{${members.join(', ')}}`;
}
const call = (name, input) =>
  `<tool_call>\n{"name": "${name}", "arguments": ${spaced(input)}}\n</tool_call>`;
const weather = tool({
  description: 'Get the weather of a city.',
  inputSchema: z.object({ city: z.enum(['Rome', 'Paris']), days: z.int().optional() }),
});
const running = { ...weather, execute: async ({ city }) => `${city} is sunny` };

/** What the model has to write for an object: Anthropic's provider has it called as a tool. */
const written = (name, value) =>
  name === 'anthropic' ? call('json', value) : JSON.stringify(value);

for (const name of CHATS) {
  const model = plain[name];
  const base = { model, maxRetries: 0 };

  test(`${name}: a text`, async () => {
    const result = await generateText({ ...base, prompt: 'Hi' });
    assert.equal(result.text, DEFAULT);
    assert.equal(result.finishReason, 'stop');
    assert.ok(result.usage.inputTokens > 0 && result.usage.outputTokens > 0);
  });

  test(`${name}: a streamed text`, async () => {
    const result = streamText({ ...base, prompt: 'Hi' });
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    assert.equal(pieces.join(''), DEFAULT);
    assert.equal(await result.finishReason, 'stop');
    assert.ok((await result.usage).outputTokens > 0);
  });

  test(`${name}: a system message, a history and settings`, async () => {
    const result = await generateText({
      ...base,
      instructions: 'Be brief.',
      messages: [
        { role: 'user', content: [{ type: 'text', text: 'Hi' }] },
        { role: 'assistant', content: 'Hello.' },
        { role: 'user', content: say('Yes.') },
      ],
      temperature: 0.5,
      maxOutputTokens: 50,
    });
    assert.equal(result.text, 'Yes.');
  });

  test(`${name}: a limit`, async () => {
    const result = await generateText({ ...base, prompt: 'Hi', maxOutputTokens: 4 });
    assert.equal(result.finishReason, 'length');
  });

  test(`${name}: a tool call`, async () => {
    const prompt = say(call('weather', { city: 'Rome', days: 3 }));
    for (const toolChoice of ['auto', 'required', { type: 'tool', toolName: 'weather' }]) {
      const result = await generateText({ ...base, prompt, tools: { weather }, toolChoice });
      assert.deepEqual(result.toolCalls[0].input, { city: 'Rome', days: 3 });
      assert.equal(result.finishReason, 'tool-calls');
    }
  });

  test(`${name}: a streamed tool call`, async () => {
    const prompt = say(call('weather', { city: 'Rome' }));
    const result = streamText({ ...base, prompt, tools: { weather }, toolChoice: 'required' });
    const [made] = await result.toolCalls;
    assert.deepEqual([made.toolName, made.input], ['weather', { city: 'Rome' }]);
  });

  test(`${name}: a tool that runs, and its result`, async () => {
    const result = await generateText({
      ...base,
      prompt: say(call('weather', { city: 'Rome' })),
      tools: { weather: running },
      stopWhen: isStepCount(2),
    });
    assert.equal(result.steps[0].toolResults[0].output, 'Rome is sunny');
    assert.equal(result.steps.length, 2);
  });

  test(`${name}: an object`, async () => {
    const schema = z.object({ name: z.string(), tags: z.array(z.string()).max(2) });
    const value = { name: 'Ann', tags: ['a'] };
    const prompt = say(written(name, value));
    const { output } = await generateText({ ...base, prompt, output: Output.object({ schema }) });
    assert.deepEqual(output, value);
  });

  test(`${name}: a streamed object`, async () => {
    const schema = z.object({ name: z.string() });
    const prompt = say(written(name, { name: 'Ann' }));
    const result = streamText({ ...base, prompt, output: Output.object({ schema }) });
    let last;
    for await (const partial of result.partialOutputStream) last = partial;
    assert.deepEqual(last, { name: 'Ann' });
  });

  test(`${name}: an object or a call`, async () => {
    const output = Output.object({ schema: z.object({ name: z.string() }) });
    const fields = { ...base, tools: { weather }, output };
    const value = written(name, { name: 'Ann' });
    const result = await generateText({ ...fields, prompt: say(value) });
    assert.deepEqual(result.output, { name: 'Ann' });
    const prompt = say(call('weather', { city: 'Rome' }));
    const called = await generateText({ ...fields, prompt });
    assert.deepEqual(called.toolCalls[0].input, { city: 'Rome' });
  });

  test(`${name}: reasoning`, async () => {
    const result = await generateText({
      model: reasoning[name], maxRetries: 0, prompt: say('<think>\nhm\n</think>\nSo.'),
    });
    assert.equal(result.text, 'So.');
    if (name === 'compatible' || name === 'anthropic') assert.equal(result.reasoningText, 'hm');
  });

  test(`${name}: streamed reasoning`, async () => {
    const result = streamText({
      model: reasoning[name], maxRetries: 0, prompt: say('<think>\nhm\n</think>\nSo.'),
    });
    assert.equal(await result.text, 'So.');
    if (name === 'compatible' || name === 'anthropic') {
      assert.equal(await result.reasoningText, 'hm');
    }
  });

  test(`${name}: a prompt that is too long`, async () => {
    await assert.rejects(
      generateText({ ...base, prompt: 'x y '.repeat(3000) }),
      (error) => APICallError.isInstance(error) && /maximum context length/.test(error.message),
    );
  });
}

const SCHEMAS = {
  'a record': [z.object({ r: z.record(z.string(), z.number()) }), { r: { a: 1 } }],
  'a record of given keys': [
    z.object({ r: z.record(z.enum(['x', 'y']), z.number()) }), { r: { x: 1, y: 2 } },
  ],
  'a partial record': [
    z.object({ r: z.partialRecord(z.enum(['x', 'y']), z.number()) }), { r: { x: 1 } },
  ],
  'a record of patterned keys': [
    z.object({ r: z.record(z.string().regex(/^[a-z]+$/), z.boolean()) }), { r: { ab: true } },
  ],
  'a union': [
    z.object({
      u: z.discriminatedUnion('k', [
        z.object({ k: z.literal('a') }), z.object({ k: z.literal('b'), n: z.int() }),
      ]),
    }),
    { u: { k: 'b', n: 1 } },
  ],
  'a tuple': [z.object({ t: z.tuple([z.string(), z.number()]) }), { t: ['a', 1] }],
  'formats': [z.object({ d: z.iso.date(), m: z.email() }), { d: '2026-01-31', m: 'a@b.org' }],
  'multiples and bounds': [
    z.object({ n: z.number().multipleOf(5).min(0).max(50) }), { n: 15 },
  ],
  'null': [z.object({ n: z.nullable(z.string()) }), { n: null }],
  'never': [z.object({ a: z.int(), n: z.never().optional() }), { a: 1 }],
  'an intersection': [
    z.object({ i: z.intersection(z.object({ a: z.int() }), z.object({ b: z.int() })) }),
    { i: { a: 1, b: 2 } },
  ],
};

for (const [kind, [schema, value]] of Object.entries(SCHEMAS)) {
  test(`a schema with ${kind}`, async () => {
    for (const name of ['compatible', 'chat', 'responses', 'anthropic']) {
      const prompt = say(written(name, value));
      const fields = { model: plain[name], maxRetries: 0, prompt };
      const { output } = await generateText({ ...fields, output: Output.object({ schema }) });
      assert.deepEqual(output, value, name);
    }
  });
}

test('an object in the format of Anthropic', async () => {
  const { output } = await generateText({
    model: plain.anthropic,
    maxRetries: 0,
    prompt: say('{"name":"Ann"}'),
    output: Output.object({ schema: z.object({ name: z.string() }) }),
    providerOptions: { anthropic: { structuredOutputMode: 'outputFormat' } },
  });
  assert.deepEqual(output, { name: 'Ann' });
});

test('an array, a choice and any JSON', async () => {
  const base = { model: plain.compatible, maxRetries: 0 };
  const element = z.object({ a: z.int() });
  const array = await generateText({
    ...base, output: Output.array({ element }), prompt: say('{"elements":[{"a":1}]}'),
  });
  assert.deepEqual(array.output, [{ a: 1 }]);
  const choice = await generateText({
    ...base, output: Output.choice({ options: ['yes', 'no'] }), prompt: say('{"result":"no"}'),
  });
  assert.equal(choice.output, 'no');
  const any = await generateText({ ...base, output: Output.json(), prompt: say('{"a":[1]}') });
  assert.deepEqual(any.output, { a: [1] });
});

test('the older generateObject and streamObject', async () => {
  const schema = z.object({ name: z.string() });
  const fields = { model: plain.compatible, maxRetries: 0, schema, prompt: say('{"name":"Ann"}') };
  assert.deepEqual((await generateObject(fields)).object, { name: 'Ann' });
  const streamed = streamObject(fields);
  let last;
  for await (const partial of streamed.partialObjectStream) last = partial;
  assert.deepEqual(last, { name: 'Ann' });
});

test('a schema of JSON Schema with unique items', async () => {
  const schema = jsonSchema({
    type: 'object',
    properties: { s: { type: 'array', items: { enum: ['a', 'b'] }, uniqueItems: true } },
    required: ['s'],
  });
  const { output } = await generateText({
    model: plain.chat,
    maxRetries: 0,
    prompt: say('{"s":["b","a"]}'),
    output: Output.object({ schema }),
  });
  assert.deepEqual(output, { s: ['b', 'a'] });
});

test('a tool whose input is a record', async () => {
  const store = tool({ inputSchema: z.object({ r: z.record(z.string(), z.int()) }) });
  const result = await generateText({
    model: plain.compatible,
    maxRetries: 0,
    prompt: say(call('store', { r: { a: 1 } })),
    tools: { store },
    toolChoice: 'required',
  });
  assert.deepEqual(result.toolCalls[0].input, { r: { a: 1 } });
});

test('reasoning effort', async () => {
  const results = await Promise.all([
    generateText({
      model: plain.compatible, prompt: 'Hi', providerOptions: { gllm: { reasoningEffort: 'high' } },
    }),
    generateText({
      model: plain.chat, prompt: 'Hi',
      providerOptions: { openai: { reasoningEffort: 'low', forceReasoning: true } },
    }),
    generateText({
      model: plain.responses, prompt: 'Hi',
      providerOptions: { openai: { reasoningEffort: 'minimal', forceReasoning: true } },
    }),
    generateText({
      model: plain.anthropic, prompt: 'Hi', providerOptions: { anthropic: { effort: 'medium' } },
    }),
  ]);
  for (const result of results) assert.equal(result.text, DEFAULT);
});

for (const name of CHATS) {
  test(`${name}: a second and a third turn`, async () => {
    const base = { model: plain[name], maxRetries: 0, tools: { weather: running } };
    const messages = [{ role: 'user', content: say(call('weather', { city: 'Rome' })) }];
    const first = await generateText({ ...base, messages });
    assert.equal(first.toolResults.length, 1);
    messages.push(...first.response.messages, { role: 'user', content: say('two') });
    const second = await generateText({ ...base, messages });
    assert.equal(second.text, 'two');
    messages.push(...second.response.messages, { role: 'user', content: say('three') });
    const third = streamText({ ...base, messages });
    assert.equal(await third.text, 'three');
  });
}

test('responses: a conversation by the id of its last response', async () => {
  const base = { model: plain.responses, maxRetries: 0 };
  const first = await generateText({ ...base, prompt: 'Hi' });
  const previousResponseId = first.providerMetadata.openai.responseId;
  const options = { providerOptions: { openai: { previousResponseId } } };
  const second = await generateText({ ...base, ...options, prompt: say('two') });
  assert.equal(second.text, 'two');
  assert.ok(second.usage.inputTokens > first.usage.inputTokens);
});

test('embeddings', async () => {
  const model = plain.embeddings;
  assert.equal((await embed({ model, value: 'a' })).embedding.length, 8);
  assert.equal((await embedMany({ model, values: ['a', 'b'] })).embeddings.length, 2);
});

test('a completion', async () => {
  const whole = await generateText({ model: plain.completion, prompt: 'Hi', maxOutputTokens: 50 });
  assert.equal(whole.text.trim(), DEFAULT);
  const streamed = streamText({ model: plain.completion, prompt: 'Hi', maxOutputTokens: 50 });
  assert.equal((await streamed.text).trim(), DEFAULT);
});

test('errors have a status and a message', async () => {
  const model = createOpenAICompatible({ name: 'gllm', baseURL: `${URL}/v1` })('other');
  await assert.rejects(
    generateText({ model, prompt: 'Hi', maxRetries: 0 }),
    (error) => error.statusCode === 404 && /does not exist/.test(error.message),
  );
});

test('a stream that is left', async () => {
  const control = new AbortController();
  const result = streamText({
    model: plain.compatible, prompt: 'Hi', abortSignal: control.signal, onError() {},
  });
  for await (const piece of result.textStream) if (piece) control.abort();
  assert.equal((await generateText({ model: plain.compatible, prompt: 'Hi' })).text, DEFAULT);
});
