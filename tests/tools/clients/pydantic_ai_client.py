"""pydantic-ai: agents on chat, responses and messages: text, a stream, typed output and a tool call with its result."""
import asyncio
from typing import Literal

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

from demo import QUESTION, Fruit, check_fruit

SETTINGS = {"temperature": 0, "max_tokens": 120}


async def check_text(model):
    agent = Agent(model, model_settings=SETTINGS)
    result = await agent.run(QUESTION)
    assert "14" in result.output, result
    assert result.usage.input_tokens > 10 and result.usage.output_tokens > 5
    async with agent.run_stream(QUESTION) as stream:
        assert [text async for text in stream.stream_text()][-1] == result.output


async def check_output(model, output):
    agent = Agent(model, model_settings=SETTINGS, output_type=output)
    check_fruit((await agent.run(QUESTION)).output)
    async with agent.run_stream(QUESTION) as stream:
        check_fruit(await stream.get_output())


async def check_tool(model):
    agent = Agent(model, model_settings={**SETTINGS, "parallel_tool_calls": False}, output_type=ToolOutput(Fruit))
    added = []

    async def once(context, tool):
        return None if added else tool

    @agent.tool_plain(prepare=once)
    def add(a: Literal[12, 17], b: Literal[5, -3]) -> int:
        """Adds two numbers."""
        added.append((a, b))
        return a + b

    # Each response must call a tool: `add`, which is then no longer offered, or the output tool, which ends the run.
    check_fruit((await agent.run(QUESTION)).output)
    assert len(added) < 2, added


async def main():
    for model in (OpenAIChatModel("demo"), OpenAIResponsesModel("demo"), AnthropicModel("demo")):
        await check_text(model)
        await check_output(model, ToolOutput(Fruit))
        if not isinstance(model, AnthropicModel):  # pydantic-ai sends a schema only to Claude's names
            await check_output(model, NativeOutput(Fruit))
        await check_tool(model)


asyncio.run(main())
