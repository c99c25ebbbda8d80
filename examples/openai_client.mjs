// A streamed chat with a running server, by OpenAI's own client for JavaScript: `make serve` first,
// then `npm install openai` and `node openai_client.mjs`.

import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const stream = await client.chat.completions.create({
  model: "demo",
  messages: [{ role: "user", content: "Tell me a story about Otto the fox." }],
  stream: true,
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
process.stdout.write("\n");
