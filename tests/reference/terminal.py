"""`fracbit chat` at a terminal, as a person types.

    python3 terminal.py PROGRAM MODEL    # MODEL has a chat template; only the standard library is needed
"""

import json
import os
import pty
import re
import select
import sys
import tempfile
import time

PATIENCE = 60  # seconds
UP, CTRL_C, CTRL_D = "\x1b[A", "\x03", "\x04"


class Terminal:
    def __init__(self, command):
        self.child, self.end = pty.fork()
        if self.child == 0:
            os.environ["TERM"] = "xterm"
            os.execv(command[0], command)
        self.seen = ""

    def type(self, text):
        os.write(self.end, text.encode())

    def until(self, *words):
        """What is shown up to the first of these words, which is waited for."""
        deadline = time.monotonic() + PATIENCE
        while not (found := [self.seen.find(word) + len(word) for word in words if word in self.seen]):
            ready, _, _ = select.select([self.end], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"never shown: {words}: {self.seen!r}"
            try:
                more = os.read(self.end, 1 << 14)
            except OSError:
                more = b""
            assert more, f"it has ended, without {words}: {self.seen!r}"
            self.seen += more.decode(errors="replace")
        shown, self.seen = self.seen[: min(found)], self.seen[min(found) :]
        return shown

    def exit_code(self):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            done, status = os.waitpid(self.child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        raise AssertionError("it does not end")


def answer(terminal):
    """The speed that follows an answer, and the prompt after it."""
    terminal.until("prefill ")
    tokens = int(terminal.until(" tokens at ").split()[0])
    terminal.until("> ")
    return tokens


def main():
    program, model = sys.argv[1:]
    with tempfile.TemporaryDirectory() as place:
        saved = os.path.join(place, "talk.json")
        chat = Terminal([program, "chat", model, "--greedy", "-n", "12"])
        chat.until("> ")
        # Tab completes commands.
        chat.type("/he\t\r")
        assert "/save FILE" in chat.until("stops an answer.")
        chat.until("> ")
        # A message of two lines, and the same again by the arrow.
        chat.type("Once upon\\\ra time\r")
        answer(chat)
        chat.type(UP + "\r")
        answer(chat)
        chat.type("/system Be kind.\r")
        chat.until("holds from now on", "> ")
        chat.type("/retry\r")
        answer(chat)
        chat.type(f"/save {saved}\r")
        chat.until("4 messages")
        with open(saved) as file:
            messages = json.load(file)["messages"]
        assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"], messages
        assert messages[1]["content"] == messages[3]["content"] == "Once upon\na time", messages
        chat.until("> ")
        chat.type("/reset\r")
        chat.until("forgotten")
        chat.until("> ")
        chat.type(f"/load {saved}\r")
        chat.until("4 messages; /retry")
        chat.until("> ")
        chat.type(f"/save {model}/config.json\r")
        chat.until("/save does not replace")
        chat.until("> ")
        chat.type("/retry\r")
        answer(chat)
        # Ctrl-C leaves the program running, Ctrl-D ends it.
        chat.type(CTRL_C)
        chat.until("Ctrl-D or /exit leaves")
        chat.until("> ")
        chat.type(CTRL_D)
        assert chat.exit_code() == 0

        # An answer is stopped by Ctrl-C. It may be done before the key arrives: then another one.
        chat = Terminal([program, "chat", model, "-n", "400", "--seed", "1", "--temp", "1.5"])
        chat.until("> ")
        for _ in range(20):
            chat.type("/reset\r")
            chat.until("forgotten")
            chat.until("> ")
            chat.type("Once upon a time\r")
            chat.until("\r\n")
            time.sleep(0.05)
            chat.type(CTRL_C)
            chat.until("prefill ")
            stopped = "(stopped)" in chat.until("\r\n")
            chat.until("> ")
            if stopped:
                break
        else:
            raise AssertionError("twenty answers and none was stopped")
        # Asked again, only its last token is run, and only that is told, stopped or not.
        for _ in range(20):
            chat.type("/retry\r")
            chat.until("\r\n")
            time.sleep(0.05)
            chat.type(CTRL_C)
            chat.until("prefill ")
            shown = chat.until("\r\n")
            assert shown.startswith("1 tokens at "), shown
            chat.until("> ")
            if "(stopped)" in shown:
                break
        else:
            raise AssertionError("twenty answers and none was stopped")
        # It goes on after that.
        chat.type("And then?\r")
        chat.until("prefill ")
        chat.type("/exit\r")
        assert chat.exit_code() == 0


if __name__ == "__main__":
    main()
