"""Commands as functions: the same bytes, documents and messages; progress, Ctrl-C, threads."""

import filecmp
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import numpy as np
from common import DEMO, QUICK, QUICK_FLAGS, STORIES, program

import fracbit
from fracbit import _fracbit

# Takes some seconds to search exactly, in steps of some hundredths of one.
TALL = np.random.default_rng(0).standard_normal((4096, 64))


class Commands(unittest.TestCase):
    def setUp(self):
        home = tempfile.TemporaryDirectory()
        self.addCleanup(home.cleanup)
        self.home = Path(home.name)

    def test_quantize_writes_the_bytes_of_the_program(self):
        here, there = self.home / "here", self.home / "there"
        report = fracbit.quantize(DEMO, here, **QUICK)
        self.assertEqual(program("quantize", DEMO, "-o", there, *QUICK_FLAGS).returncode, 0)
        names = sorted(path.name for path in there.iterdir())
        self.assertEqual(sorted(path.name for path in here.iterdir()), names)
        self.assertEqual(filecmp.cmpfiles(here, there, names, shallow=False), (names, [], []))
        self.assertEqual(report.path, here)
        model = fracbit.load(here)
        self.assertEqual(
            (report.bytes, report.bits_per_weight), (model.nbytes, model.bits_per_weight)
        )
        self.assertLess(
            model.evaluate(STORIES.read_text(), windows=1, baseline=fracbit.load(DEMO)).kl, 0.1
        )

    def test_plans_can_be_edited_saved_and_applied(self):
        plan = fracbit.plan(DEMO, bits=3, sensitivity="prior", pin=["layers.0.*=tcq-4"])
        told = program(
            "plan", DEMO, "--bits=3", "--sensitivity=prior", "--pin=layers.0.*=tcq-4", "--json"
        )
        self.assertEqual(plan, json.loads(told.stdout))
        self.assertLessEqual(plan.bits_per_weight, 3)
        self.assertTrue(
            all(
                layer["scheme"] == "tcq-4" for layer in plan.layers if ".layers.0." in layer["name"]
            )
        )
        plan.save(self.home / "plan.json")
        self.assertEqual(fracbit.Plan.read(self.home / "plan.json"), plan)
        for layer in plan["layers"]:
            layer["scheme"] = "nuq-3"
        out = self.home / "out"
        # Bands are of several schemes; one for all needs no search.
        report = fracbit.quantize(DEMO, out, plan=plan, data_free=True)
        written = fracbit.Plan.read(out / "plan.json")
        self.assertEqual({layer["scheme"] for layer in written.layers}, {"nuq-3"})
        self.assertEqual(report.bytes, fracbit.load(out).nbytes)
        with self.assertRaises(fracbit.ArgumentError):
            fracbit.quantize(DEMO, out, plan=plan, resume=True)

    def test_distortion(self):
        found = fracbit.distortion(["nuq-3", "vq-2"], weights=1 << 14)
        told = program(
            "distortion", "--scheme=nuq-3", "--scheme=vq-2", f"--weights={1 << 14}", "--json"
        )
        self.assertEqual([vars(row) for row in found], json.loads(told.stdout))

    def test_messages_are_those_of_the_program(self):
        nowhere, out = self.home / "nowhere", self.home / "out"
        empty, full = self.home / "empty", self.home / "full"
        empty.mkdir()
        full.mkdir()
        (full / "letter.txt").write_text("not a model")
        plan = self.home / "plan.json"
        plan.write_text("{}")
        table = [
            (lambda: fracbit.load(nowhere), ["run", nowhere, "-p", "a"], fracbit.InputError),
            (lambda: fracbit.Tokenizer(empty), ["run", empty, "-p", "a"], fracbit.InputError),
            (lambda: fracbit.load("a/b"), ["inspect", "a/b"], fracbit.InputError),
            (
                lambda: fracbit.plan(DEMO, bits=0.1),
                ["plan", DEMO, "--bits=0.1"],
                fracbit.BudgetError,
            ),
            (
                lambda: fracbit.quantize(DEMO, out, bits=0.1),
                ["quantize", DEMO, "-o", out, "--bits=0.1"],
                fracbit.BudgetError,
            ),
            (
                lambda: fracbit.quantize(DEMO, out, plan=plan),
                ["quantize", DEMO, "-o", out, "--plan", plan],
                fracbit.InputError,
            ),
            (
                lambda: fracbit.quantize(DEMO, DEMO, bits=3),
                ["quantize", DEMO, "-o", DEMO, "--bits=3"],
                fracbit.ArgumentError,
            ),
            (
                lambda: fracbit.quantize(DEMO, full, **QUICK),
                ["quantize", DEMO, "-o", full, *QUICK_FLAGS],
                fracbit.Error,
            ),
            (
                lambda: fracbit.evaluate(DEMO, nowhere),
                ["eval", DEMO, "--text", nowhere],
                fracbit.InputError,
            ),
            (
                lambda: fracbit.evaluate(DEMO, STORIES, ctx=9999),
                ["eval", DEMO, "--text", STORIES, "--ctx=9999"],
                fracbit.ArgumentError,
            ),
        ]
        codes = {
            fracbit.Error: 1,
            fracbit.ArgumentError: 2,
            fracbit.InputError: 3,
            fracbit.BudgetError: 4,
        }
        for ask, line, kind in table:
            with self.assertRaises(fracbit.Error) as raised:
                ask()
            told = program(*line)
            self.assertIs(type(raised.exception), kind, line)
            error = told.stderr[told.stderr.index("error: ") :]
            self.assertEqual(
                (told.returncode, error), (codes[kind], f"error: {raised.exception}\n"), line
            )

    def test_arguments_are_refused_in_the_words_of_the_parser(self):
        for ask, line in [
            (lambda: fracbit.plan(DEMO, bits="many"), ["plan", DEMO, "--bits=many"]),
            (
                lambda: fracbit.plan(DEMO, bits=3, scheme="tcq-3"),
                ["plan", DEMO, "--bits=3", "--scheme=tcq-3"],
            ),
            (lambda: fracbit.plan(DEMO), ["plan", DEMO]),
            (lambda: fracbit.plan(DEMO, latency=0.02), ["plan", DEMO, "--latency=0.02s"]),
            (lambda: fracbit.distortion("tcq-9"), ["distortion", "--scheme=tcq-9"]),
        ]:
            with self.assertRaises(fracbit.ArgumentError) as raised:
                ask()
            told, message = program(*line), str(raised.exception)
            self.assertEqual(told.returncode, 2)
            self.assertIn(message.split("\n\n")[0], told.stderr)
            self.assertTrue(told.stderr.startswith("error: "))
            self.assertNotIn("--help", message)
            self.assertIsInstance(raised.exception, ValueError)

    def test_progress_is_told_on_the_thread_of_the_caller(self):
        told = []
        fracbit.distortion(
            "nuq-4",
            weights=1 << 18,
            progress=lambda *args: told.append((*args, threading.get_ident())),
        )
        done, total, what, thread = told[-1]
        self.assertEqual(
            (done, total, what, thread), (1, 1, "measuring distortion", threading.get_ident())
        )
        with self.assertLogs("fracbit", logging.INFO) as logs:
            fracbit.quantize(DEMO, self.home / "out", **QUICK)
        self.assertTrue(any("memory: " in line for line in logs.output), logs.output)
        self.assertRaises(TypeError, fracbit.distortion, "nuq-4", progress=3)

    def test_a_bar_needs_tqdm(self):
        try:
            import tqdm.auto
        except ImportError:
            with self.assertRaisesRegex(ImportError, "pip install"):
                fracbit.distortion("nuq-2", weights=1024, progress=True)
            return
        shown = []

        class Bar(tqdm.auto.tqdm):
            def close(self):
                shown.append((self.desc, self.n, self.total))
                super().close()

        real, tqdm.auto.tqdm = tqdm.auto.tqdm, Bar
        self.addCleanup(setattr, tqdm.auto, "tqdm", real)
        fracbit.distortion(["nuq-2", "nuq-3"], weights=1024, progress=True)
        self.assertEqual(shown[0], ("measuring distortion", 2, 2))

    def test_what_a_callback_raises_stops_the_work(self):
        class Enough(Exception):
            pass

        def stop(done, total, what):
            seen.append((done, total))
            if done > 0:
                raise Enough

        seen = []
        with self.assertRaises(Enough):
            fracbit.quantize_matrix(TALL, "tcq-4", effort="exact", progress=stop)
        done, total = seen[-1]
        self.assertTrue(0 < done < total, seen)
        seen = []
        with self.assertRaises(Enough):
            fracbit.quantize(
                DEMO,
                self.home / "out",
                scheme="tcq-4",
                data_free=True,
                effort="fast",
                progress=stop,
            )
        self.assertFalse((self.home / "out").exists())

    def test_what_was_stopped_can_be_resumed(self):
        def stop(done, total, what):
            if what == "quantizing" and done > total / 4:
                raise KeyError(what)

        options = {"scheme": "tcq-4", "data_free": True, "effort": "fast"}
        out, whole = self.home / "out", self.home / "whole"
        self.assertRaises(KeyError, fracbit.quantize, DEMO, out, progress=stop, **options)
        self.assertTrue(list(self.home.glob("out.partial-*")), "it is kept")
        fracbit.quantize(DEMO, out, resume=True, **options)
        fracbit.quantize(DEMO, whole, **options)
        names = [path.name for path in whole.iterdir()]
        self.assertEqual(filecmp.cmpfiles(out, whole, names, shallow=False)[0], names)

    def test_other_threads_run_meanwhile(self):
        ticks, over = [0], threading.Event()

        def count():
            while not over.is_set():
                ticks[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        started = time.monotonic()
        fracbit.quantize_matrix(TALL[:1024], "tcq-4", effort="balanced")
        took = time.monotonic() - started
        counted = ticks[0]
        over.set()
        thread.join()
        # A held lock would let it run some times at most: once before and once after.
        self.assertGreater(counted, 5, f"in {took:.2f} s")

    def interrupted(self, line):
        """Sends SIGINT once the child has said something, and returns how it ended and how soon."""

        def heed():
            # Shells have what runs in the background ignore SIGINT, and children inherit that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        child = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed
        )
        self.addCleanup(child.kill)
        (child.stdout if "-c" in line else child.stderr).readline()
        time.sleep(0.5)
        started = time.monotonic()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
        return child.returncode, err, time.monotonic() - started

    def test_ctrl_c_interrupts_a_call(self):
        script = (
            "import fracbit, numpy\n"
            "weights = numpy.random.randn(131072, 64)\n"
            "print('ready', flush=True)\n"
            "fracbit.quantize_matrix(weights, 'tcq-4', effort='exact')\n"
        )
        code, err, took = self.interrupted([sys.executable, "-c", script])
        self.assertEqual((code, "KeyboardInterrupt" in err), (-signal.SIGINT, True), err)
        self.assertNotIn("panicked", err)
        self.assertLess(took, 30)

    def test_ctrl_c_ends_the_program_as_it_ends_the_binary(self):
        script = str(Path(sys.executable).with_name("fracbit"))
        code, err, _ = self.interrupted(
            [script, "distortion", "--scheme=tcq-4", "--weights=100000000"]
        )
        self.assertEqual(code, -signal.SIGINT, err)
        self.assertNotIn("Traceback", err)

    def test_the_program(self):
        told = program("--version")
        self.assertEqual((told.returncode, told.stdout), (0, f"fracbit {fracbit.__version__}\n"))
        module = subprocess.run(
            [sys.executable, "-m", "fracbit", "--version"], capture_output=True, text=True
        )
        self.assertEqual(module.stdout, told.stdout)
        self.assertEqual(program("quantise").returncode, 2)
        self.assertEqual(
            program("distortion", "--scheme=nuq-2", "--weights=1024", "--threads=1").returncode, 0
        )
        # A reader that goes away is no failure.
        script = Path(sys.executable).with_name("fracbit")
        piped = f"'{script}' distortion --all --weights 16 | head -n 1; echo ${{PIPESTATUS[0]}}"
        piped = subprocess.run(["bash", "-c", piped], capture_output=True, text=True)
        self.assertEqual(
            (piped.stdout.splitlines()[-1], piped.stderr.count("error")), ("0", 0), piped
        )
        if os.name == "posix":
            name = os.fsdecode(b"\xff")
            self.assertIn("nothing of this name", program("inspect", name).stderr)
            self.assertRaises(fracbit.InputError, _fracbit.command, ["inspect", name])


if __name__ == "__main__":
    unittest.main()
