"""What Jinja2, set up as transformers sets it up, makes of the constructs below. Writes templates.json beside this file, or to the file that is named.

pip install 'jinja2>=3.1.6'; python3 templates.py [OUT]
"""
import datetime
import json
import os
import sys

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2024, 7, 26, 13, 5, 0)


class Generation(jinja2.ext.Extension):
    """The tag that marks what training counts: its text, in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return env


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <now> & \"here\" – é",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "Where"}, "days": {"type": "integer", "enum": [1, 2, 3]}},
                "required": ["place"],
            },
        },
    }
]
CONTEXT = {
    "messages": [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Hi <&> 'you' é\n"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYo"}, {"role": "user", "content": "Why?"}],
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_generation_prompt": True,
    "tools": None,
    "documents": None,
    "offer": TOOLS,
    "n": 7,
    "x": 2.5,
    "words": ["b", "A", "c", "a"],
    "people": [{"name": "Zoe", "age": 31, "city": {"name": "Rome"}}, {"name": "adam", "age": 7, "city": {"name": "Oslo"}}, {"name": "Bob", "age": 31}],
    "d": {"b": 2, "a": [1, "two", None], "C": True},
    "empty": [],
    "text": "the quick brown fox",
    "lines": "one\n  two\n\nthree\n",
}

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    with open(os.path.join(HERE, "constructs.txt"), encoding="utf-8") as file:
        constructs = file.read().split("\n=====\n")
    cases = []
    for source in constructs:
        try:
            case = {"template": source, "text": environment().from_string(source).render(**CONTEXT)}
        except Exception as error:  # what a template fails with is its own matter
            case = {"template": source, "error": type(error).__name__}
        cases.append(case)
    out = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "templates.json")
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"now": int((NOW - datetime.datetime(1970, 1, 1)).total_seconds()), "context": CONTEXT, "cases": cases}, file, ensure_ascii=False, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
