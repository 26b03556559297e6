"""Models in memory: text, logits, evaluation, tokens."""

import gc
import json
import threading
import unittest

import numpy as np
from common import DEMO, STORIES, program

import fracbit

PROMPT = "Once upon a time, there was a little"


class Models(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = fracbit.load(DEMO)

    def test_text_is_that_of_the_program(self):
        for options, flags in [
            ({"temperature": 0}, ["--greedy"]),
            (
                {"temperature": 1.1, "top_k": 40, "seed": 7},
                ["--temp=1.1", "--top-k=40", "--seed=7"],
            ),
            (
                {"typical_p": 0.6, "xtc_probability": 0.5, "dry_multiplier": 0.8},
                ["--typical-p=0.6", "--xtc-probability=0.5", "--dry-multiplier=0.8"],
            ),
            ({"mirostat_tau": 2.0, "seed": 3}, ["--mirostat-tau=2", "--seed=3"]),
        ]:
            told = program("run", DEMO, "-p", PROMPT, "-n", 24, "--json", *flags)
            told = json.loads(told.stdout)
            written = self.model.generate(PROMPT, max_tokens=24, **options)
            self.assertEqual("".join(written), told["text"])
            self.assertEqual((len(written.tokens), written.stop), (told["tokens"], told["stop"]))

    def test_sampling_has_its_names_and_ranges(self):
        from fracbit._sampling import Sampling

        for name in Sampling.__annotations__:
            list(self.model.generate(PROMPT, max_tokens=1, **{name: 1}))
        with self.assertRaisesRegex(TypeError, "`typical` is no keyword.*typical_p"):
            self.model.generate(PROMPT, typical=0.9)
        with self.assertRaisesRegex(fracbit.Error, "typical_p.*at most 1"):
            self.model.generate(PROMPT, typical_p=2)

    def test_a_generation_is_an_iterator(self):
        pieces = self.model.generate(PROMPT, max_tokens=6, temperature=0)
        self.assertIs(iter(pieces), pieces)
        self.assertEqual((pieces.tokens, pieces.stop), ([], None))
        first = next(pieces)
        self.assertEqual(len(pieces.tokens), 1)
        rest = list(pieces)
        self.assertEqual((pieces.stop, next(pieces, "over")), ("max_tokens", "over"))
        self.assertTrue(all(rest))
        whole = "".join(
            self.model.generate(self.model.tokenizer.encode(PROMPT), max_tokens=6, temperature=0)
        )
        self.assertEqual(first + "".join(rest), whole, "tokens make the same prompt as their text")
        self.assertEqual(
            list(fracbit.generate(DEMO, PROMPT, max_tokens=6, temperature=0)), [first, *rest]
        )
        self.assertEqual(list(self.model.generate(PROMPT, max_tokens=0)), [])

    def test_a_dropped_generation_lets_the_model_go(self):
        model = fracbit.load(DEMO)
        pieces = model.generate(PROMPT, max_tokens=400)
        next(pieces)
        before = threading.active_count()
        del pieces, model
        gc.collect()
        self.assertEqual(threading.active_count(), before, "nothing runs on behind it")
        # What a generation needs it holds itself.
        pieces = fracbit.load(DEMO).generate(PROMPT, max_tokens=3)
        gc.collect()
        self.assertTrue(list(pieces))

    def test_threads_share_a_model(self):
        want = "".join(self.model.generate(PROMPT, max_tokens=40, temperature=0))
        texts = [""] * 4

        def write(at):
            texts[at] = "".join(self.model.generate(PROMPT, max_tokens=40, temperature=0))

        threads = [threading.Thread(target=write, args=(at,)) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(texts, [want] * 4)
        # One iterator may be asked by several threads, too: each piece comes once.
        pieces, found = self.model.generate(PROMPT, max_tokens=40, temperature=0), []
        threads = [threading.Thread(target=lambda: found.extend(pieces)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(
            sorted(found), sorted(self.model.generate(PROMPT, max_tokens=40, temperature=0))
        )

    def test_logits_say_what_is_written(self):
        tokens = self.model.tokenizer.encode(PROMPT)
        logits = self.model.logits(tokens)
        self.assertEqual(
            (logits.shape, logits.dtype), ((len(tokens), self.model.vocab_size), np.float32)
        )
        written = self.model.generate(tokens, max_tokens=1, temperature=0)
        list(written)
        self.assertEqual(int(logits[-1].argmax()), written.tokens[0])
        np.testing.assert_array_equal(self.model.logits(np.array(tokens)), logits)
        self.assertEqual(self.model.logits([]).shape, (0, self.model.vocab_size))
        # The perplexity of a window is that of its logits.
        window = self.model.tokenizer.encode(STORIES.read_text())[:65]
        scores = self.model.logits(window[:-1]).astype(np.float64)
        scores -= np.log(
            np.exp(scores - scores.max(1, keepdims=True)).sum(1, keepdims=True)
        ) + scores.max(1, keepdims=True)
        nll = -scores[np.arange(64), window[1:]].mean()
        found = self.model.evaluate(STORIES.read_text(), ctx=64, windows=1, bos=False)
        self.assertAlmostEqual(found.nats_per_token, nll, delta=1e-5)

    def test_evaluation_is_that_of_the_program(self):
        told = program(
            "eval",
            DEMO,
            "--text",
            STORIES,
            "--ctx=128",
            "--windows=2",
            "--baseline",
            DEMO,
            "--kv=4",
            "--json",
        )
        told = fracbit.Evaluation(**json.loads(told.stdout))
        text = STORIES.read_text()
        options = {"ctx": 128, "windows": 2, "kv": 4}
        self.assertEqual(self.model.evaluate(text, baseline=self.model, **options), told)
        self.assertEqual(fracbit.evaluate(DEMO, STORIES, baseline=str(DEMO), **options), told)
        self.assertGreater(told.kl, 0)
        self.assertIsNone(self.model.evaluate(text, **options).kl)

    def test_tokens(self):
        tokenizer = fracbit.Tokenizer(str(DEMO))
        tokens = tokenizer.encode("The dog ran.")
        self.assertEqual(tokenizer.decode(tokens), "The dog ran.")
        self.assertEqual(tokenizer.decode(np.array(tokens)), "The dog ran.")
        self.assertEqual(len(tokenizer), tokenizer.vocab_size)
        bare = tokenizer.encode("The dog ran.", bos=False)
        self.assertEqual(bare, tokens[-len(bare) :])
        self.assertEqual(tokenizer.encode("The dog ran.", bos=True), [tokenizer.bos_id, *bare])
        self.assertEqual([tokenizer.token(token) for token in tokenizer.eos_ids], ["<|endoftext|>"])
        with self.assertRaisesRegex(fracbit.ArgumentError, "id: should be below 2048, got 5000"):
            tokenizer.token(5000)
        self.assertRaises(OverflowError, tokenizer.decode, [-1])

    def test_a_model_without_template_does_not_chat(self):
        with self.assertRaises(fracbit.InputError) as raised:
            self.model.chat("Hello")
        told = program("run", DEMO, "--chat", "-p", "Hello")
        self.assertEqual((told.returncode, told.stderr), (3, f"error: {raised.exception}\n"))
        self.assertRaises(
            fracbit.InputError, self.model.tokenizer.chat, [{"role": "user", "content": "Hello"}]
        )
        self.assertRaises(TypeError, self.model.chat, [("user", "Hello")])

    def test_refusals(self):
        model, Argument = self.model, fracbit.ArgumentError
        for ask, kind, words in [
            (lambda: model.generate(PROMPT, temperature=-1), Argument, "temperature"),
            (lambda: model.generate(PROMPT, top_p=0), Argument, "top_p"),
            (
                lambda: model.generate(PROMPT, kv=5),
                Argument,
                "kv: should be 16, 8, 6 or 4 bits, got 5",
            ),
            (
                lambda: model.generate("word " * 2000),
                Argument,
                "the prompt should fit the context of 512 tokens",
            ),
            (lambda: list(model.generate([5000])), fracbit.InputError, "5000"),
            (lambda: model.generate([]), fracbit.Error, "prompt"),
            (
                lambda: model.logits([1] * 513),
                Argument,
                "tokens: should fit the context of 512 tokens, got 513",
            ),
            (lambda: model.logits([5000]), fracbit.InputError, "5000"),
            (lambda: model.evaluate("a"), fracbit.InputError, "at least two tokens"),
            (lambda: model.evaluate("a b c", ctx=0), Argument, "--ctx: should be 1 to 512"),
        ]:
            with self.assertRaises(kind) as raised:
                ask()
            self.assertIn(words, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
