"""promptfoo: two prompts, and assertions on what came back."""

import json
import os
import pathlib
import subprocess

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
IS_RIGHT = "Array.isArray(output) ? output[0].function.name === 'get_weather' : 'country' in output"


def provider(label, **config):
    base = {"apiBaseUrl": os.environ["OPENAI_BASE_URL"], "max_tokens": 60, "temperature": 0}
    return {"id": f"openai:chat:{os.environ['MODEL']}", "label": label, "config": base | config}


form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
pathlib.Path("promptfooconfig.json").write_text(json.dumps({
    "prompts": ["Which country is {{city}} in? Answer as JSON with city and country."],
    "providers": [provider("schema", response_format=form), provider("tool", tools=[TOOL], tool_choice="required")],
    "tests": [{"vars": {"city": city}} for city in ("Oslo", "Lima")],
    "defaultTest": {"assert": [{"type": "javascript", "value": IS_RIGHT}]},
}))
done = subprocess.run(["promptfoo", "eval", "--no-cache", "--output", "results.json", "--no-progress-bar"])
results = json.loads(pathlib.Path("results.json").read_text())["results"]
assert done.returncode == 0 and results["stats"]["successes"] == 4 and not results["stats"]["errors"], results["stats"]
print(f"{results['stats']['successes']} successes, {results['stats']['failures']} failures, {results['stats']['errors']} errors")
