"""The chat page of the server in headless Chromium, as a person uses it.

    python3 page.py CHROMIUM PROGRAM MODEL [PICTURES]    # `fracbit serve MODEL` is started on a free port

With PICTURES, a directory, what the page looks like is kept there. Only the standard library is
needed: the browser is told what to do through a pair of pipes (`--remote-debugging-pipe`).
"""

import base64
import json
import os
import pathlib
import select
import subprocess
import sys
import tempfile
import time
import urllib.request

PATIENCE = 30  # seconds
KEY = "a-key"


class Browser:
    """One page of a browser, over the DevTools protocol: messages of JSON that end with a zero."""

    def __init__(self, program, profile):
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        # The pipes have to be its descriptors 3 and 4, which may be ours, too: so a shell moves them.
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
        line = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, program, profile],
            pass_fds=[theirs_in, theirs_out],
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.out, self.input = ours_out, ours_in
        self.buffer, self.number, self.session, self.complaints = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ["Page", "Runtime", "Log"]:
            self.call(f"{domain}.enable")

    def read(self):
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.input], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser says nothing"
            more = os.read(self.input, 1 << 16)
            assert more, "the browser has ended"
            self.buffer += more
        message, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(message)
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(message["params"]["entry"]["text"])
        return message

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def do(self, script):
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def until(self, script):
        deadline = time.monotonic() + PATIENCE
        while not self.do(script):
            assert time.monotonic() < deadline, f"never: {script}: {self.do('document.body.innerText')}"
            time.sleep(0.02)

    def go(self, address):
        self.call("Page.navigate", url=address)
        self.until(f"document.readyState === 'complete' && location.href === '{address}'")

    def press(self, key, code=0, text="", shift=False):
        for kind in ["keyDown", "keyUp"]:
            extra = {"text": text} if text and kind == "keyDown" else {}
            extra["modifiers"] = 8 if shift else 0
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **extra)

    def write(self, text):
        self.call("Input.insertText", text=text)

    def look(self, width, height, scheme, picture=None):
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[dict(name="prefers-color-scheme", value=scheme)])
        if picture:
            time.sleep(0.3)
            data = self.call("Page.captureScreenshot")["data"]
            pathlib.Path(picture).write_bytes(base64.b64decode(data))

    def end(self):
        self.process.terminate()
        self.process.wait()


SAID = "[...document.querySelectorAll('#log article.assistant .said')].map((said) => said.innerText)"
DONE = "document.getElementById('stop').hidden"
# What a page for people must have: names for all that can be used, and text that can be read.
UNNAMED = """[...document.querySelectorAll('button, input, select, textarea')].filter((element) =>
    !(element.ariaLabel || element.innerText?.trim() || element.textContent.trim() || element.labels?.length))
    .map((element) => element.outerHTML)"""
CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const light = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255)
      .map((part) => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
    return .2126 * parts[0] + .7152 * parts[1] + .0722 * parts[2];
  };
  const probe = document.body.appendChild(document.createElement('i'));
  const value = (name) => { probe.style.color = `var(${name})`; return light(getComputedStyle(probe).color); };
  const pairs = [['ink', 'ground'], ['ink', 'side'], ['ink', 'mine'], ['ink', 'code'], ['soft', 'ground'],
    ['soft', 'side'], ['soft', 'raised'], ['on-accent', 'accent'], ['bad', 'ground']];
  const found = pairs.map(([a, b]) => [value('--' + a), value('--' + b)].sort((a, b) => b - a))
    .map(([a, b], at) => [pairs[at].join(' on '), (a + .05) / (b + .05)]).filter(([, ratio]) => ratio < 4.5);
  probe.remove();
  return found;
})()"""
HOSTILE = r"""<img src=x onerror="window.broken=1"><script>window.broken=1</script>
**bold** and `<b>code</b>` and *slanted* and [link](javascript:broken=1)

# <u>heading</u>

```html
<script>window.broken=1</script>
```

| a | b |
|---|---|
| 1 | <i>2</i> |

1. one
   - inner
2. two

