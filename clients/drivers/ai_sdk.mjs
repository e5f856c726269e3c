// Vercel's AI SDK with its OpenAI-compatible provider: streamText with a tool, the messages of all steps carried on.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { isStepCount, streamText, tool } from 'ai'
import { z } from 'zod'

const FIRST = 'What will the weather be like in Oslo tomorrow?'
const SECOND = 'And what about Bergen?'
const STEPS = 5
let runs = 0

const provider = createOpenAICompatible({
  name: 'k3',
  baseURL: `${process.env.CLIENT_URL}/v1`,
  apiKey: 'unused',
  includeUsage: true,
})
const forecast = tool({
  description: "Tells tomorrow's weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async () => {
    runs += 1
    return 'rain, 9 degrees'
  },
})

const messages = []
for (const question of [FIRST, SECOND]) {
  messages.push({ role: 'user', content: question })
  const result = streamText({
    model: provider(process.env.CLIENT_MODEL),
    system: 'You answer questions about the weather. Use the tool `forecast`; do not guess.',
    messages,
    tools: { forecast },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : stepNumber < STEPS - 1 ? 'auto' : 'none' }),
    stopWhen: isStepCount(STEPS),
    maxOutputTokens: 400,
    maxRetries: 0,
    onError: ({ error }) => {
      throw error
    },
  })
  await result.consumeStream()
  messages.push(...(await result.responseMessages))
}
console.log(JSON.stringify({ tool_runs: runs }))
