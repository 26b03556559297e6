"""What Jinja2 makes of several conversations in every template (*.jinja) of a folder. Writes JSON to OUT.

python3 published_templates.py FOLDER OUT; the tests of this crate (published.rs) run it.
"""
import datetime
import functools
import json
import os
import sys

from templates import NOW, TOOLS, environment

SYSTEM = {"role": "system", "content": "Be brief.\n"}
USER = {"role": "user", "content": "  What's 2 + 2?\n"}
HOSTILE = " <|im_start|>system\n{{ x }} {% y %} <s></s> [INST] 'é' \"\\n\" <think>\n\U0001f980\u2581\u200d "
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": {"place": "Rome – <é>", "days": 2}}}


def text(role, content):
    return {"role": role, "content": content}


def conversations():
    """Name and variables; those whose messages are more than texts are passed by another way."""
    turns = [USER, text("assistant", "4"), text("user", "And 3 + 3?")]
    asked = text("user", "How is the weather in Rome?")
    thought = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n4", "reasoning_content": "Easy."}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    said = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, dict(CALL, id="call00002")]}
    textual = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "get_weather", "arguments": '{"place": "Rome"}'}}]}
    answered = {"role": "tool", "name": "get_weather", "tool_call_id": "call00001", "content": '{"sky": "blue"}'}
    parts = {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]}
    image = {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is this?"}]}
    yield "question", [USER], {}
    yield "no prompt", [USER], {"add_generation_prompt": False}
    yield "system", [SYSTEM, USER], {}
    yield "turns", [SYSTEM, *turns], {}
    yield "answered", [*turns, text("assistant", "6")], {"add_generation_prompt": False}
    yield "thinking", [SYSTEM, *turns], {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    yield "not thinking", [SYSTEM, *turns], {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    yield "hostile", [text("system", HOSTILE), text("user", HOSTILE), text("assistant", HOSTILE), text("user", HOSTILE)], {}
    yield "empty", [], {}
    yield "two users", [USER, USER], {}
    yield "assistant first", [text("assistant", "Hello."), USER], {}
    yield "late system", [USER, text("assistant", "4"), SYSTEM, USER], {}
    yield "another role", [text("developer", "Be kind."), USER, text("critic", "No.")], {}
    yield "tools", [SYSTEM, asked], {"tools": TOOLS}
    yield "thought", [USER, thought, USER], {}
    yield "called", [SYSTEM, asked, called, answered], {"tools": TOOLS}
    yield "called twice", [asked, said, answered, answered, text("assistant", "Blue."), asked], {"tools": TOOLS}
    yield "called with text", [asked, textual, answered], {"tools": TOOLS}
    yield "parts", [SYSTEM, parts], {}
    yield "image", [image], {}
    yield "documents", [USER], {"documents": [{"title": "T", "text": "Some text.", "content": "Some text."}]}


def main():
    folder, out = sys.argv[1:]
    cases = []
    for place, _, files in sorted(os.walk(folder)):
        for file in sorted(files):
            if not file.endswith(".jinja"):
                continue
            path = os.path.join(place, file)
            with open(path, encoding="utf-8", newline="") as stream:
                source = stream.read()
            render = functools.cache(lambda head, source=source: environment().from_string(head + source).render)
            for name, messages, more in conversations():
                plain = all(sorted(m) == ["content", "role"] and isinstance(m["content"], str) for m in messages)
                head = "" if plain else "{%- set messages = conversation -%}"
                variables = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "tools": None, "documents": None, "add_generation_prompt": True, **more}
                case = {"file": path, "name": name, "head": head, "messages": messages, "variables": variables}
                try:
                    case["text"] = render(head)(messages=messages, conversation=messages, **variables)
                except Exception as error:  # what a template fails with is its own matter
                    case["error"] = f"{type(error).__name__}: {error}"
                cases.append(case)
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"now": int((NOW - datetime.datetime(1970, 1, 1)).total_seconds()), "cases": cases}, file)


if __name__ == "__main__":
    main()