> said **so**
"""


def check(browser, base, pictures):
    picture = lambda name: pictures and os.path.join(pictures, f"{name}.png")
    browser.look(1280, 800, "light")
    browser.go(base + "/")
    # The server wants a key, so the page does, and says so.
    browser.until("document.getElementById('settings').open && document.activeElement.id === 'key'")
    assert browser.do("!document.getElementById('locked').hidden")
    browser.look(1280, 800, "light", picture("key"))
    # Without a key the server's answer is 401, which browsers report, too.
    assert all("401" in complaint for complaint in browser.complaints), browser.complaints
    browser.complaints.clear()
    browser.write(KEY)
    browser.press("Enter", 13, "\r")
    browser.until("document.getElementById('model').textContent === 'tiny'")
    assert browser.do("!document.getElementById('settings').open && document.activeElement.id === 'text'")
    browser.look(390, 844, "light", picture("empty-phone"))

    # A message by keyboard, with a line break in it; the answer is that of the API.
    browser.do("document.getElementById('seed').value = 3; document.getElementById('max_tokens').value = 24")
    browser.do("for (const id of ['seed', 'max_tokens']) document.getElementById(id).dispatchEvent(new Event('input'))")
    browser.write("Once")
    browser.press("Enter", 13, "\r", shift=True)
    browser.write("upon a time")
    browser.press("Enter", 13, "\r")
    browser.until(f"{DONE} && {SAID}.length === 1")
    message = {"role": "user", "content": "Once\nupon a time"}
    body = {"messages": [message], "seed": 3, "max_tokens": 24}
    head = {"Content-Type": "application/json", "X-Api-Key": KEY}
    request = urllib.request.Request(base + "/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request) as answer:
        want = json.load(answer)["choices"][0]["message"]["content"]
    assert browser.do("open.messages[1].content") == want, want
    assert browser.do("open.messages[0].content") == message["content"]
    note = browser.do("document.querySelector('.assistant .tools').innerText")
    assert "24 tokens" in note and "tokens/s" in note and "cut at the limit" in note, note

    # It is still there when the page comes again, and so are the settings.
    browser.go(base + "/")
    browser.until("document.querySelectorAll('#chats li').length === 1")
    assert browser.do("settings.seed") == "3"
    browser.do("document.querySelector('#chats .open').click()")
    assert browser.do(f"{SAID}.length") == 1
    # Another turn, stopped.
    browser.do("document.getElementById('max_tokens').value = ''; document.getElementById('text').focus()")
    browser.write("And then?")
    browser.press("Enter", 13, "\r")
    browser.until("open.messages[3]?.content.length > 10 || " + DONE)
    browser.press("Escape", 27)
    browser.until(DONE)
    note = browser.do("[...document.querySelectorAll('.assistant .tools')].at(-1).innerText")
    assert "stopped" in note, note
    assert browser.do("document.getElementById('status').textContent") == "Stopped."

    # Whatever a model writes stays text.
    browser.do(f"open.messages.at(-1).content = {json.dumps(HOSTILE)}; settle()")
    time.sleep(0.1)
    last = "[...document.querySelectorAll('.assistant .said')].at(-1)"
    assert browser.do("window.broken") is None
    made = browser.do(f"[...new Set([...{last}.querySelectorAll('*')].map((e) => e.tagName))].sort().join(' ')")
    assert made == "BLOCKQUOTE BR BUTTON CODE DIV EM H3 LI OL P PRE STRONG TABLE TD TH TR UL", made
    assert "<img src=x" in browser.do(f"{last}.innerText") and "<u>heading</u>" in browser.do(f"{last}.innerText")
    for nested in ["> " * 3000, "- a\n  " * 500, "*" * 3000, "`" * 3000, "|" * 3000 + "\n|-|"]:
        assert browser.do(f"Boolean(markdown({json.dumps(nested)}))"), nested[:20]
    thought = browser.do("const [a, b] = rendered('<think>hm</think>yes'); a.tagName + a.innerText + b.textContent")
    assert thought.startswith("DETAILS") and thought.endswith("yes"), thought

    assert browser.do(UNNAMED) == []
    for width, height, name in [(390, 844, "phone"), (1280, 800, "desktop")]:
        for scheme in ["light", "dark"]:
            browser.look(width, height, scheme, picture(f"{name}-{scheme}"))
            assert browser.do(CONTRAST) == [], (scheme, browser.do(CONTRAST))
            assert browser.do("document.documentElement.scrollWidth <= innerWidth"), (name, "scrolls sideways")
    browser.look(390, 844, "dark")
    browser.do("document.getElementById('menu').click()")
    browser.look(390, 844, "dark", picture("side-phone"))
    browser.press("Escape", 27)
    assert browser.do("!document.body.hasAttribute('data-side')")
    browser.do("document.getElementById('set').click()")
    browser.look(390, 844, "dark", picture("settings-phone"))
    assert browser.complaints == [], browser.complaints


def main():
    chromium, program, model, *pictures = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        keys = os.path.join(place, "keys")
        pathlib.Path(keys).write_text(KEY)
        command = [program, "serve", model, "--port", "0", "--name", "tiny", "--api-keys", keys]
        serving = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        browser = None
        try:
            base = serving.stdout.readline().strip().removeprefix("serving at ").removesuffix("/v1")
            browser = Browser(chromium, os.path.join(place, "profile"))
            check(browser, base, pictures[0] if pictures else None)
        finally:
            if browser:
                browser.end()
            serving.terminate()
        assert serving.wait(30) == 0


if __name__ == "__main__":
    main()
