"""Inspect: two samples that want a tool's answer, by chat and by responses."""

import os

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def get_weather():
    async def execute(city: str):
        """The weather in a city, now.

        Args:
            city: The city's name.
        """
        return f"It is sunny in {city}, 12 degrees."

    return execute


samples = [Sample(input=f"What is the weather in {city}?", target="12") for city in ("Oslo", "Lima")]
task = Task(dataset=samples, solver=[use_tools(get_weather(), tool_choice="any"), generate(tool_calls="single")], scorer=includes())
config = GenerateConfig(max_tokens=100, temperature=0, max_retries=0)
calls = []
for by_responses in False, True:
    model = get_model(f"openai/{os.environ['MODEL']}", responses_api=by_responses, config=config)
    (log,) = eval(task, model=model, display="none", log_dir="logs")
    assert log.status == "success", log.error
    for sample in log.samples:
        (_, called, answered, *_) = sample.messages
        assert answered.role == "tool" and answered.text.startswith("It is sunny"), sample.messages
        calls += [call.arguments for call in called.tool_calls]
print(f"{len(calls)} calls, the first with {calls[0]}")
