// The unmodified `openai` package for Node.js: prints one JSON line with what it saw. Arguments: base URL, model.
const OpenAI = require("openai");

async function main(baseURL, model) {
  const client = new OpenAI({ baseURL, apiKey: "sk-anything", maxRetries: 0, timeout: 30000 });
  const messages = [{ role: "user", content: "say something new about the house" }];
  const seen = {};

  const whole = await client.chat.completions.create({ model, messages, max_tokens: 12 });
  seen.whole = whole.choices[0].message.content;
  seen.model = whole.model;

  const stream = await client.chat.completions.create({ model, messages, max_tokens: 12, stream: true, stream_options: { include_usage: true } });
  seen.pieces = [];
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content) seen.pieces.push(chunk.choices[0].delta.content);
    if (chunk.usage) seen.usage = chunk.usage.completion_tokens;
  }

  const left = await client.chat.completions.create({ model, messages, max_tokens: 3000, stream: true });
  seen.left = 0;
  for await (const _ of left) {
    if (++seen.left === 3) break; // leaving the loop aborts the request
  }

  seen.models = [];
  for await (const each of client.models.list()) seen.models.push(each.id);

  try {
    await client.chat.completions.create({ model: model + "x", messages });
  } catch (error) {
    seen.error = { name: error.constructor.name, status: error.status, code: error.code, message: error.message };
  }
  console.log(JSON.stringify(seen));
}

main(...process.argv.slice(2));
