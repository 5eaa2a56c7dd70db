// What a Node program does with the openai package; prints one JSON object for the test to judge.
// Arguments: base URL, API key, model.
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const asked = { model, messages, max_tokens: 24, temperature: 0 };
const seen = {};

const whole = await client.chat.completions.create(asked);
seen.chat = { text: whole.choices[0].message.content, reason: whole.choices[0].finish_reason, usage: whole.usage };

const stream = await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } });
seen.stream = { text: "", reason: null, usage: null };
for await (const chunk of stream) {
  seen.stream.text += chunk.choices[0]?.delta?.content ?? "";
  seen.stream.reason = chunk.choices[0]?.finish_reason ?? seen.stream.reason;
  seen.stream.usage = chunk.usage ?? seen.stream.usage;
}

const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome", "Oslo"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters: schema } }];
const helper = client.chat.completions.stream({ ...asked, max_tokens: 120, tools, tool_choice: "required", parallel_tool_calls: false });
const calls = (await helper.finalChatCompletion()).choices[0].message.tool_calls;
seen.calls = calls.map((call) => ({ name: call.function.name, arguments: JSON.parse(call.function.arguments) }));

const format = { type: "json_schema", json_schema: { name: "plan", strict: true, schema } };
const planned = await client.chat.completions.create({ ...asked, max_tokens: 120, response_format: format });
seen.planned = JSON.parse(planned.choices[0].message.content);

const legacy = { model, prompt: "The sea is", max_tokens: 12, temperature: 0 };
seen.completion = (await client.completions.create(legacy)).choices[0].text;
seen.completionStream = "";
for await (const chunk of await client.completions.create({ ...legacy, stream: true })) {
  seen.completionStream += chunk.choices[0]?.text ?? "";
}

const response = await client.responses.create({ model, input: messages[0].content, max_output_tokens: 24, temperature: 0 });
seen.response = response.output_text;

seen.models = [];
for await (const one of client.models.list()) seen.models.push(one.id);

try {
  await client.chat.completions.create({ ...asked, temperature: 3 });
} catch (error) {
  seen.error = { kind: error.constructor.name, status: error.status, code: error.code, param: error.param, id: error.requestID };
}

console.log(JSON.stringify(seen));
