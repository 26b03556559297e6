"""What the packages `tokenizers`, `sentencepiece` and `mistral_common` make of hostile texts in every tokenizer of a folder. Writes JSON to OUT.

pip install tokenizers sentencepiece mistral_common; python3 published_tokenizers.py FOLDER OUT; the tests of this crate (published.rs) run it. In FOLDER is a
directory with tokenizer.json, tokenizer.model or tekken.json for each.
"""
import json
import os
import random
import sys

TEXTS = [
    "", " ", "  ", "\n", "\r\n\r\n", "\t \t", "a", "Hello, world!", " Hello", "Hello ", "  two  spaces  ", "I'm you're WE'LL it\u2019s don't",
    "1234567890", "3.14159e-10 0x1F 1,000,000", "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass", "https://example.com/a?b=c&d=%20#e",
    "na\u00efve caf\u00e9 cafe\u0301 \u00c5\u212b \ufb01\ufb02 \u1e9b\u0323 \ufdfa", "Stra\u00dfe \u0130stanbul \u01c5 \u03a3\u03c3\u03c2", "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3000\u5168\u89d2\uff21\uff22\uff23\uff11\uff12",
    "\u3053\u3093\u306b\u3061\u306f\u30ab\u30bf\u30ab\u30ca\uff76\uff85", "\uc548\ub155\ud558\uc138\uc694 \u1112\u1161\u11ab", "\u0645\u0631\u062d\u0628\u0627 \u0639\u064e\u0631\u064e\u0628\u064a \u05e9\u05dc\u05d5\u05dd", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u1780\u17d2\u1798", "\u041f\u0440\u0438\u0432\u0435\u0442 \u0393\u03b5\u03b9\u03ac",
    "\U0001f600\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea\U0001f3f4\U000e0067\U000e007f \u2764\ufe0f", "\u0000\u0001\u001b\u007f\u0085\u00a0\u00ad", "\u2028\u2029\u200b\u200e\u202e\ufeff\ufffd\ufffe", "\U0010ffff\U000f0000\ue000", "\u2581\u2581a \u2581", "a\u0300\u0301\u0302\u0303\u0304" * 5,
    "<s></s><unk><pad><mask>[CLS][SEP]", "<|endoftext|><|im_start|>user\nhi<|im_end|>", "<|begin_of_text|><|eot_id|> <|start_header_id|>x", "[INST] a [/INST]</s> <<SYS>>", "<bos><start_of_turn>user\nx<end_of_turn>\n", "<0x0A><0xFF> <0x41>", "<think>\n</think> <tool_call>",
    "a" * 300, " " * 100, "\n" * 50, "ab " * 100, "!?.,;:-_=+*/\\|@#$%^&()[]{}<>`~'\"", "--- *** === ...... \u2014\u2026\u201c\u201d\u00ab\u00bb", "x\u00a0y\u2003z\u3000w \u202f", "camelCaseWords SCREAMING_SNAKE kebab-case", "2\u00b2 \u00bd \u2167 \u0661\u0662\u0663 \U0001d7d9", "\r a\r\nb\rc\n\rd", "e\u0301 \u00e9 \u1ea5 a\u0302\u0301",
]


def more(seed=1):
    """Random mixtures of what breaks tokenizers."""
    rng = random.Random(seed)
    pieces = TEXTS + list(" \n\t'\"aZ9.,\u2581\u00a0\u0301\u200d") + ["the ", " of", "ing", "\u4e2d", "\U0001f980"]
    return ["".join(rng.choice(pieces)[:12] for _ in range(rng.randrange(1, 12))) for _ in range(300)]


def encoders(place, files):
    """Functions from text to ids, without special tokens, by the program that made the file."""
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        made = Tokenizer.from_file(os.path.join(place, "tokenizer.json"))
        made.no_truncation()
        made.no_padding()
        yield "tokenizers", lambda text: made.encode(text, add_special_tokens=False).ids
    elif "tokenizer.model" in files:
        import sentencepiece

        made = sentencepiece.SentencePieceProcessor(model_file=os.path.join(place, "tokenizer.model"))
        yield "sentencepiece", lambda text: made.encode(text)
    elif "tekken.json" in files:
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        made = Tekkenizer.from_file(os.path.join(place, "tekken.json"))
        yield "mistral_common", lambda text: made.encode(text, bos=False, eos=False)


def main():
    folder, out = sys.argv[1:]
    cases = []
    for place, _, files in sorted(os.walk(folder)):
        for program, encode in encoders(place, files):
            # These two know no special tokens in texts.
            texts = [t for t in TEXTS + more() if program == "tokenizers" or "<" not in t and "[" not in t]
            cases.append({"place": place, "program": program, "texts": [[text, encode(text)] for text in texts]})
    with open(out, "w", encoding="utf-8") as file:
        json.dump(cases, file)


if __name__ == "__main__":
    main()
